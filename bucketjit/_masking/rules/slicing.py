"""Slices, pads and reversals: what is cut out or added starts and ends at logical sizes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from bucketjit._jax.primitives import primitive
from bucketjit._masking.array_ops import crop, select, take, window
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules._regions import read_window, saturate, write_window
from bucketjit._sizes.expressions import is_symbolic


def slice_(ctx: RuleContext, operand: Array) -> Any:
    """Read from the logical start; what lies beyond the logical limit is padding."""
    params = ctx.symbolic_params
    strides = params["strides"] or (1,) * operand.ndim
    out = operand
    for axis, (start, stride) in enumerate(zip(params["start_indices"], strides, strict=True)):
        size = ctx.padded(ctx.out_shapes[0][axis])
        if is_symbolic(stride):
            positions = ctx.logical(start) + lax.iota(jnp.int32, size) * ctx.logical(stride)
            out = take(out, positions, axis)
            continue
        span = max(size - 1, 0) * stride + 1 if size else 0
        out = window(out, axis, ctx.logical(start), span, last=ctx.padded(start))
        if stride != 1 and size:
            out = lax.slice_in_dim(out, 0, span, stride, axis)
    return out


def rev(ctx: RuleContext, operand: Array) -> Any:
    """The reversal puts padding in front: read from where the real data begins."""
    out = ctx.bind(operand)
    for axis in ctx.params["dimensions"]:
        dim = ctx.in_shapes[0][axis]
        if is_symbolic(dim):
            size = ctx.padded(dim)
            out = window(out, axis, size - ctx.logical(dim), size, last=size)
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
    return select(real, take(crop(array, axis, max(array.shape[axis], 1)), source, axis), value)


def dynamic_slice(ctx: RuleContext, operand: Array, *starts: Array) -> Any:
    """Starts are clamped by the logical sizes."""
    sizes = ctx.symbolic_params["slice_sizes"]
    return read_window(ctx, operand, ctx.in_shapes[0], [*map(saturate, starts)], sizes)


def dynamic_update_slice(ctx: RuleContext, operand: Array, update: Array, *starts: Array) -> Any:
    """Starts are clamped by the logical sizes; the padding of the update is not written."""
    shape, sizes = ctx.in_shapes[:2]
    return write_window(ctx, operand, shape, update, sizes, [*map(saturate, starts)])


_RULES: dict[str, Rule] = {
    "slice": slice_,
    "rev": rev,
    "pad": pad,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}

TABLE: dict[Any, Rule] = {
    p: rule for name, rule in _RULES.items() if (p := primitive(name)) is not None
}
