"""The configuration of JAX that changes what is traced or compiled.

It is read here, and handed to other threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar, cast

import jax

from bucketjit._jax import names
from bucketjit._jax.devices import device_name

_config = names.module("config")
_core = names.module("core")
_mesh = names.module("mesh")
_flags: Any = jax.config  # whose flags are public, and not typed
_T = TypeVar("_T")


def trace_context() -> Hashable:
    """Every configuration state that changes what is traced (x64, matmul precision, ...).

    Non-public because JAX offers no key of its configuration; it is the very key that ``jit``
    caches traces by (``config.trace_context``, since 0.4.36).
    """
    return _config.trace_context()


def thread_config() -> Hashable:
    """Every configuration state of this thread that changes what a compiled call does.

    Non-public because a context such as ``jax.debug_nans(True)`` holds for the thread that entered
    it, and JAX has no way to ask for all of them (states of ``config``, since 0.4.36).
    """
    return (
        _config.trace_context(),
        _flags.jax_debug_nans,
        _flags.jax_debug_infs,
        _flags.jax_transfer_guard_host_to_device,
        _flags.jax_transfer_guard_device_to_device,
        _flags.jax_transfer_guard_device_to_host,
    )


class ThreadConfig:
    """What contexts such as ``jax.enable_x64`` and ``jax.set_mesh`` have set for this thread.

    Another thread has none of it, and would trace and compile something else there. JAX has no
    way to hand it over (the local values of ``config`` and ``mesh``, since 0.4.36).
    """

    def __init__(self) -> None:
        self._context = _config.trace_context()
        self._local = [(config, config.get_local()) for config in _configs()]

    def run(self, work: Callable[..., _T], *args: object) -> _T:
        """Call ``work`` in this thread as it would be in the one that made this.

        Raises:
            RuntimeError: Something was set that cannot be handed over.
            Exception: Whatever ``work`` raises.
        """
        with ExitStack() as before:
            for config, value in self._local:
                if (now := config.get_local()) is not value:
                    before.callback(set_local, config, now)
                    set_local(config, value)
            if _config.trace_context() != self._context:
                raise RuntimeError(
                    "a context of jax.make_user_context holds for the thread that entered it; "
                    "compile outside of it, or in the call"
                )
            return work(*args)


UNSET = _config.config_ext.unset


@functools.cache
def _configs() -> tuple[Any, ...]:
    """Everything that a context can set, transformations aside."""
    contexts = [
        value
        for module in (_config, _mesh)
        for value in vars(module).values()
        if isinstance(value, _config.config_ext.Config)
    ]
    return tuple({id(c): c for c in [*_config.config_states.values(), *contexts]}.values())


def set_local(config: Any, value: Any) -> None:
    """Set the value that a state of the configuration has in this thread."""
    config.set_local(value)
    hook = getattr(config, "_update_thread_local_hook", None)
    if hook is not None:
        hook(None if value is UNSET else value)


def jit_disabled() -> bool:
    """Whether ``jax.disable_jit`` is in force (the public flag is not typed)."""
    return bool(_config.disable_jit.value)


def context_of_keys() -> Sequence[Any]:
    """`trace_context`, in values that are equal in another process.

    The environment of named axes is an object of its own (``core.AxisEnv``, since 0.4.36); outside
    of every mapping it is the empty one. A device (``jax.default_device``) is told by its number.
    """

    def told(value: object) -> Any:
        if value is _core.top_axis_env:
            return "no axes"
        return device_name(value) if isinstance(value, jax.Device) else value

    return list(map(told, cast(tuple[Any, ...], trace_context())))


def looks_for_nans() -> bool:
    """Whether JAX looks for NaNs or infinities in results (the flags are not typed)."""
    return bool(_flags.jax_debug_nans or _flags.jax_debug_infs)
