"""Neutral elements: the value that padding holds so that a reduction ignores it.

Each function maps a dtype to a scalar of this dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import dtypes

Identity = Callable[[Any], Any]


def zero(dtype: np.dtype[Any]) -> Any:
    """The neutral element of addition, bitwise or and bitwise xor (False for bool)."""
    return np.zeros((), dtype)


def one(dtype: np.dtype[Any]) -> Any:
    """The neutral element of multiplication."""
    return np.ones((), dtype)


def all_ones(dtype: np.dtype[Any]) -> Any:
    """The neutral element of bitwise and (True for bool)."""
    return np.array(True) if dtypes.issubdtype(dtype, np.bool_) else np.array(-1).astype(dtype)


def lowest(dtype: np.dtype[Any]) -> Any:
    """The neutral element of maximum: -inf where the dtype has one, else its smallest value."""
    return _extreme(dtype, -1)


def highest(dtype: np.dtype[Any]) -> Any:
    """The neutral element of minimum: +inf where the dtype has one, else its largest value."""
    return _extreme(dtype, 1)


def last(dtype: np.dtype[Any]) -> Any:
    """What nothing sorts after: NaN where the dtype has a positive one, else `highest`."""
    if dtypes.issubdtype(dtype, np.complexfloating):
        return np.array(complex(np.nan, np.nan), dtype)
    if dtypes.issubdtype(dtype, np.floating):
        # A dtype may lack NaN (then this is another number), or have a NaN that sorts first.
        nan = np.array(np.nan).astype(dtype)
        if np.isnan(nan.astype(np.float32)) and only_nan(dtype) is None:
            return nan
    return highest(dtype)


def only_nan(dtype: np.dtype[Any]) -> Any | None:
    """The one NaN of ``float8_*fnuz``, what would be -0: it comes first in their order."""
    return np.array(np.nan).astype(dtype) if dtype.name.endswith("fnuz") else None


def _extreme(dtype: np.dtype[Any], sign: int) -> Any:
    """The greatest value of a dtype for ``sign`` 1 and the smallest for -1, infinities included."""
    if dtypes.issubdtype(dtype, np.bool_):
        return np.array(sign > 0)
    if dtypes.issubdtype(dtype, np.integer):
        info = jnp.iinfo(dtype)
        return np.array(info.max if sign > 0 else info.min, dtype)
    if dtypes.issubdtype(dtype, np.complexfloating):
        return np.array(complex(sign * np.inf, sign * np.inf), dtype)
    # The conversion gives NaN or a finite number if the dtype has no infinity.
    infinity = np.array(sign * np.inf).astype(dtype)
    if np.isinf(infinity.astype(np.float32)):
        return infinity
    limits = jnp.finfo(dtype)
    return np.array(limits.max if sign > 0 else limits.min, dtype)
