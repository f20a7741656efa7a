"""Operations on padded arrays that masking rules share: take, cut, extend, shift and select."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from bucketjit._jax.arrays import explicit_sharding, key_impl
from bucketjit._jax.devices import by_platform


@custom_vmap
def in_every_row(condition: object) -> Any:
    """A scalar condition that under `vmap` holds if it does in all rows: its branch stays one."""
    return condition


@in_every_row.def_vmap
def _(axis_size: int, batched: Sequence[bool], condition: Any) -> tuple[Any, bool]:
    return in_every_row(jnp.all(condition) if batched[0] else condition), False


def select(mask: Any, array: Array, value: Any) -> Any:
    """``array`` where ``mask``, else ``value``; works for every dtype, typed keys included."""
    if is_key(array):
        data = jax.random.key_data(array)
        if hasattr(value, "dtype") and is_key(value):
            value = jax.random.key_data(value)
        wide = mask.reshape(*mask.shape, *(1,) * (data.ndim - mask.ndim))
        return jax.random.wrap_key_data(select(wide, data, value), impl=key_impl(array.dtype))
    sharding = explicit_sharding(array)
    if not hasattr(value, "dtype") or value.ndim == 0:
        value = lax.full(array.shape, value, array.dtype, sharding=sharding)
    if value.dtype != array.dtype:
        value = lax.convert_element_type(value, array.dtype)
    like = array.shape, sharding
    return lax.select_n(_broadcast(mask, *like), _broadcast(value, *like), array)


def is_key(array: Array) -> bool:
    """Whether an array holds keys of random numbers."""
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def _broadcast(array: Any, shape: tuple[int, ...], sharding: Any) -> Any:
    """An array of this shape, sharded like what it is put together with, if that says how."""
    if array.shape != shape:
        array = jnp.broadcast_to(array, shape)
    return array if sharding is None else jax.sharding.reshard(array, sharding)


def take(array: Array, index: Any, axis: int) -> Any:
    """Positions ``index`` (a vector) along ``axis``; indices out of range are clamped."""
    sharding = explicit_sharding(array)
    if sharding is None:
        return jnp.take(array, index, axis=axis, mode="clip")
    at = array.at[(*(slice(None),) * (axis % array.ndim), index)]
    return at.get(mode="clip", out_sharding=sharding)


def crop(array: Array, axis: int, size: int) -> Any:
    """Give ``axis`` this size: cut off its end, or extend it with zeros (or zero keys)."""
    now = array.shape[axis]
    if now > size:
        return lax.slice_in_dim(array, 0, size, axis=axis)
    if now < size:
        return extend(array, axis, 0, size - now)
    return array


def extend(array: Array, axis: int, low: int, high: int) -> Any:
    """Add zeros before and after ``axis``."""
    if low == 0 and high == 0:
        return array
    if is_key(array):
        data = extend(jax.random.key_data(array), axis, low, high)
        return jax.random.wrap_key_data(data, impl=key_impl(array.dtype))
    config = [(low, high, 0) if i == axis else (0, 0, 0) for i in range(array.ndim)]
    return lax.pad(array, lax.full((), 0, array.dtype), config)


def shift_left(array: Array, axis: int, by: Any, size: int | None = None) -> Any:
    """``out[i] = array[i + by]`` along ``axis`` for a run-time ``by >= 0``.

    Args:
        array: Any array.
        axis: The axis.
        by: Run-time int32 scalar; beyond the end zeros come in.
        size: Size of the result along the axis; that of ``array`` by default.
    """
    size = array.shape[axis] if size is None else size
    wide = extend(array, axis, 0, size)
    start = jnp.minimum(by, array.shape[axis])
    return lax.dynamic_slice_in_dim(wide, start, size, axis=axis)


def shift_right(array: Array, axis: int, by: Any, size: int) -> Any:
    """``out[i + by] = array[i]`` along ``axis``, zeros before; ``out`` has ``size`` positions.

    What does not fit is cut off. ``by`` is a run-time int32 scalar, ``0 <= by``.
    """
    low = size
    wide = crop(extend(array, axis, low, 0), axis, low + size)
    return lax.dynamic_slice_in_dim(wide, jnp.maximum(low - by, 0), size, axis=axis)


def window(array: Array, axis: int, start: Any, size: int, last: int) -> Any:
    """``out[i] = array[start + i]`` along ``axis``, ``size`` positions; zeros beyond the end.

    Args:
        array: Any array.
        axis: The axis.
        start: An int or a run-time int32 scalar, ``0 <= start <= last``.
        size: Size of the result along the axis.
        last: The greatest start there can be; the array is extended only as far as it needs.
    """
    if isinstance(start, int):
        return crop(lax.slice_in_dim(array, start, array.shape[axis], axis=axis), axis, size)
    wide = extend(array, axis, 0, max(0, last + size - array.shape[axis]))
    starts = [start if i == axis else jnp.int32(0) for i in range(array.ndim)]
    sizes = [size if i == axis else n for i, n in enumerate(wide.shape)]
    return lax.dynamic_slice(wide, starts, sizes, allow_negative_indices=False)


def kept_in_memory(array: Array, size: Any) -> Any:
    """The same array, which XLA computes once and writes to memory, however many read it.

    XLA fuses a conditional with nothing that reads its result.

    Args:
        array: Any array of numbers.
        size: A run-time int32 scalar that is not negative, which XLA does not know.
    """

    def kept(array: Array) -> Any:
        return lax.cond(in_every_row(size >= 0), lambda array: array, lax.neg, array)

    return by_platform(array, cpu=kept, default=lax.optimization_barrier)
