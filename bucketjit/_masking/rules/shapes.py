"""Axes are added, moved, joined, cut, merged and split by their logical sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from bucketjit._ir.expressions import Dim, Shape, groups, is_symbolic, without_ones
from bucketjit._masking import array_ops as ops
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules.indexing import INT32_MAX, read_window, saturate, write_window


def carry(ctx: RuleContext, *operands: Array) -> Any:
    """Whole axes are kept, moved, or repeated from size 1: the front stays the front."""
    return ctx.bind(*operands)


def concatenate(ctx: RuleContext, *operands: Array) -> Any:
    """Every piece is written at the logical end of those before it, over their padding."""
    axis = ctx.params["dimension"]
    sizes = [shape[axis] for shape in ctx.in_shapes]
    runs = _runs(sizes)
    pieces = list(zip(operands, ctx.in_shapes, strict=True))
    grown = [ctx.padding.holds(x, shape, 0) for x, shape in pieces if is_symbolic(shape[axis])]
    keeps_zeros = bool(grown) and all(grown)
    if keeps_zeros:  # as a cache does; what is written into it, such as a token, is small
        operands = tuple(ctx.fill(x, value=0, shape=shape) for x, shape in pieces)
    parts = [lax.concatenate([operands[i] for i in run], axis) for run in runs]
    offsets = [sum(sizes[: run[0]]) for run in runs]
    ends = [ctx.sizes.most(o) + p.shape[axis] for o, p in zip(offsets, parts, strict=True)]
    if keeps_zeros or len(parts) == 1:  # the first piece is written into
        out = ops.crop(parts[0], axis, max(ends)) if len(parts) > 1 else parts[0]
    else:  # joined first, as XLA is faster at that than at extending the first piece
        out = ops.crop(lax.concatenate(parts, axis), axis, max(ends))
    # In this order, so that each piece overwrites the padding of those before it.
    for offset, piece in zip(offsets[1:], parts[1:], strict=True):
        out = lax.dynamic_update_slice_in_dim(out, piece, ctx.logical(offset), axis)
    out = ops.crop(out, axis, ctx.padded(ctx.out_shapes[0][axis]))
    if keeps_zeros:
        ctx.padding.note_zeros(out, ctx.out_shapes[0])
    return out


def _runs(sizes: Sequence[Dim]) -> list[list[int]]:
    """Positions of the pieces that lie next to each other at padded sizes too.

    Only the last piece of a run may be symbolic: its padding is then the padding of the run.
    """
    runs: list[list[int]] = [[]]
    for i, size in enumerate(sizes):
        runs[-1].append(i)
        if is_symbolic(size) and i + 1 < len(sizes):
            runs.append([])
    return runs


def split(ctx: RuleContext, operand: Array) -> list[Any]:
    """Every piece is read from the logical end of those before it."""
    axis, sizes = ctx.symbolic_params["axis"], ctx.symbolic_params["sizes"]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        ops.window(operand, axis, ctx.logical(offset), ctx.padded(size), last=ctx.padded(offset))
        for offset, size in zip(offsets, sizes, strict=True)
    ]


def tile(ctx: RuleContext, operand: Array) -> Any:
    """Copies of a symbolic axis follow each other at its logical size, by computed index."""
    reps = ctx.symbolic_params["reps"]
    dims = ctx.in_shapes[0]
    plain = [1 if is_symbolic(d) else ctx.padded(r) for d, r in zip(dims, reps, strict=True)]
    out = operand if all(r == 1 for r in plain) else ctx.bind(operand, reps=tuple(plain))
    for axis, (dim, rep) in enumerate(zip(dims, reps, strict=True)):
        size = ctx.padded(ctx.out_shapes[0][axis])
        if is_symbolic(dim) and (is_symbolic(rep) or rep != 1):
            positions = lax.iota(jnp.int32, size) % jnp.maximum(ctx.logical(dim), 1)
            out = ops.take(out, positions, axis)
        else:
            out = ops.crop(out, axis, size)
    return out


# --- reshape ------------------------------------------------------------------------------------

# Reshape: axes are merged and split by their logical sizes.
#
#     b:f32[m] = reshape a:f32[n,3]    a is padded to [8,3], real rows at the front: plain reshape
#     b:f32[m] = reshape a:f32[3,n]    a is padded to [3,8], real data in 3 pieces: taken by index
#
# Both shapes are cut into groups of axes of equal product. A group is reshaped plainly if its only
# symbolic axis is its first one, both before and after. Its real data is then at the front of the
# flattened group at any padded size. In any other group, real data is scattered over the padded
# group. There each position of the result computes the place of its element from the logical
# strides. A large group is moved by whole rows on CPU:
#
#     b:f32[n*m] = reshape a:f32[n,m]    row i is written at i * m, over the padding of row i - 1
#     b:f32[n,m] = reshape a:f32[n*m]    row i is read from i * m on


def reshape(ctx: RuleContext, operand: Array) -> Any:
    """Each group of axes is reshaped by itself, plainly or by computed index."""
    sharding = ctx.params.get("sharding")  # inside ``shard_map`` one that cuts nothing
    if sharding is not None and any(n is not None for n in getattr(sharding, "spec", (sharding,))):
        ctx.refuse(
            "a reshape with an explicit sharding",
            "reshape first and reshard the result, or leave the axis static (None or _)",
        )
    shape = ctx.in_shapes[0]
    if (order := ctx.params.get("dimensions")) is not None:
        operand, shape = lax.transpose(operand, order), tuple(shape[a] for a in order)
    before, after = without_ones(shape), without_ones(ctx.out_shapes[0])
    out = lax.reshape(operand, ctx.padded_shape(before))
    axis = 0
    for old, new in groups(before, after):
        out = _regroup(ctx, out, axis, old, new)
        axis += len(new)
    return lax.reshape(out, ctx.padded_shape(ctx.out_shapes[0]))


def _regroup(ctx: RuleContext, array: Array, axis: int, old: Shape, new: Shape) -> Any:
    """Reshape the axes from ``axis`` on, of logical sizes ``old``, to ``new``."""
    if old == new:
        return array
    head, tail = array.shape[:axis], array.shape[axis + len(old) :]
    flat = lax.reshape(array, (*head, math.prod(ctx.padded_shape(old)), *tail))
    target = ctx.padded_shape(new)
    if flat.shape[axis] == 0 or not any(map(is_symbolic, (*old[1:], *new[1:]))):
        return lax.reshape(ops.crop(flat, axis, math.prod(target)), (*head, *target, *tail))
    if max(flat.shape[axis], math.prod(target)) > INT32_MAX:
        ctx.refuse("it has more positions than int32 holds in this bucket", in_bucket=True)
    grouped = lax.reshape(flat, (*head, *ctx.padded_shape(old), *tail))

    def by_index(grouped: Array, before: list[Any], after: list[Any]) -> Any:
        flat = lax.reshape(grouped, (*head, math.prod(ctx.padded_shape(old)), *tail))
        source = _unravel(ops.row_numbers(target, after, jnp.int32), before, ctx.padded_shape(old))
        return jnp.take(flat, source, axis=axis, mode="clip")

    def by_rows(grouped: Array, before: list[Any], after: list[Any]) -> Any:
        return _split_rows(_merged_rows(grouped, axis, before), axis, after, target)

    sizes = [[jnp.int32(ctx.logical(d)) for d in shape] for shape in (old, new)]
    # A step of the loop takes as long as some indices.
    is_long = all(grouped.size >= _ROW * grouped.shape[axis + i] for i in range(len(old) - 1))
    moves_rows = ops.block_of(grouped, axis) and is_long
    return (ops.alone(by_rows, by_index) if moves_rows else by_index)(grouped, *sizes)


_ROW = 64  # elements


def _merged_rows(array: Array, axis: int, sizes: Sequence[Any]) -> Any:
    """Merge as many axes as there are logical sizes, from ``axis`` on."""
    for last in reversed(range(1, len(sizes))):
        rows = axis + last - 1
        width = math.prod(sizes[last:])
        height, padded = array.shape[rows : rows + 2]

        def step(i: Any, out: Any, array: Array = array, axis: int = rows, n: Any = width) -> Any:
            row = lax.dynamic_index_in_dim(array, i, axis, keepdims=False)
            return ops.put(out, row, axis, i * n)

        shape = (*array.shape[:rows], height * padded, *array.shape[rows + 2 :])
        array = lax.fori_loop(jnp.int32(0), sizes[last - 1], step, jnp.zeros(shape, array.dtype))
    return array


def _split_rows(array: Array, axis: int, sizes: Sequence[Any], padded: Sequence[int]) -> Any:
    for first in range(len(sizes) - 1):
        height, width = padded[first], math.prod(padded[first + 1 :])
        starts = lax.iota(jnp.int32, height) * math.prod(sizes[first + 1 :])
        rows = axis + first
        read = functools.partial(ops.part, ops.crop(array, rows, height * width), rows, width=width)
        array = jax.vmap(read, out_axes=rows)(starts)
    return array


def _unravel(position: Array, sizes: Sequence[Any], padded: Sequence[int]) -> Any:
    """Where the elements of these numbers stand in the flattened padded array.

    An array with a logical size of 0 has no real element to find. The size counts as 1, to keep the
    division defined.
    """
    source = jnp.zeros_like(position)
    stride = 1
    for size, padded_size in zip(reversed(sizes), reversed(padded), strict=True):
        size = jnp.maximum(size, 1)
        source = source + position % size * stride
        position, stride = position // size, stride * padded_size
    return source


# --- slicing ------------------------------------------------------------------------------------

# Slices, pads and reversals: what is cut out or added starts and ends at logical sizes.


def slice_(ctx: RuleContext, operand: Array) -> Any:
    """Read from the logical start; what lies beyond the logical limit is padding.

    All axes with known starts and strides are cut at once.
    """
    params, shape = ctx.symbolic_params, operand.shape
    strides = params["strides"] or (1,) * operand.ndim
    sizes = ctx.padded_shape(ctx.out_shapes[0])
    places = [*zip(params["start_indices"], strides, sizes, strict=True)]
    static = [not (is_symbolic(start) or is_symbolic(stride)) for start, stride, _ in places]
    cuts = [
        (start, min(start + _span(size, stride), n), stride) if is_static else (0, n, 1)
        for (start, stride, size), n, is_static in zip(places, shape, static, strict=True)
    ]
    out = operand
    if cuts != [(0, n, 1) for n in shape]:
        out = lax.slice(operand, *zip(*cuts, strict=True))
    for axis, (start, stride, size) in enumerate(places):
        if static[axis]:
            out = ops.crop(out, axis, size)
        elif is_symbolic(stride):
            positions = ctx.logical(start) + lax.iota(jnp.int32, size) * ctx.logical(stride)
            out = ops.take(out, positions, axis)
        else:
            span = _span(size, stride)
            out = ops.window(out, axis, ctx.logical(start), span, last=ctx.padded(start))
            if stride != 1 and size:
                out = lax.slice_in_dim(out, 0, span, stride, axis)
    return out


def _span(size: int, stride: int) -> int:
    return (size - 1) * stride + 1 if size else 0


def rev(ctx: RuleContext, operand: Array) -> Any:
    """The real data is read from its end; a static axis is reversed as it is."""
    axes = ctx.params["dimensions"]
    opened = [axis for axis in axes if is_symbolic(ctx.in_shapes[0][axis])]
    rest = tuple(axis for axis in axes if axis not in opened)
    out = ctx.bind(operand, dimensions=rest) if rest else operand
    for axis in opened:
        out = ops.reverse(out, axis, ctx.logical(ctx.in_shapes[0][axis]))
    return out


def pad(ctx: RuleContext, operand: Array, value: Array) -> Any:
    """The operand's padding becomes the padding value, which then reaches to the end.

    The data is followed by the padding value whatever ``high`` is, so the end is extended or cut to
    the padded size of the result.
    """
    config = ctx.symbolic_params["padding_config"]
    # Only along these axes may a logical position of the result read the padding of the operand.
    followed = [i for i, (_, high, _) in enumerate(config) if is_symbolic(high) or high > 0]
    out = ctx.fill(operand, axes=followed, value=value)
    for axis, (low, _, interior) in enumerate(config):
        size = ctx.padded(ctx.out_shapes[0][axis])
        if is_symbolic(low) or is_symbolic(interior):
            out = _spread(ctx, out, axis, value)
            continue
        length = out.shape[axis] + max(out.shape[axis] - 1, 0) * interior
        edges = (int(low), int(size - low - length), int(interior))
        if edges != (0, 0, 0):
            out = lax.pad(out, value, [edges if i == axis else (0, 0, 0) for i in range(out.ndim)])
    return out


def _spread(ctx: RuleContext, array: Array, axis: int, value: Array) -> Any:
    """Pad one axis by amounts known at run time: each position computes what stands there."""
    low, _, interior = ctx.symbolic_params["padding_config"][axis]
    count = ctx.in_shapes[0][axis]
    step = ctx.logical(interior) + 1
    place = lax.iota(jnp.int32, ctx.padded(ctx.out_shapes[0][axis])) - ctx.logical(low)
    source = place // step
    real = (place >= 0) & (place % step == 0) & (source < ctx.logical(count))
    real = lax.expand_dims(real, [i for i in range(array.ndim) if i != axis])
    array = ops.crop(array, axis, max(array.shape[axis], 1))
    return ops.select(real, ops.take(array, source, axis), value)


def dynamic_slice(ctx: RuleContext, operand: Array, *starts: Array) -> Any:
    """Starts are clamped by the logical sizes."""
    sizes = ctx.symbolic_params["slice_sizes"]
    return read_window(ctx, operand, ctx.in_shapes[0], [*map(saturate, starts)], sizes)


def dynamic_update_slice(ctx: RuleContext, operand: Array, update: Array, *starts: Array) -> Any:
    """Starts are clamped by the logical sizes; the padding of the update is not written."""
    shape, sizes = ctx.in_shapes[:2]
    return write_window(ctx, operand, shape, update, sizes, [*map(saturate, starts)])


TABLE: dict[Any, Rule] = {
    **dict.fromkeys(("broadcast_in_dim", "transpose", "squeeze", "iota"), carry),
    **dict.fromkeys(("empty", "stack", "unstack"), carry),
    "concatenate": concatenate,
    "split": split,
    "tile": tile,
    "reshape": reshape,
    "slice": slice_,
    "rev": rev,
    "pad": pad,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
