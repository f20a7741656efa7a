"""Count what XLA really compiles, so that the examples measure instead of claiming."""

from typing import Any

import jax

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts every XLA compilation of the process from its creation on.

    JAX reports each one as a monitoring event, whoever asked for it: `jax.jit`, `bucketjit.jit`
    or a stray `jnp.pad`. Nothing can be compiled without being counted.

    >>> counter = CompileCounter()
    >>> before = counter.compiles
    >>> _ = jax.jit(lambda x: x + 1)(1.0)
    >>> counter.compiles - before
    1
    """

    def __init__(self) -> None:
        self.compiles = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def _on_duration(self, event: str, duration: float, **_: Any) -> None:
        if event == _BACKEND_COMPILE:
            self.compiles += 1
