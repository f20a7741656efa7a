"""Neutral elements: what padding must hold so that a fold does not see it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax

Identity = Callable[[Any], Any]


def zero(dtype: Any) -> Any:
    """The neutral element of addition, bitwise or and bitwise xor (False for bool)."""
    return np.zeros((), dtype)


def one(dtype: Any) -> Any:
    """The neutral element of multiplication."""
    return np.ones((), dtype)


def all_ones(dtype: Any) -> Any:
    """The neutral element of bitwise and (True for bool)."""
    return np.array(True) if dtypes.issubdtype(dtype, np.bool_) else np.array(-1).astype(dtype)


def lowest(dtype: Any) -> Any:
    """The neutral element of maximum: -inf where the dtype has one, else its smallest value."""
    return _extreme(dtype, -1)


def highest(dtype: Any) -> Any:
    """The neutral element of minimum: +inf where the dtype has one, else its largest value."""
    return _extreme(dtype, 1)


def last(dtype: Any) -> Any:
    """What nothing sorts after: NaN where the dtype has a positive one, else `highest`."""
    if dtypes.issubdtype(dtype, np.complexfloating):
        return np.array(complex(np.nan, np.nan), dtype)
    if dtypes.issubdtype(dtype, np.floating):
        nan = np.array(np.nan).astype(dtype)
        if np.isnan(nan.astype(np.float32)) and only_nan(dtype) is None:
            return nan
    return highest(dtype)


def only_nan(dtype: Any) -> Any | None:
    """The one NaN of ``float8_*fnuz``, what would be -0: it comes first in their order."""
    return np.array(np.nan).astype(dtype) if dtype.name.endswith("fnuz") else None


def without_overflow(x: Any, axes: Sequence[int], headroom: int) -> tuple[Any, Any]:
    """Numbers so small that what is computed of them on the way does not overflow.

    Args:
        x: Real or complex numbers.
        axes: Those along which numbers belong together.
        headroom: How many times larger what is computed may be.

    Returns:
        ``x`` times a power of two, which is exact, and what to multiply the results with. Both
        factors are 1 unless ``x`` is that large; of NaN and infinity they are 1 too.
    """
    exponent = math.ceil(math.log2(headroom))
    parts = [jnp.real(x), jnp.imag(x)] if jnp.iscomplexobj(x) else [x]
    sizes = [jnp.max(jnp.abs(part), axes, keepdims=True, initial=0) for part in parts]
    largest = functools.reduce(jnp.maximum, sizes)
    is_huge = largest > float(jnp.finfo(x.dtype).max) * 2.0**-exponent
    one = jnp.ones_like(largest)
    back = jnp.where(is_huge & jnp.isfinite(largest), one * 2.0**exponent, one)
    return scaled(x, 1 / back), back


def scaled(x: Any, factor: Any) -> Any:
    """Real or complex numbers times a real one: infinity times 0i would be NaN."""
    if jnp.iscomplexobj(x):
        return lax.complex(jnp.real(x) * factor, jnp.imag(x) * factor)
    return x * factor


def _extreme(dtype: Any, sign: int) -> Any:
    if dtypes.issubdtype(dtype, np.bool_):
        return np.array(sign > 0)
    if dtypes.issubdtype(dtype, np.integer):
        info = jnp.iinfo(dtype)
        return np.array(info.max if sign > 0 else info.min, dtype)
    if dtypes.issubdtype(dtype, np.complexfloating):
        return np.array(complex(sign * np.inf, sign * np.inf), dtype)
    infinity = np.array(sign * np.inf).astype(dtype)
    if np.isinf(infinity.astype(np.float32)):
        return infinity
    limits = jnp.finfo(dtype)
    return np.array(limits.max if sign > 0 else limits.min, dtype)
