"""Calls of functions that compute sizes: runs without ``jit``.

``jit`` cannot trace such a function at its exact shape, so the function itself runs there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from bucketjit._arrays.results import as_numpy, as_padded
from bucketjit._config import Out
from bucketjit._jax.patches.patch import Noticing, SizeIsComputed
from bucketjit._raised import text_of
from bucketjit._tracing.call import Call
from bucketjit.errors import MaskingError, SelectionError

if TYPE_CHECKING:
    from bucketjit._tracing.signature import Signature

OF_TRACERS = (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError)

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
        is_presumed = call.program is not None and call.program.presumed
        if is_presumed or getattr(call.refusal, "computes_sizes", False):
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
