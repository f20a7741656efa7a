"""Slices, pads and reversals: what is cut out or added starts and ends at logical sizes."""

from __future__ import annotations

from typing import Any

from jax import lax

from bucketjit import _jax
from bucketjit._dims import is_symbolic
from bucketjit._rule import Rule, RuleContext, window
from bucketjit.rules._regions import read_window, saturate, write_window


def slice_(ctx: RuleContext, operand: Any) -> Any:
    """Read from the logical start; what lies beyond the logical limit is padding."""
    params = ctx.symbolic_params
    strides = params["strides"] or (1,) * operand.ndim
    out = operand
    for axis, (start, stride) in enumerate(zip(params["start_indices"], strides, strict=True)):
        if is_symbolic(stride):
            ctx.refuse(f"the stride {stride} depends on a size")
        size = ctx.padded(ctx.out_shapes[0][axis])
        span = max(size - 1, 0) * stride + 1 if size else 0
        out = window(out, axis, ctx.logical(start), span, last=ctx.padded(start))
        if stride != 1 and size:
            out = lax.slice_in_dim(out, 0, span, stride, axis)
    return out


def rev(ctx: RuleContext, operand: Any) -> Any:
    """The reversal puts padding in front: read from where the real data begins."""
    out = ctx.bind(operand)
    for axis in ctx.params["dimensions"]:
        dim = ctx.in_shapes[0][axis]
        if is_symbolic(dim):
            size = ctx.padded(dim)
            out = window(out, axis, size - ctx.logical(dim), size, last=size)
    return out


def pad(ctx: RuleContext, operand: Any, value: Any) -> Any:
    """The operand's padding becomes the padding value, which then reaches to the end.

    Behind the data stands the padding value whatever ``high`` is, so the end is simply
    extended or cut to the padded size of the result.
    """
    config = ctx.symbolic_params["padding_config"]
    followed = [i for i, (_, high, _) in enumerate(config) if is_symbolic(high) or high > 0]
    out = ctx.fill(operand, axes=followed, value=value)
    for axis, (low, _, interior) in enumerate(config):
        if is_symbolic(interior):
            ctx.refuse(f"the interior padding {interior} depends on a size")
        size = ctx.padded(ctx.out_shapes[0][axis])
        before, after = (ctx.padded(low), ctx.padded(-low)) if is_symbolic(low) else (low, 0)
        length = out.shape[axis] + max(out.shape[axis] - 1, 0) * interior
        # A symbolic low is padded to its largest, then cut; `after` covers a negative one.
        total = before + after + size if is_symbolic(low) else size
        edges = [(0, 0, 0)] * out.ndim
        edges[axis] = (int(before), int(total - before - length), int(interior))
        if edges[axis] != (0, 0, 0):
            out = lax.pad(out, value, edges)
        if is_symbolic(low):
            out = window(out, axis, before - ctx.logical(low), size, last=before + after)
    return out


def dynamic_slice(ctx: RuleContext, operand: Any, *starts: Any) -> Any:
    """Starts are clamped by the logical sizes."""
    sizes = ctx.symbolic_params["slice_sizes"]
    return read_window(ctx, operand, ctx.in_shapes[0], [*map(saturate, starts)], sizes)


def dynamic_update_slice(ctx: RuleContext, operand: Any, update: Any, *starts: Any) -> Any:
    """Starts are clamped by the logical sizes; the padding of the update is not written."""
    shape, sizes = ctx.in_shapes[:2]
    return write_window(ctx, operand, shape, update, sizes, [*map(saturate, starts)])


_RULES = {
    "slice": slice_,
    "rev": rev,
    "pad": pad,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}

TABLE: dict[Any, Rule] = {
    p: rule for name, rule in _RULES.items() if (p := _jax.primitive(name)) is not None
}
