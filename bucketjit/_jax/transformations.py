"""The transformation that a call runs under (none, ``jit``, ``grad``, ...), and rules for it.

`bucketjit._runtime` defines primitives with these functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Primitive, nonempty_axis_env_DO_NOT_USE
from jax.interpreters import ad

from bucketjit._jax import names
from bucketjit._jax.config import UNSET, set_local

_ad = names.module("interpreters.ad")
_config = names.module("config")
_core = names.module("core")
_mesh = names.module("mesh")
_util = names.module("util")


def only_differentiated() -> bool:
    """Whether all transformations of the call are derivatives (``grad``, ``jvp``, ...), or none.

    No public name returns the transformations of a call.
    """
    trace = _core.trace_ctx.trace
    while _is_derivative(trace):
        trace = trace.parent_trace
    return trace is NO_TRACE[0] and not nonempty_axis_env_DO_NOT_USE()


def _is_derivative(trace: Any) -> bool:
    """Whether a trace is one of ``jvp`` or ``linearize``, whose class has no public name."""
    return type(trace).__module__ == ad.JVPTrace.__module__


@contextmanager
def named_axis(name: Hashable, size: int) -> Iterator[None]:
    """Let collectives name an axis of so many shards, as inside of ``pmap``.

    ``jax.make_jaxpr(axis_env=...)`` is the public way, for a whole trace only
    (``core.extend_axis_env_nd``, since 0.4.36).
    """
    with _core.extend_axis_env_nd([(name, size)]):
        yield


def innermost_transformation() -> str:
    """The innermost transformation that is no derivative, in words (see `only_differentiated`)."""
    trace = _core.trace_ctx.trace
    is_differentiated = False
    while _is_derivative(trace):
        trace, is_differentiated = trace.parent_trace, True
    if type(trace).__name__ == "BatchTrace":
        return "jax.vmap, jax.jacfwd or jax.hessian" if is_differentiated else "jax.vmap"
    return "jax.jit, scan or another function that JAX traces"


def only_shapes() -> bool:
    """Whether ``jax.eval_shape`` traces the code, which compiles nothing by itself.

    JAX keeps the trace: a later ``jit`` of the same function and types does not trace the code
    again. A ``jit`` between the two does not count, as its calls compile. No public name tells
    who traces, so the frames are looked at (``api.eval_shape`` and ``pjit.cache_miss``, since 0.4).
    """
    frame = inspect.currentframe()
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("jax._src.") and name in ("cache_miss", "eval_shape"):
            return name == "eval_shape"
        frame = frame.f_back
    return False


@contextmanager
def eval_context() -> Iterator[None]:
    """Leave all transformations, and an empty mesh (``core.eval_context``, since 0.4.36).

    The backward pass of ``grad`` sets the mesh that an equation was traced under, even an empty
    one. A mesh that is set is part of the key of ``jit``'s traces, so code in a backward pass would
    miss what was compiled outside of one. Hence an empty mesh is unset here, and set again
    afterwards. (JAX 0.12 does not distinguish the two. The state is
    ``config.abstract_mesh_context_manager``, since 0.5, in ``mesh`` since 0.11.2.)
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
    """Let JAX's caches reference parameters of this type weakly.

    JAX caches the result types of the last 2,048 equations by their parameters. Without this it
    keeps the parameters alive, and all they reference. No public name adds a type
    (``util.weakref_cache_key_types``, in 0.10 and 0.12).
    """
    _util.weakref_cache_key_types.add(kind)


def set_linearization(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Give a primitive a linearization rule (``ad.primitive_linearizations``, since 0.5).

    The public rule of forward mode does not know whether reverse mode runs it; this one does.
    Since 0.11.1 JAX expects a second kind of residuals, which is left empty. If this JAX expects
    any other number of values from a rule, the primitive gets none.
    """
    count = parts_of_a_linearization()
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
    """The number of values that this JAX expects from a linearization rule.

    It differs by version (4, or 5 since 0.11.1), and no public name has it. JAX's fallback rule is
    run on an identity to count them.
    """
    identity = jex_core.Primitive("identity")
    ad.primitive_jvps[identity] = lambda primals, tangents: (primals[0], tangents[0])
    try:
        with jax.core.eval_context():
            return len(_ad.fallback_linearize_rule(identity, True, [True], np.float32(0)))
    finally:
        del ad.primitive_jvps[identity]


def current_trace() -> Hashable:
    """The trace that records operations now (``core.trace_ctx``, since 0.4.36).

    It is a key for values that are made once per trace: a value of one trace cannot be used in
    another one. No public name distinguishes traces.
    """
    return _core.trace_ctx.trace


def _outermost_trace() -> Any:
    """The trace outside of every transformation."""
    with jax.core.eval_context():
        return _core.trace_ctx.trace


# The trace of this thread, as a state of the configuration. Outside every transformation its
# ``value`` is one of `NO_TRACE`. The check takes a sixth of the time of
# ``core.trace_state_clean``, and no leaf has to be searched for tracers. No transformation makes an
# axis environment without a trace. (Since 0.4.36; the value is None since 0.12.)
THREAD_TRACE = _core.trace_state_strong_ref

NO_TRACE = (_outermost_trace(), None)
