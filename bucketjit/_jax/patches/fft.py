"""Fourier transforms along axes of symbolic size, and their transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.convolution import OperatorOfSizes
from bucketjit._jax.patches.patch import Patch

_core = names.module("core")
_lax_fft = names.module("lax.fft")
_numpy_fft = names.module("numpy.fft")


def fft_lengths() -> list[Patch]:
    """``jnp.fft`` accepts lengths that are symbolic.

    JAX rejects them (``numpy.fft``, since 0.2), though the primitive takes them.
    """
    return [
        Patch(
            _numpy_fft,
            "operator",
            OperatorOfSizes(),
            why="The primitive takes symbolic lengths; operator.index does not.",
            since="numpy.fft, 0.2",
            delete_when="jax.numpy.fft.fft takes a symbolic length",
        )
    ]


def real_fft_transposes() -> list[Patch]:
    """Gradients of real transforms find at run time which frequencies stand for two.

    JAX's own decide it while they trace (``lax.fft``, since 0.2).
    """
    to_half, from_half = _lax_fft._rfft_transpose, _lax_fft._irfft_transpose

    def weight(half: Any, lengths: Any) -> Any:
        """2 for each frequency that stands for itself and its mirror image, 1 for the others.

        The last axis of ``half`` is the half spectrum. Single are frequency 0 and, for even
        lengths, the last one.
        """
        k = jax.lax.broadcasted_iota(np.int32, half.shape, half.ndim - 1)
        single = (k == 0) | (2 * k == _core.dimension_as_value(lengths[-1]))
        return jax.numpy.where(single, 1.0, 2.0).astype(half.dtype)

    # The inverse transform of ``h`` is the real part of the sum of ``weight * h * exp(...)``,
    # divided by the number of elements. The forward one has neither the weight nor the divisor.
    def rfft_transpose(t: Any, lengths: Any) -> Any:
        if not is_symbolic_dim(lengths[-1]):
            return to_half(t, lengths)
        spectrum = jax.lax.conj(t) / weight(t, lengths)
        return _product(lengths) * jax.lax.fft(spectrum, "IRFFT", lengths)

    def irfft_transpose(t: Any, lengths: Any) -> Any:
        if not is_symbolic_dim(lengths[-1]):
            return from_half(t, lengths)
        half = jax.lax.fft(t, "RFFT", lengths)
        return jax.lax.conj(weight(half, lengths) * half / _product(lengths))

    reasons: dict[str, Any] = {
        "why": "JAX's own ask in Python whether the length is even, which makes one program for "
        "even lengths and one for odd ones.",
        "since": "lax.fft, 0.2",
        "delete_when": "the transposes of real transforms trace without a comparison of sizes",
    }
    return [
        Patch(_lax_fft, "_rfft_transpose", rfft_transpose, **reasons),
        Patch(_lax_fft, "_irfft_transpose", irfft_transpose, **reasons),
    ]


def _product(sizes: Sequence[Any]) -> Any:
    total = 1
    for size in sizes:
        total = total * size
    return _core.dimension_as_value(total)
