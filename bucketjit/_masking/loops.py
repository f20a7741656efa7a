"""Data-dependent loops in bodies and branches that may not run.

XLA hoists a loop whose operands are the same in every step out of the loop around it:

    while i < n:                    y = x
        y = x                       while p(y): y = f(y)
        while p(y): y = f(y)   ->   while i < n:
        z = z + y                       z = z + y

If ``n == 0``, the hoisted loop runs nevertheless, perhaps on padding, and may never end there.
``jit`` does not meet this, because it knows the sizes and drops an outer loop without steps. In a
masked program ``n`` is a run-time number. `vmap` has the same effect: a body or branch that runs
for one row runs for all rows. So the predicate of an inner loop is joined (logical and) with the
condition under which the body or branch around it runs. That condition changes from step to step,
so XLA cannot hoist the loop.

The rules of loops and branches set the condition (`loops_only_while`) and read it
(`where_running`). It is held in a context variable, because the rule of the outer equation traces
the inner one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._jax.jaxprs import CALLS, bodies, name_of, varies

# Names of the primitives whose rules evaluate the programs among their parameters.
_CONTROL = CALLS | {
    *("while", "scan", "cond", "custom_linear_solve", "linear_call", "eval_jaxpr", "composite")
}

# A boolean scalar of the program: True if the body or branch that is being masked runs. None
# outside of bodies and branches.
_is_running: ContextVar[Any | None] = ContextVar("is_running", default=None)


@contextmanager
def loops_only_while(running: Array) -> Iterator[None]:
    """Restrict the loops that are masked inside the ``with`` block to ``running``."""
    token = _is_running.set(where_running(running))
    try:
        yield
    finally:
        _is_running.reset(token)


def where_running(predicate: Any) -> Any:
    """The predicate of a loop, made False in a body or branch that does not run."""
    around = _is_running.get()
    return predicate if around is None else jnp.logical_and(predicate, around)


def has_loop(jaxpr: Jaxpr) -> bool:
    """Whether an open jaxpr has a data-dependent loop, at any depth that the rules evaluate."""
    return any(name_of(eqn) == "while" or holds_loop(eqn) for eqn in jaxpr.eqns)


def holds_loop(eqn: JaxprEqn) -> bool:
    """Whether a program among the parameters of an equation has a data-dependent loop."""
    return name_of(eqn) in _CONTROL and any(map(has_loop, bodies(eqn)))


def has_loop_to_stop(eqn: JaxprEqn) -> bool:
    """Whether an equation needs its masking rule for a loop, even without symbolic sizes."""
    return (is_inside() and name_of(eqn) == "while") or holds_loop(eqn)


def is_inside() -> bool:
    """Whether the equation that is being masked is in a body or branch that may not run."""
    return _is_running.get() is not None


# --- shard types --------------------------------------------------------------------------------

# Types of values inside ``shard_map`` that say over which axes of the mesh a value varies.
#
#     before   c:f32[]{V:d} = pvary[axes=('d',)] b          the type of c: it varies over d
#     after    c:f32[] = b                                  a masked program has no such types
#
# A masked program has none, as masks and sizes are the same on all shards, and JAX would refuse to
# combine them with values that vary. So collectives that exist for these types are replaced by
# their rules, and programs with such types in them are traced anew.

#: Changes only the type of a value: over which axes it varies.
CASTS = frozenset(("pvary",))

#: Collectives whose results vary over fewer axes, and the ones for values without such types.
WITHOUT_TYPES = {"psum_invariant": "psum", "all_gather_invariant": "all_gather"}


def needs_retyping(eqn: JaxprEqn) -> bool:
    """Whether an equation cannot run as traced, because types in it say what varies."""
    name = name_of(eqn)
    if name in CASTS or name in WITHOUT_TYPES:
        return True
    typed = (atom for body in bodies(eqn) for atom in (*body.invars, *body.outvars))
    return name != "shard_map" and any(map(varies, typed))
