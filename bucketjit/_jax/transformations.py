"""The transformation that a call runs under: none, ``jit``, ``grad``, ``vmap`` and so on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Primitive
from jax.interpreters import ad

from bucketjit._jax import names
from bucketjit._jax.config import UNSET, set_local
from bucketjit._jax.names import Without, lacking

_ad = names.module("interpreters.ad")
_config = names.module("config")
_core = names.module("core")
_mesh = names.module("mesh")
_util = names.module("util")


def only_differentiated() -> bool:
    """True inside ``grad``, ``jvp`` and the like, as many as there are, but nothing else.

    Non-public: nothing tells which transformations a call is under (``ad.JVPTrace`` and
    ``ad.LinearizeTrace``, since 0.4.36 and 0.5).
    """
    trace = _core.trace_ctx.trace
    while isinstance(trace, ad.JVPTrace | _ad.LinearizeTrace):
        trace = trace.parent_trace
    return trace is _core.eval_trace and _core.trace_ctx.axis_env is _core.top_axis_env


@contextmanager
def eval_context() -> Iterator[None]:
    """Leave all transformations for a while (``core.eval_context``, since 0.4.36).

    The backward pass of ``grad`` sets the mesh that an equation was traced under, also where there
    was none, and what is set is part of what ``jit`` knows its traces by. So an empty one is left,
    too: what runs here finds what was compiled outside of a backward pass. (JAX 0.12 takes unset
    for empty; ``config.abstract_mesh_context_manager``, since 0.5, in ``mesh`` since 0.11.2.)
    """
    name = "abstract_mesh_context_manager"
    mesh: Any = getattr(_config, name, None) or getattr(_mesh, name)
    local = mesh.get_local()
    is_empty = isinstance(local, jax.sharding.AbstractMesh) and local.empty
    with jax.core.eval_context():
        if is_empty:
            set_local(mesh, UNSET)
        try:
            yield
        finally:
            if is_empty:
                set_local(mesh, local)


def hold_weakly(kind: type) -> None:
    """Let JAX forget equations whose parameters are of this kind when those are gone.

    It keeps the result types of 2,048 equations by their parameters, and would keep what those
    hold with them (``util.weakref_cache_key_types``, in 0.10 and 0.12).
    """
    if not lacking(Without.FORGETTING):
        _util.weakref_cache_key_types.add(kind)


def set_linearization(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Give a primitive a rule that is told whether reverse mode asks (``ad``, since 0.5).

    The public rule of forward mode does not know. The rule gets whether reverse mode asks, which
    arguments have tangents and the arguments; it returns the results, which of them have tangents,
    residuals, and a function of the residuals and the tangents that gives the tangents of the
    results; or None for what JAX does without the rule. Since 0.11.1 there is a second kind of
    residuals, which is left empty. Where JAX has something else in their place, it does without
    the rule.
    """
    count = 0 if lacking(Without.GRADIENTS) else parts_of_a_linearization()
    if count not in (4, 5):
        return

    def linearize(
        in_reverse: bool, nonzero: Sequence[bool], *primals: object, **params: object
    ) -> Any:
        found = rule(in_reverse, nonzero, *primals, **params)
        if found is None:
            return _ad.fallback_linearize_rule(primitive, in_reverse, nonzero, *primals, **params)
        outs, with_tangent, residuals, linear = found
        if count == 4:
            return outs, with_tangent, residuals, linear
        return outs, with_tangent, residuals, None, lambda r, _, *tangents: linear(r, *tangents)

    _ad.primitive_linearizations[primitive] = linearize


def parts_of_a_linearization() -> int:
    """How many values a linearization rule returns: as many as JAX's own rule for the identity."""
    identity = jex_core.Primitive("identity")
    ad.primitive_jvps[identity] = lambda primals, tangents: (primals[0], tangents[0])
    try:
        with jax.core.eval_context():
            return len(_ad.fallback_linearize_rule(identity, True, [True], np.float32(0)))
    finally:
        del ad.primitive_jvps[identity]


def current_trace() -> Hashable:
    """The trace that operations are recorded in now (``core.trace_ctx``, since 0.4.36).

    Non-public because nobody else need tell them apart; a value made in one trace may be used
    again in the same one, but never in another.
    """
    return _core.trace_ctx.trace


# What ``THREAD_TRACE.value`` is outside every transformation: ``core.trace_state_clean``, six times
# faster, and no tracer has to be looked for among all leaves.
# (Since 0.4.36, None since 0.12. No transformation makes an axis environment without a trace.)
THREAD_TRACE = _core.trace_state_strong_ref

NO_TRACE = (_core.eval_trace, None)
