"""What JAX keeps for a thread and traces by: its configuration, and the transformation it is in.

`ThreadConfig` carries the configuration to other threads. `bucketjit._runtime` defines primitives
with the rules for transformations (``jit``, ``grad``, ...).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Primitive, nonempty_axis_env_DO_NOT_USE
from jax.interpreters import ad

from bucketjit._jax import names
from bucketjit._jax.arrays import device_name

_ad = names.module("interpreters.ad")
_api = names.module("api")
_config = names.module("config")
_core = names.module("core")
_mesh = names.module("mesh")
_util = names.module("util")
_flags: Any = jax.config  # its flags are public, but have no types
_T = TypeVar("_T")

# Contexts that distinguish traces in JAX's caches. Each is a part of `trace_context` once it is
# made, so both are made here, before any call has a key.
unshared_keys = jax.make_user_context(None)
shard_keys = jax.make_user_context(None)


def trace_context() -> Hashable:
    """Every configuration state that changes what is traced (x64, matmul precision, ...).

    No public function returns a key of the configuration. ``jit`` caches traces by this one
    (``config.trace_context``, since 0.4.36).
    """
    return _config.trace_context()


_NO_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())


def outside_of_meshes() -> AbstractContextManager[Any]:
    """A context without the mesh of ``jax.set_mesh``, for programs on other devices."""
    is_set = not jax.sharding.get_abstract_mesh().empty
    return jax.set_mesh(_NO_MESH) if is_set else nullcontext()


class ThreadConfig:
    """The states that contexts such as ``jax.enable_x64`` and ``jax.set_mesh`` set in this thread.

    Another thread does not see them, so it would trace and compile another program. No public
    function hands them over (the local values of ``config`` and ``mesh``, since 0.4.36).
    """

    def __init__(self) -> None:
        self._context = _config.trace_context()
        self._local = [(config, config.get_local()) for config in _configs()]

    def run(self, work: Callable[..., _T], *args: object) -> _T:
        """Call ``work`` in this thread, under the configuration of the thread that made this."""
        with same_nan_checks(), ExitStack() as before:
            for config, value in self._local:
                if (now := config.get_local()) is not value:
                    before.callback(set_local, config, now)
                    set_local(config, value)
            # Contexts of users have no local value that could be set here.
            if _config.trace_context() != self._context:
                raise RuntimeError(
                    "a context of jax.make_user_context holds for the thread that entered it; "
                    "compile outside of it, or in the call"
                )
            return work(*args)


UNSET = _config.config_ext.unset  # the local value of a state that this thread has not set


@functools.cache
def _configs() -> tuple[Any, ...]:
    """Every state that a context can set, except for transformations; each once."""
    contexts = [
        value
        for module in (_config, _mesh)
        for value in vars(module).values()
        if isinstance(value, _config.config_ext.Config)
    ]
    return tuple({id(c): c for c in [*_config.config_states.values(), *contexts]}.values())


def set_local(config: Any, value: Any) -> None:
    """Set the value of a state of the configuration in this thread.

    The public contexts only set it for a ``with`` block (``set_local``, since 0.4.36).
    """
    config.set_local(value)
    hook = getattr(config, "_update_thread_local_hook", None)
    if hook is not None:
        hook(None if value is UNSET else value)


def jit_disabled() -> bool:
    """Whether ``jax.disable_jit`` is active (the public flag has no type)."""
    return bool(_flags.jax_disable_jit)


def context_of_keys() -> Sequence[Any]:
    """`trace_context` in values that are equal in another process, for the keys of files.

    Two values are replaced. The empty environment of named axes (``core.AxisEnv``, since 0.4.36),
    which holds outside of every mapping, becomes a text. A device (``jax.default_device``) becomes
    its platform and number.
    """

    def plain(value: object) -> Any:
        if value is _core.trace_ctx.axis_env and not nonempty_axis_env_DO_NOT_USE():
            return "no axes"
        return device_name(value) if isinstance(value, jax.Device) else value

    return list(map(plain, cast(tuple[Any, ...], trace_context())))


def without_leak_checks() -> AbstractContextManager[Any]:
    """A context in which ``jax_check_tracer_leaks`` is off (`jax.checking_leaks` turns it on)."""
    # The public context is a partial application, to True.
    context: AbstractContextManager[Any] = jax.checking_leaks.func(False)
    return context


def looks_for_nans() -> bool:
    """Whether JAX looks for NaNs or infinities in results (the public flags have no types)."""
    return bool(_flags.jax_debug_nans or _flags.jax_debug_infs)


@contextmanager
def same_nan_checks() -> Iterator[None]:
    """A context after which results of this thread are looked through for NaNs as before it.

    The end of ``jax.debug_nans(False)``, which JAX enters as it lowers a program, leaves the thread
    without the check that the configuration asks for (``api._post_hook_state``, since 0.6).
    """
    check = _api._post_hook_state
    before = check.get_local()
    try:
        yield
    finally:
        check.set_local(before)


def only_differentiated() -> bool:
    """Whether all transformations of the call are derivatives (``grad``, ``jvp``, ...), or none.

    No public name returns the transformations of a call.
    """
    return _undifferentiated()[0] is NO_TRACE[0] and not nonempty_axis_env_DO_NOT_USE()


def _undifferentiated() -> tuple[Any, bool]:
    """The trace around derivatives, and whether there are any: those of ``jvp`` and ``linearize``.

    Their class has no public name.
    """
    trace = innermost = _core.trace_ctx.trace
    while type(trace).__module__ == ad.JVPTrace.__module__:
        trace = trace.parent_trace
    return trace, trace is not innermost


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
    trace, is_differentiated = _undifferentiated()
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
        linearized = rule(in_reverse, nonzero, *primals, **params)
        if linearized is None:
            return _ad.fallback_linearize_rule(primitive, in_reverse, nonzero, *primals, **params)
        outs, with_tangent, residuals, linear = linearized
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
    with jax.core.eval_context():
        return _core.trace_ctx.trace


# The trace of this thread, as a state of the configuration. Outside every transformation its
# ``value`` is one of `NO_TRACE`. The check takes a sixth of the time of
# ``core.trace_state_clean``, and no leaf has to be searched for tracers. No transformation makes an
# axis environment without a trace. (Since 0.4.36; the value is None since 0.12.)
THREAD_TRACE = _core.trace_state_strong_ref

NO_TRACE = (_outermost_trace(), None)
