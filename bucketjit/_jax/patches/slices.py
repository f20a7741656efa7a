"""Slices whose ends are known at run time only: ``x[:k]``, ``x.at[a:b].set(v)``, ``dynamic_slice``.

x[a:b]    start = clip(a, 0, n)             positions a, a + 1, ... of x, n of them
          length = clip(b, 0, n) - start    the first `length` of these: the size is computed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches import patch

_indexing = names.module("numpy.indexing")
_scatter = names.module("ops.scatter")

_MOST = 2**31 - 1  # the largest int32


class _Part(NamedTuple):
    """The ``length`` positions of an axis that a slice takes from ``start`` on; None is 0."""

    start: Any
    length: Any


@patch.opened(_indexing, "rewriting_take", everywhere=False)
def _take(open_: Any, original: Any, arr: Any, idx: Any, **options: Any) -> Any:
    """``x[:k]``. Since numpy.indexing, 0.8. Until sizes can be computed."""
    if not patch.has_traced_slice(idx):
        return original(arr, idx, **options)
    parts, rest = _split(idx, arr.shape)
    for axis, index in parts.items():
        part = _part(open_, index, arr.shape[axis])
        arr = open_.first(_from(arr, axis, part), part.length, axis)
    return original(arr, rest, **options)


def _split(idx: Any, shape: Sequence[Any]) -> tuple[dict[int, slice], tuple[Any, ...]]:
    """The traced slices of an index, by axis, and the index with whole axes in their place."""
    indexer = _indexing.NDIndexer.from_raw_indices(idx, shape)
    parts: dict[int, slice] = {}
    rest = []
    for part in indexer.indices:
        if patch.has_traced_slice(part.index):
            (axis,) = part.consumed_axes
            parts[axis] = part.index
            rest.append(slice(None))
        else:
            rest.append(part.index)
    return parts, tuple(rest)


def _part(open_: Any, index: slice, size: Any) -> _Part:
    """The positions that a slice takes of an axis, as Python clamps them."""
    for end in (index.start, index.stop):
        if patch.is_traced(end) and not patch.is_traced_size(end):
            raise TypeError(f"slice indices must be integers, got {jax.typeof(end)}")
    if patch.is_traced(index.step) or index.step not in (None, 1):
        open_.refuse(
            "a slice has a step, and an end or a step that is computed",
            "slice twice, as in x[:k][::2], or index by an array",
        )
    stop = size if index.stop is None else index.stop
    stop = _clamped(open_, stop, size)
    if _is_start(index.start):
        return _Part(None, stop)
    start = _clamped(open_, index.start, size)
    return _Part(start, stop - start)


def _is_start(end: Any) -> bool:
    return end is None or not (patch.is_traced(end) or is_symbolic_dim(end) or int(end) != 0)


def _clamped(open_: Any, end: Any, size: Any) -> Any:
    """An end of a slice, negative ones counted from the end of the axis."""
    if patch.is_traced(end):
        return open_.position(end, size)
    if not is_symbolic_dim(end):
        end = min(max(int(end), -_MOST), _MOST)
    end = patch.as_value(end)
    end = jnp.where(end < 0, end + patch.as_value(size), end)
    return jnp.clip(end, patch.as_value(0), patch.as_value(size))


def _from(array: Any, axis: int, part: _Part) -> Any:
    """An array whose first positions along an axis are those of a slice."""
    if part.start is None:
        return array
    places = lax.broadcasted_iota(np.int32, (array.shape[axis],), 0)
    return patch.at_places(array, part.start + places, axis)


@patch.opened(_scatter, "_scatter_update", everywhere=False)
def _update(open_: Any, original: Any, x: Any, idx: Any, y: Any, *args: Any, **options: Any) -> Any:
    """``x.at[:k].set(y)``. Since ops.scatter, 0.2. Until sizes can be computed."""
    if not patch.has_traced_slice(idx):
        return original(x, idx, y, *args, **options)
    x = jnp.asarray(x)
    slices, rest = _split(idx, x.shape)
    parts = {axis: _part(open_, index, x.shape[axis]) for axis, index in slices.items()}
    if np.ndim(y):
        y = _spread(open_, jnp.asarray(y), x, rest, parts)
    updated = original(x, rest, y, *args, **options)
    inside: Any = True
    for axis, part in parts.items():
        order = _order(x.shape[axis], part)
        taken = (order >= 0) & (order < part.length)
        inside = inside & jnp.expand_dims(taken, [i for i in range(x.ndim) if i != axis])
    return jnp.where(inside, updated, x)


def _order(size: Any, part: _Part) -> Any:
    """For each position of an axis, which position of the slice it is."""
    places = lax.broadcasted_iota(np.int32, (size,), 0)
    return places if part.start is None else places - part.start


def _spread(open_: Any, y: Any, x: Any, rest: tuple[Any, ...], parts: dict[int, _Part]) -> Any:
    """Values for a slice, each at the position of the whole axis that it is for."""
    places = _places(open_, _indexing.NDIndexer.from_raw_indices(rest, x.shape).expand_ellipses())
    taken = jax.eval_shape(lambda a: a[rest], x).shape
    shape = list(taken)
    for axis, part in parts.items():
        row = lax.broadcasted_iota(np.int32, (x.shape[axis],), 0)
        shape[places[axis]] = open_.first(row, part.length, 0).shape[0]
    missing = len(shape) - y.ndim
    if missing < 0:
        raise ValueError(f"values of shape {y.shape} do not fit an index that takes {tuple(shape)}")
    wanted = [1 if _is_one(n) else n_of for n, n_of in zip(y.shape, shape[missing:], strict=True)]
    y = jnp.broadcast_to(y, wanted)
    for axis, part in parts.items():
        place = places[axis] - missing
        if place < 0 or _is_one(y.shape[place]):
            continue
        y = open_.extend(y, place, part.length, x.shape[axis])
        if part.start is not None:
            y = patch.at_places(y, _order(x.shape[axis], part), place)
    return y


def _is_one(size: Any) -> bool:
    return not is_symbolic_dim(size) and size == 1


def _places(open_: Any, indexer: Any) -> dict[int, int]:
    """The axis of the result for each axis that a basic index takes a slice of."""
    places: dict[int, int] = {}
    axis = 0
    for part in indexer.indices:
        if part.typ.name == "NONE":
            axis += 1
        elif part.typ.name == "SLICE":
            places[part.consumed_axes[0]] = axis
            axis += 1
        elif np.ndim(part.index):
            open_.refuse(
                "an update by a slice of a computed size and an index array",
                "update by arrays of positions on both axes, such as jnp.arange(k)[:, None]",
            )
    return places


@patch.opened(lax, "dynamic_slice")
def _dynamic_slice(
    open_: Any, original: Any, operand: Any, start_indices: Any, slice_sizes: Any, **more: Any
) -> Any:
    """Its sizes may be computed. Since lax.slicing, 0.1. Until sizes can be computed."""
    starts, sizes = list(start_indices), list(slice_sizes)
    if not any(map(patch.is_traced_size, sizes)) or not len(starts) == len(sizes) == np.ndim(
        operand
    ):
        return original(operand, start_indices, slice_sizes, **more)
    operand = jnp.asarray(operand)
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        operand = lax.dynamic_slice_in_dim(operand, start, size, axis)
    return operand


@patch.opened(lax, "dynamic_slice_in_dim")
def _dynamic_slice_in_dim(
    open_: Any,
    original: Any,
    operand: Any,
    start_index: Any,
    slice_size: Any,
    axis: int = 0,
    **more: Any,
) -> Any:
    """Its size may be computed. Since lax.slicing, 0.1. Until sizes can be computed."""
    if not patch.is_traced_size(slice_size):
        return original(operand, start_index, slice_size, axis, **more)
    array, axis = jnp.asarray(operand), int(axis) % operand.ndim
    if not _is_start(start_index):  # it moves back where the positions do not fit
        whole, start = patch.as_value(array.shape[axis]), patch.as_value(start_index)
        start = jnp.where(start < 0, start + whole, start)
        start = jnp.clip(start, 0, jnp.maximum(whole - slice_size.astype(np.int32), 0))
        array = _from(array, axis, _Part(start, slice_size))
    return _cut(open_, array, axis, slice_size)


def _cut(open_: Any, array: Any, axis: int, size: Any) -> Any:
    """The first positions of an axis; it is checked that there are so many."""
    (out,) = open_.cut([jnp.moveaxis(array, axis, 0)], size)
    return jnp.moveaxis(out, 0, axis)


@patch.opened(lax, "slice")
def _slice(
    open_: Any,
    original: Any,
    operand: Any,
    start_indices: Any,
    limit_indices: Any,
    strides: Any = None,
) -> Any:
    """Its ends may be computed. Since lax.slicing, 0.1. Until sizes can be computed."""
    starts, limits = list(start_indices), list(limit_indices)
    if not any(map(patch.is_traced_size, (*starts, *limits))):
        return original(operand, start_indices, limit_indices, strides)
    steps = [1] * len(starts) if strides is None else list(strides)
    operand = jnp.asarray(operand)
    for axis, ends in enumerate(zip(starts, limits, steps, strict=True)):
        operand = _limited(open_, operand, axis, *ends)
    return operand


@patch.opened(lax, "slice_in_dim")
def _slice_in_dim(
    open_: Any,
    original: Any,
    operand: Any,
    start_index: Any,
    limit_index: Any,
    stride: Any = 1,
    axis: int = 0,
) -> Any:
    """Its ends may be computed. Since lax.slicing, 0.1. Until sizes can be computed."""
    if not any(map(patch.is_traced_size, (start_index, limit_index))):
        return original(operand, start_index, limit_index, stride, axis)
    axis = int(axis) % operand.ndim
    size = operand.shape[axis]
    start = 0 if start_index is None else _from_end(start_index, size)
    limit = size if limit_index is None else _from_end(limit_index, size)
    return _limited(open_, jnp.asarray(operand), axis, start, limit, stride)


def _from_end(end: Any, size: Any) -> Any:
    if not patch.is_traced(end):
        return end if is_symbolic_dim(end) or end >= 0 else end + size
    return jnp.where(end < 0, end + patch.as_value(size, end.dtype), end)


def _limited(open_: Any, array: Any, axis: int, start: Any, limit: Any, stride: Any) -> Any:
    """``lax.slice`` along one axis: its ends are not clamped, they are checked."""
    if not (patch.is_traced(start) or patch.is_traced(limit)):
        return lax.slice_in_dim(array, start, limit, stride, axis)
    if patch.is_traced(limit):
        before = _cut(open_, array, axis, limit)
    else:
        before = lax.slice_in_dim(array, 0, limit, 1, axis)
    if not _is_start(start):
        begin = patch.as_value(start)
        length = patch.as_value(limit) - begin
        array = _from(array, axis, _Part(begin, length))
        before = _cut(open_, array, axis, length)
    if patch.is_traced(stride):
        open_.refuse("a slice has a step that is computed", "give the step as a number")
    return before if stride == 1 else before[(slice(None),) * axis + (slice(None, None, stride),)]


SLICES = (_take, _update, _dynamic_slice, _dynamic_slice_in_dim, _slice, _slice_in_dim)
"""Slices of a computed size."""
