"""Calls of functions that compute sizes: runs that are repeated, and runs without ``jit``.

A decision on a computed size (``if y.shape[0] > 2``) is traced for presumed sizes. A run that
returns others is dropped, and the call runs again by a program for these. As ``jit`` cannot trace
such a function at its exact shape, the function itself runs there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from bucketjit._arrays.results import as_numpy, as_padded
from bucketjit._compile.computed_results import SizesDiffer
from bucketjit._config import Out
from bucketjit._ir.open_sizes import Noticing, SizeIsComputed
from bucketjit._raised import text_of
from bucketjit._tracing.call import Call
from bucketjit.errors import MaskingError, SelectionError

if TYPE_CHECKING:
    from bucketjit._tracing.signature import Signature

MAX_RUNS_AGAIN = 6  # after the first run of a call

OF_TRACERS = (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError)

_UNSETTLED = MaskingError(
    f"its decisions depend on computed sizes, which none of {MAX_RUNS_AGAIN + 1} programs fits",
    "decide by fewer sizes, or with jnp.where",
)


def run_again(
    differ: SizesDiffer,
    call: Call,
    serve: Callable[[Call], Any],
    fall_back: Callable[[MaskingError], Any],
) -> Any:
    """Run a call by the program for the computed sizes that its run has returned."""
    computed: Mapping[str, int] = {}
    for _ in range(MAX_RUNS_AGAIN):
        # They are right up to the first decision that was taken otherwise, so this converges.
        computed = {**computed, **differ.computed}
        again = call.resolved(call.signature.resolve_again(call, call.shapes, computed))
        try:
            return serve(again)
        except SizesDiffer as other:
            differ = other  # after this block, errors of the next run do not show it
    return fall_back(_UNSETTLED)


NOT_PADDED = MaskingError(
    "it computes a size, and no axis is open",
    "open an axis in dynamic_axes, or leave dynamic_axes out",
)


class EagerSignatures:
    """The signatures whose function ``jit`` cannot trace, as it computes sizes."""

    def __init__(self) -> None:
        self._found: weakref.WeakSet[Signature] = weakref.WeakSet()

    def is_eager(self, signature: Signature) -> bool:
        """Whether the function runs without ``jit`` for arguments of a signature."""
        return signature in self._found

    def compiled(self, call: Call, compile: Callable[[], Any]) -> Any | None:
        """What compiles the exact shape of a call; None if the function runs without ``jit``."""
        if getattr(call.refusal, "computes_sizes", False):
            self._found.add(call.signature)
        if call.signature in self._found:
            return None
        try:
            with Noticing().active():
                return compile()
        except SizeIsComputed:
            self._found.add(call.signature)
            return None


def run_eagerly(call: Call, out: Out, reason: str | None) -> Any:
    """Run the function of a call without ``jit``."""
    from bucketjit._compile.bodies import eagerly

    try:
        result = eagerly(call)
    except (IndexError, TypeError, ValueError) as error:
        if reason is None:
            raise
        told: Exception = error
        if isinstance(error, OF_TRACERS) or "Tracer" in text_of(error):
            told = SelectionError(reason, "eager JAX cannot run it either; use jnp.where there")
        told.add_note(f"bucketjit runs the function without jit, because: {reason}")
        if told is error:
            raise
        raise told from error
    if out is Out.JAX:
        return result
    return jax.tree_util.tree_map(as_numpy if out is Out.NUMPY else as_padded, result)
