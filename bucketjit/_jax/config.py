"""Read the configuration of JAX that changes what is traced or compiled.

`ThreadConfig` carries it to other threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar, cast

import jax
from jax.extend.core import nonempty_axis_env_DO_NOT_USE

from bucketjit._jax import names
from bucketjit._jax.arrays import device_name

_api = names.module("api")
_config = names.module("config")
_core = names.module("core")
_mesh = names.module("mesh")
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

    def told(value: object) -> Any:
        if value is _core.trace_ctx.axis_env and not nonempty_axis_env_DO_NOT_USE():
            return "no axes"
        return device_name(value) if isinstance(value, jax.Device) else value

    return list(map(told, cast(tuple[Any, ...], trace_context())))


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
