"""Finalizers of tracers, which keep a failed trace and its constants alive."""

from __future__ import annotations

import weakref
from typing import Any

from bucketjit._jax import names
from bucketjit._jax.patches.patch import patch


@patch(names.module("interpreters.partial_eval"), "finalize")
def weak_finalizers(original: Any, tracer: Any, method: Any, *args: Any) -> Any:
    """Finalizers of the tracers of constants reference their trace weakly.

    JAX has weakref.finalize hold the trace as long as the tracer of a constant is there, which the
    trace holds in turn. A trace that fails would stay for ever, and with it the arrays that the
    function closes over. Since interpreters.partial_eval, 0.10. Until such a trace is freed.
    """
    weak = weakref.WeakMethod(method)

    def called(*args: Any) -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    return original(tracer, called, *args)
