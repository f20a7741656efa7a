"""Transposes of real Fourier transforms along axes of symbolic size."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.jaxprs import value_of_size
from bucketjit._jax.patches.patch import Reasons, patch

_fft = names.module("lax.fft")

_PARITY = Reasons(
    why="JAX's own ask in Python whether the length is even, which makes one program for even "
    "lengths and one for odd ones.",
    since="lax.fft, 0.2",
    delete_when="the transposes of real transforms trace without a comparison of sizes",
)


def _weight(half: Any, lengths: Any) -> Any:
    """2 for each frequency that stands for itself and its mirror image, 1 for the others.

    The last axis of ``half`` is the half spectrum. Single are frequency 0 and, for even lengths,
    the last one.
    """
    k = jax.lax.broadcasted_iota(np.int32, half.shape, half.ndim - 1)
    single = (k == 0) | (2 * k == value_of_size(lengths[-1]))
    return jax.numpy.where(single, 1.0, 2.0).astype(half.dtype)


# The inverse transform of ``h`` is the real part of the sum of ``weight * h * exp(...)``, divided
# by the number of elements. The forward one has neither the weight nor the divisor.
@patch(_fft, "_rfft_transpose", _PARITY)
def _rfft(original: Any, t: Any, lengths: Any) -> Any:
    if not is_symbolic_dim(lengths[-1]):
        return original(t, lengths)
    spectrum = jax.lax.conj(t) / _weight(t, lengths)
    return value_of_size(math.prod(lengths)) * jax.lax.fft(spectrum, "IRFFT", lengths)


@patch(_fft, "_irfft_transpose", _PARITY)
def _irfft(original: Any, t: Any, lengths: Any) -> Any:
    if not is_symbolic_dim(lengths[-1]):
        return original(t, lengths)
    half = jax.lax.fft(t, "RFFT", lengths)
    return jax.lax.conj(_weight(half, lengths) * half / value_of_size(math.prod(lengths)))


REAL_FFT_TRANSPOSES = (_rfft, _irfft)
"""Gradients of real transforms find at run time which frequencies stand for two."""
