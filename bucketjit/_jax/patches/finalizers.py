"""Finalizers of tracers, which keep a failed trace and its constants alive."""

from __future__ import annotations

import weakref
from typing import Any

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Reasons, patch

_FAILED = Reasons(
    why="JAX has weakref.finalize hold the trace as long as the tracer of a constant is there, "
    "which the trace holds in turn. A trace that fails would stay for ever, and with it the arrays "
    "that the function closes over.",
    since="interpreters.partial_eval.finalize, 0.10 and 0.12",
    delete_when="a trace that fails is freed with its constants",
)


@patch(names.module("interpreters.partial_eval"), "finalize", _FAILED)
def weak_finalizers(original: Any, tracer: Any, method: Any, *args: Any) -> Any:
    """Finalizers of the tracers of constants reference their trace weakly."""
    weak = weakref.WeakMethod(method)

    def called(*args: Any) -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    return original(tracer, called, *args)
