"""Loops that end by data, in bodies and branches that may not run.

XLA moves a loop whose operands are the same in every step in front of the loop around it:

    while i < n:                    y = x
        y = x                       while p(y): y = f(y)
        while p(y): y = f(y)   ->   while i < n:
        z = z + y                       z = z + y

With ``n == 0`` the inner loop still runs, perhaps on padding, and may not end there. ``jit`` knows
its sizes and drops an outer loop without a step; in a masked program ``n`` is a run-time number.
Under `vmap`, a body or a branch that runs for one row runs for all of them. So the predicate of
such a loop is joined with that of what is around it, which changes from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._jax.jaxprs import bodies
from bucketjit._jax.primitives import CALLS, name_of

# Names of the primitives whose rules evaluate the programs among their parameters.
_CONTROL = CALLS | {
    *("while", "scan", "cond", "custom_linear_solve", "linear_call", "eval_jaxpr", "composite"),
}

# Whether the body or branch that is being masked runs: a boolean scalar of the program. None
# outside of bodies and branches.
_is_running: ContextVar[Any | None] = ContextVar("is_running", default=None)


@contextmanager
def loops_only_while(running: Array) -> Iterator[None]:
    """Let the loops that are masked inside run only where ``running``, a boolean scalar, holds."""
    token = _is_running.set(_and_around(running))
    try:
        yield
    finally:
        _is_running.reset(token)


def where_running(predicate: object) -> Any:
    """The predicate of a loop, False in a body or branch that does not run."""
    return _and_around(predicate)


def _and_around(condition: Any) -> Any:
    around = _is_running.get()
    return condition if around is None else jnp.logical_and(condition, around)


def has_loop(jaxpr: Jaxpr) -> bool:
    """Whether an open jaxpr has a loop by data, at any depth that the rules evaluate."""
    return any(_is_loop(eqn) or holds_loop(eqn) for eqn in jaxpr.eqns)


def holds_loop(eqn: JaxprEqn) -> bool:
    """Whether a program among the parameters of an equation has a loop by data."""
    return name_of(eqn) in _CONTROL and any(map(has_loop, bodies(eqn)))


def has_loop_to_stop(eqn: JaxprEqn) -> bool:
    """Whether an equation without symbolic sizes needs its rule all the same, for its loops."""
    return (is_inside() and _is_loop(eqn)) or holds_loop(eqn)


def _is_loop(eqn: JaxprEqn) -> bool:
    return name_of(eqn) == "while"


def is_inside() -> bool:
    """Whether the equation that is being masked is in a body or branch that may not run."""
    return _is_running.get() is not None
