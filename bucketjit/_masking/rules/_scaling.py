"""Scaling of numbers near the end of their dtype, before a rule computes larger numbers of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def without_overflow(x: Array, axes: Sequence[int], headroom: int) -> tuple[Any, Any]:
    """Numbers so small that what is computed of them on the way does not overflow."""
    exponent = math.ceil(math.log2(max(headroom, 1)))
    parts = [jnp.real(x), jnp.imag(x)] if jnp.iscomplexobj(x) else [x]
    sizes = [jnp.max(jnp.abs(part), axes, keepdims=True, initial=0) for part in parts]
    largest = functools.reduce(jnp.maximum, sizes)
    is_huge = largest > float(jnp.finfo(x.dtype).max) * 2.0**-exponent
    one = jnp.ones_like(largest)
    back = jnp.where(is_huge & jnp.isfinite(largest), one * 2.0**exponent, one)
    return scaled(x, 1 / back), back


def scaled(x: Array, factor: Array) -> Any:
    """Real or complex numbers times a real one: infinity times 0i would be NaN."""
    if jnp.iscomplexobj(x):
        return lax.complex(jnp.real(x) * factor, jnp.imag(x) * factor)
    return x * factor
