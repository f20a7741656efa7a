"""Finalizers that keep failed traces alive."""

from __future__ import annotations

import weakref
from typing import Any

from bucketjit._jax import names

_partial_eval = names.module("interpreters.partial_eval")


def weak_finalizers() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` for what lets go of a trace's constants, with their tracers.

    JAX has ``weakref.finalize`` hold the trace as long as the tracer of a constant is there, which
    the trace holds in turn: one that fails, by a decision about sizes, say, would stay for ever,
    and the arrays that the function closed over with it (``partial_eval.finalize``, 0.10 and 0.12).
    """

    def finalize(tracer: Any, method: Any, *args: Any) -> Any:
        weak = weakref.WeakMethod(method)

        def called(*args: Any) -> None:
            alive = weak()
            if alive is not None:
                alive(*args)

        return weakref.finalize(tracer, called, *args)

    return [(_partial_eval, "finalize", finalize)]
