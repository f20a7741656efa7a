"""Maxima and minima that XLA's CPU backend does not hand to its library YNN, which drops NaN.

Of 4,096 elements or more, `jnp.max` of floats loses a NaN among them there, in `jax.jit` too
(jaxlib 0.10.2 and 0.12; of `bfloat16` and `float16` the minimum does). Padding would take a call of
3,000 elements to a bucket where that is so, and its NaN with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bucketjit import _jax

# From here on YNN may be asked; fewer elements than the 4,096 measured, as it may be another number
# of another version. As integers they are as fast there.
_FEWEST = 1024


def may_lose_nan(filled: Any) -> bool:
    """Whether XLA's CPU backend may lose a NaN of this operand, which is not complex."""
    is_float = jnp.issubdtype(filled.dtype, np.floating) and filled.dtype.itemsize > 1
    return bool(is_float and filled.size >= _FEWEST)


def keeping_nan(
    fold: Callable[..., Any],
    fold_of_ints: Callable[..., Any],
    nan_is_most: bool,
    filled: Any,
    *starts: Any,
) -> Any:
    """A maximum or minimum that keeps NaN, however many elements there are.

    Args:
        fold: Folds the operand.
        fold_of_ints: Folds integers in its place.
        nan_is_most: Whether it is the maximum.
        filled: The operand, filled; not complex.
        *starts: What the folds take beside it.
    """

    def by_bits(*values: Any) -> Any:
        ordered = fold_of_ints(*(_to_ints(x, nan_is_most) for x in values))
        return _to_floats(ordered, filled.dtype)

    return _jax.by_platform(filled, *starts, cpu=by_bits, default=fold)


@functools.partial(jax.jit, static_argnums=1)
def _to_ints(values: Any, nan_is_most: bool) -> Any:
    """Integers in the order of the floats; NaN comes last or first."""
    bits = lax.bitcast_convert_type(values, f"int{values.dtype.itemsize * 8}")
    info = jnp.iinfo(bits.dtype)
    ordered = _mirrored(bits)
    nan = jnp.full_like(ordered, info.max if nan_is_most else info.min)
    return lax.select(values != values, nan, ordered)


@functools.partial(jax.jit, static_argnums=1)
def _to_floats(ordered: Any, dtype: Any) -> Any:
    """The floats that `_to_ints` took; the first and the last integer are NaN."""
    return lax.bitcast_convert_type(_mirrored(ordered), dtype)


def _mirrored(bits: Any) -> Any:
    """Of negative floats the bits grow as the number falls: turned round, and turned back."""
    magnitude = lax.full_like(bits, jnp.iinfo(bits.dtype).max)
    return lax.select(bits < 0, bits ^ magnitude, bits)
