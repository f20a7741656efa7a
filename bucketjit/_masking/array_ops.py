"""Operations on padded arrays that masking rules share: select, take, crop, extend and shift.

Sizes and axes are Python ints. Positions and amounts named ``index``, ``by`` or ``start`` may be
run-time int32 values, so one executable serves every logical size of its bucket.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from bucketjit._jax.arrays import by_platform, explicit_sharding, is_key, key_impl, on_one_cpu


def of_all_rows(combine: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that returns a scalar; under `vmap`, what those of all rows are combined to."""

    @custom_vmap
    def combined(x: Any) -> Any:
        return x

    @combined.def_vmap
    def _(axis_size: int, batched: Sequence[bool], x: Any) -> tuple[Any, bool]:
        return combined(combine(x) if batched[0] else x), False

    return combined


# `vmap` turns a ``lax.cond`` whose condition is batched into a select, which runs both branches.
# The condition that this returns is never batched, so the ``lax.cond`` stays one.
in_every_row = of_all_rows(jnp.all)


def alone(function: Callable[..., Any], in_rows: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays; under `vmap` it is another one, with the same results."""
    chosen = custom_vmap(function)

    @chosen.def_vmap
    def _(axis_size: int, batched: Sequence[Any], *arrays: Any) -> tuple[Any, bool]:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
        return jax.vmap(in_rows, axes, axis_size=axis_size)(*arrays), True

    return chosen


def select(mask: Any, array: Array, value: Any) -> Any:
    """``array`` where ``mask`` is True, else ``value``; works for every dtype."""
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


def can_be_zeroed(array: Array) -> bool:
    """Whether `zeroed` takes an array, and it pays: a matrix has the same layout either way."""
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array.ndim > 2 and is_float and jnp.finfo(array.dtype).bits >= 8


def zeroed(mask: Any, array: Array) -> Any:
    """``array`` where ``mask`` is True, else 0, for floats: the bits and those of the mask.

    A select by a mask that is broadcast makes the TPU's compiler take a layout that leaves half of
    each register empty, for the array and what is computed of it; this does not.
    """
    word = jnp.dtype(f"int{8 * array.dtype.itemsize}")
    bits = _broadcast(-mask.astype(word), array.shape, explicit_sharding(array))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(array, word) & bits, array.dtype)


def _broadcast(array: Any, shape: tuple[int, ...], sharding: Any) -> Any:
    if array.shape != shape:
        array = jnp.broadcast_to(array, shape)
    return array if sharding is None else jax.sharding.reshard(array, sharding)


def take(array: Array, index: Any, axis: int) -> Any:
    """Positions ``index`` along ``axis``; an index out of range is clamped."""
    sharding = explicit_sharding(array)
    # On a mesh with explicit axes a gather needs the sharding of its result, which `jnp.take`
    # does not accept.
    if sharding is None:
        return jnp.take(array, index, axis=axis, mode="clip")
    places = array.at[(*(slice(None),) * (axis % array.ndim), index)]
    return places.get(mode="clip", out_sharding=sharding)


def crop(array: Array, axis: int, size: int) -> Any:
    """Give ``axis`` this size: cut off its end, or extend it with zeros (or zero keys)."""
    if array.shape[axis] > size:
        return lax.slice_in_dim(array, 0, size, axis=axis)
    return extend(array, axis, 0, size - array.shape[axis])


def row_numbers(shape: Sequence[int], sizes: Sequence[Any], dtype: Any) -> Any:
    """The number of each position of a padded shape, in row-major order of the logical sizes."""
    numbers = jnp.zeros(shape, dtype)
    for axis, size in enumerate(sizes):
        numbers = numbers * size + lax.broadcasted_iota(dtype, shape, axis)
    return numbers


def extend(array: Array, axis: int, low: int, high: int) -> Any:
    """Add ``low`` zeros before ``axis`` and ``high`` after it (zero keys to an array of keys)."""
    if low == 0 and high == 0:
        return array
    if is_key(array):
        data = extend(jax.random.key_data(array), axis, low, high)
        return jax.random.wrap_key_data(data, impl=key_impl(array.dtype))
    config = [(low, high, 0) if i == axis else (0, 0, 0) for i in range(array.ndim)]
    return lax.pad(array, lax.full((), 0, array.dtype), config)


def shift_right(array: Array, axis: int, by: Any, size: int) -> Any:
    """``out[i + by] = array[i]`` along ``axis``, with zeros before."""
    # A shift by `size` or more leaves zeros only, so `size` zeros in front are enough.
    wide = crop(extend(array, axis, size, 0), axis, 2 * size)
    return lax.dynamic_slice_in_dim(wide, jnp.maximum(size - by, 0), size, axis=axis)


def window(array: Array, axis: int, start: Any, size: int, last: int) -> Any:
    """``out[i] = array[start + i]`` along ``axis``; positions beyond the end read zeros."""
    if isinstance(start, int):
        return crop(lax.slice_in_dim(array, start, array.shape[axis], axis=axis), axis, size)

    def whole(array: Array, start: Any) -> Any:
        wide = extend(array, axis, 0, max(0, last + size - array.shape[axis]))
        return part(wide, axis, start, size)

    if last + size <= array.shape[axis]:  # all of it is inside, and XLA copies it at once
        return whole(array, start)
    end = array.shape[axis]
    return _by_blocks(
        *(array, start, axis, size),
        lambda start: jnp.clip(end - start, 0, size),
        whole,
        lambda array, start, place, width: part(array, axis, start + place, width),
    )


def reverse(array: Array, axis: int, count: Any) -> Any:
    """``out[i] = array[count - 1 - i]`` along ``axis`` for i below ``count``."""
    size = array.shape[axis]

    def whole(array: Array, count: Any) -> Any:
        # The reversal puts padding in front: read from where the real data begins.
        return part(extend(lax.rev(array, (axis,)), axis, 0, size), axis, size - count, size)

    def backwards(array: Array, count: Any, place: Any, width: int) -> Any:
        return lax.rev(part(array, axis, count - place - width, width), (axis,))

    return _by_blocks(array, count, axis, size, lambda count: count, whole, backwards)


# --- blocks -------------------------------------------------------------------------------------

# Large arrays are moved block by block on CPU.
#
# XLA's CPU backend computes each element of a window at a run-time position by itself, and asks for
# each whether it is inside. A loop that copies blocks, which all lie inside, takes a third of the
# time, and copies no padding. Other backends are fast at whole windows.

_LARGE = 2**18  # bytes of an array from which on a loop takes less time
_BLOCK = 2**17  # bytes that a step of a loop moves


def block_of(array: Array, axis: int) -> int:
    """How many positions along an axis a step of a loop moves; 0 if the array is moved whole."""
    shape, dtype = array.shape, array.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or not on_one_cpu():
        return 0
    size = math.prod(shape) * dtype.itemsize
    return min(max(1, _BLOCK * shape[axis] // size), shape[axis]) if size >= max(_LARGE, 1) else 0


def part(array: Array, axis: int, start: Any, width: int) -> Any:
    """Positions from ``start`` on along an axis, all of them inside."""
    starts = [start if i == axis else jnp.int32(0) for i in range(array.ndim)]
    sizes = [width if i == axis else n for i, n in enumerate(array.shape)]
    return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)


def put(array: Array, part: Array, axis: int, start: Any) -> Any:
    """The array with a part of it written at ``start`` along an axis, where it fits."""
    starts = [start if i == axis else jnp.int32(0) for i in range(array.ndim)]
    return lax.dynamic_update_slice(array, part, starts, allow_negative_indices=False)


def _by_blocks(
    array: Array,
    start: Any,
    axis: int,
    size: int,
    count: Callable[[Any], Any],
    whole: Callable[[Array, Any], Any],
    some: Callable[[Array, Any, Any, int], Any],
) -> Any:
    """What ``whole`` computes of an array and a start, by parts of it if the array is large.

    The first ``count(start)`` positions of the result matter. ``some`` takes the array, the start,
    a position of the result that is followed by as many that matter as it is to compute, and their
    number.
    """
    block = min(block_of(array, axis), size)
    if block == 0:
        return whole(array, start)

    def loop(array: Array, start: Any) -> Any:
        n = count(start)
        shape = [size if i == axis else m for i, m in enumerate(array.shape)]

        def step(i: Any, out: Any) -> Any:
            place = jnp.minimum(i * block, n - block)
            return put(out, some(array, start, place, block), axis, place)

        return _for_blocks(n, block, step, jnp.zeros(shape, array.dtype))

    def by_blocks(array: Array, start: Any) -> Any:
        return lax.cond(count(start) >= block, loop, whole, array, start)

    return alone(by_blocks, whole)(array, start)


def _for_blocks(count: Any, block: int, step: Callable[[Any, Any], Any], out: Any) -> Any:
    """A loop with a step for each block of ``count`` positions."""
    steps = lax.div(count + jnp.int32(block - 1), jnp.int32(block))
    return lax.fori_loop(jnp.int32(0), steps, step, out)


def zeros_from(array: Array, axis: int, count: Any) -> Any:
    """The array with zeros from position ``count`` on along an axis."""
    size, block = array.shape[axis], block_of(array, axis)

    def masked(array: Array, count: Any, start: Any = 0) -> Any:
        place = [n if i == axis else 1 for i, n in enumerate(array.shape)]
        return select(lax.broadcasted_iota(jnp.int32, place, axis) < count - start, array, 0)

    if block == 0:
        return masked(array, count)

    def loop(array: Array, count: Any) -> Any:
        def step(i: Any, out: Any) -> Any:
            place = jnp.minimum(count + i * block, size - block)
            return put(out, masked(part(out, axis, place, block), count, place), axis, place)

        return _for_blocks(size - count, block, step, array)

    return alone(loop, masked)(array, count)


def in_parts(
    function: Callable[..., Any], array: Array, axis: int, count: Any, *operands: Any
) -> Any:
    """What ``function`` computes of an array and operands, each position of an axis by itself.

    The first ``count`` positions matter. What is computed of a part stays in the caches of the CPU.
    """
    block = min(4 * block_of(array, axis), array.shape[axis])
    if block == 0:
        return function(array, *operands)

    def loop(array: Array, count: Any, *operands: Any) -> Any:
        last = jnp.maximum(count - block, 0)

        def step(i: Any, out: Any) -> Any:
            place = jnp.minimum(i * block, last)
            return put(out, function(part(array, axis, place, block), *operands), axis, place)

        return _for_blocks(count, block, step, jnp.zeros_like(array))

    whole = lambda array, _, *operands: function(array, *operands)  # noqa: E731
    return alone(loop, whole)(array, jnp.minimum(jnp.int32(count), array.shape[axis]), *operands)


# ------------------------------------------------------------------------------------------------


def kept_in_memory(array: Array, size: Any) -> Any:
    """The same array, which XLA's CPU backend computes once and writes to memory.

    Without this, XLA may fuse the computation of the array into each of its readers and repeat it
    there. XLA fuses no conditional with the readers of its result, so the array passes through one
    whose condition is always True at run time. Other backends get an optimization barrier.
    """

    def in_a_branch(array: Array) -> Any:
        return lax.cond(in_every_row(size >= 0), lambda array: array, lax.neg, array)

    return by_platform(array, cpu=in_a_branch, default=lax.optimization_barrier)


# --- scaling ------------------------------------------------------------------------------------

# Scaling of numbers near the end of their dtype, before a rule computes larger numbers of them.


def without_overflow(x: Array, axes: Sequence[int], headroom: int) -> tuple[Any, Any]:
    """Numbers so small that what is computed of them on the way does not overflow."""
    exponent = math.ceil(math.log2(max(headroom, 1)))
    parts = [jnp.real(x), jnp.imag(x)] if jnp.iscomplexobj(x) else [x]
    sizes = [jnp.max(jnp.abs(part), axes, keepdims=True, initial=0) for part in parts]
    largest = functools.reduce(jnp.maximum, sizes)
    is_huge = largest > float(jnp.finfo(x.dtype).max) * 2.0**-exponent
    unit = jnp.ones_like(largest)
    back = jnp.where(is_huge & jnp.isfinite(largest), unit * 2.0**exponent, unit)
    return scaled(x, 1 / back), back


def scaled(x: Array, factor: Array) -> Any:
    """Real or complex numbers times a real one: infinity times 0i would be NaN."""
    if jnp.iscomplexobj(x):
        return lax.complex(jnp.real(x) * factor, jnp.imag(x) * factor)
    return x * factor
