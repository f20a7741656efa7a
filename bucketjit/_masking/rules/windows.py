"""Reductions over sliding windows (pooling), and what their gradients are made of.

Padding that a logical window reads holds the neutral element. Some reductions have none: those with
a user's own reducer, and comparisons in which NaN takes part. There a flag beside each element says
whether it is real, and the reducer skips elements that are not. XLA treats its own padding in the
same manner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bucketjit._ir.expressions import Shape, is_symbolic
from bucketjit._jax.jaxprs import open_jaxpr
from bucketjit._masking.rule_context import Rule, RuleContext, zeros
from bucketjit._masking.rules import reductions
from bucketjit._masking.rules.convolution import Slide, fit, fit_all
from bucketjit._masking.rules.indexing import INT32_MAX

Arrays = Sequence[Any]


# --- laying out -----------------------------------------------------------------------------


def _slides(ctx: RuleContext, shape: Shape, out: Shape) -> list[Slide]:
    """How the window of this equation slides along each axis of an array of this shape."""
    params, ones = ctx.symbolic_params, (1,) * len(shape)
    windows = params["window_dimensions"], params["window_strides"]
    edges = zip(*params["padding"], strict=True)
    dilations = params.get("base_dilation", ones), params.get("window_dilation", ones)
    fields = zip(shape, *windows, *edges, *dilations, out, strict=True)
    slides = [Slide(*of_axis) for of_axis in fields]
    for slide in slides:
        slide.check(ctx)
    return slides


def _is_open(slide: Slide) -> bool:
    """True for an axis along which padding is more than rows of its own."""
    return not slide.is_static and not slide.is_pointwise


def _is_irregular(slide: Slide) -> bool:
    """Whether the window or its stride is symbolic, so that windows must be laid out one by one."""
    return is_symbolic(slide.window) or is_symbolic(slide.stride)


def _meets_padding(ctx: RuleContext, slides: Sequence[Slide]) -> bool:
    """True if anything stands in for padding that a logical window reads."""
    opened = filter(_is_open, slides)
    return any(_is_irregular(s) or is_symbolic(s.low) or s.reads_padding(ctx) for s in opened)


def _lay_out(
    ctx: RuleContext, slides: Sequence[Slide], arrays: Arrays, values: Arrays
) -> tuple[list[Any], dict[str, Any]]:
    """Arrays in which windows of static parameters read what the logical windows read."""
    shape = tuple(s.size for s in slides)
    read = [i for i, s in enumerate(slides) if _is_open(s) and s.reads_padding(ctx)]
    pairs = zip(arrays, values, strict=True)
    laid = [ctx.fill(x, axes=read, value=value, shape=shape) for x, value in pairs]
    params: dict[str, list[Any]] = {
        "window_dimensions": [ctx.padded(s.window) for s in slides],
        "window_strides": [ctx.padded(s.stride) for s in slides],
        "padding": [(s.low, s.high) for s in slides],
        "base_dilation": [s.base_dilation for s in slides],
        "window_dilation": [s.window_dilation for s in slides],
    }
    for i, slide in enumerate(slides):
        if not _is_open(slide):
            continue
        if _is_irregular(slide):
            lay = slide.unfold
            params["window_strides"][i] = params["window_dimensions"][i]
            params["window_dilation"][i] = 1
        elif is_symbolic(slide.low):
            lay = slide.place
        else:
            params["padding"][i] = slide.static_padding(ctx)
            continue
        laid = [lay(ctx, x, i, value) for x, value in zip(laid, values, strict=True)]
        params["padding"][i], params["base_dilation"][i] = (0, 0), 1
    return laid, {name: tuple(per_axis) for name, per_axis in params.items()}


def _reduce_real(
    ctx: RuleContext,
    slides: Sequence[Slide],
    arrays: Arrays,
    inits: Arrays,
    reducer: reductions.Fold,
    starts: bool = True,
) -> list[Any]:
    """Reduce over the real elements of each window, whatever the reducer."""
    flags = jnp.ones(arrays[0].shape, bool)
    values = [np.array(False), *(np.zeros((), x.dtype) for x in arrays)]
    laid, params = _lay_out(ctx, slides, [flags, *arrays], values)

    inits = [jnp.asarray(init, x.dtype) for init, x in zip(inits, arrays, strict=True)]
    start = (jnp.asarray(starts), *inits)
    _, *outs = lax.reduce_window(tuple(laid), start, reductions.skipping(reducer), **params)
    return outs


# --- reductions -----------------------------------------------------------------------------


def reduction(identity: reductions.Identity) -> Rule:
    """Padding that a window reads holds the neutral element."""

    def rule(ctx: RuleContext, operand: Array) -> Any:
        slides = _slides(ctx, ctx.in_shapes[0], ctx.out_shapes[0])
        if 0 in ctx.padded_shape(ctx.out_shapes[0]):
            return zeros(ctx, ctx.out_avals[0])
        (laid,), params = _lay_out(ctx, slides, [operand], [identity(operand.dtype)])
        return fit(ctx, ctx.bind(laid, **params))

    return rule


def reduce_window(ctx: RuleContext, *operands: Array) -> list[Any]:
    """The user's own reducer: it must not see padding, unless that is neutral to it."""
    arrays, inits = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    slides = _slides(ctx, ctx.in_shapes[0], ctx.out_shapes[0])
    jaxpr = ctx.params["jaxpr"]
    if 0 in ctx.padded_shape(ctx.out_shapes[0]):
        return [zeros(ctx, aval) for aval in ctx.out_avals]
    is_known = not isinstance(inits[0], jax.core.Tracer)
    monoid = reductions.known_monoid(open_jaxpr(jaxpr)[0]) if is_known else None
    neutral = monoid is not None and bool(np.asarray(inits[0]) == monoid(arrays[0].dtype))
    if neutral or not _meets_padding(ctx, slides):
        laid, params = _lay_out(ctx, slides, arrays, inits)
        outs = ctx.bind(*laid, *inits, **params)
    else:
        reducer = lambda x, y: ctx.evaluate(jaxpr, *x, *y)  # noqa: E731
        outs = _reduce_real(ctx, slides, arrays, inits, reducer)
    return fit_all(ctx, outs)


# --- gradients ------------------------------------------------------------------------------


def _chooser(ctx: RuleContext) -> reductions.Fold:
    """From two ``(key, value)`` pairs to the one whose key the equation selects."""
    select_prim = ctx.params["select_prim"]

    def reducer(left: Arrays, right: Arrays) -> Arrays:
        keep = select_prim.bind(left[0], right[0])
        return [jnp.where(keep, x, y) for x, y in zip(left, right, strict=True)]

    return reducer


def _worst(ctx: RuleContext, dtype: np.dtype[Any]) -> Any:
    is_largest = ctx.params["select_prim"] is lax.ge_p
    return (reductions.lowest if is_largest else reductions.highest)(dtype)


def select_and_gather_add(ctx: RuleContext, tangents: Array, operand: Array) -> Any:
    """The tangent of the element each window selects; NaN is selected by position, so flags."""
    slides = _slides(ctx, ctx.in_shapes[1], ctx.out_shapes[0])
    if 0 in ctx.padded_shape(ctx.out_shapes[0]):
        return zeros(ctx, ctx.out_avals[0])
    if _meets_padding(ctx, slides):
        inits = (_worst(ctx, operand.dtype), reductions.zero(operand.dtype))
        pair = (operand, tangents)
        return fit(ctx, _reduce_real(ctx, slides, pair, inits, _chooser(ctx))[1])
    laid, params = _lay_out(ctx, slides, [tangents, operand], [0, 0])
    return fit(ctx, ctx.bind(*laid, **params))


def select_and_scatter_add(ctx: RuleContext, source: Array, operand: Array) -> Any:
    """Windows beyond the logical ones add 0; the rest select where the logical ones do."""
    slides = _slides(ctx, ctx.in_shapes[1], ctx.in_shapes[0])
    for slide in slides:
        if is_symbolic(slide.size) != is_symbolic(slide.out) and not is_symbolic(slide.window):
            ctx.refuse(f"an axis of size {slide.size} has {slide.out} windows at all its sizes")
    if 0 in (*source.shape, *operand.shape):
        return zeros(ctx, ctx.out_avals[0])
    opened = [i for i, s in enumerate(slides) if _is_open(s)]
    source = ctx.fill(source, axes=opened, value=0, shape=ctx.in_shapes[0])
    if any(map(_is_irregular, slides)):
        return _scatter_selected(ctx, slides, source, operand)
    worst = _worst(ctx, operand.dtype)
    read = [i for i in opened if slides[i].reads_padding(ctx)]
    operand = ctx.fill(operand, axes=read, value=worst, shape=ctx.in_shapes[1])
    padding = list(ctx.params["padding"])
    for i in opened:
        operand, padding[i] = slides[i].place(ctx, operand, i, worst), (0, 0)
    out = ctx.bind(source, operand, padding=tuple(padding))
    for i in opened:
        out = slides[i].take_back(ctx, out, i)
    return out


def _scatter_selected(
    ctx: RuleContext, slides: Sequence[Slide], source: Array, operand: Array
) -> Any:
    """Add the source of each window where its selected element came from (a window of any size)."""
    count = math.prod(operand.shape)
    if count > INT32_MAX:
        ctx.refuse("its operand has more positions than int32 holds in this bucket", in_bucket=True)
    origin = jnp.arange(count, dtype=jnp.int32).reshape(operand.shape)
    # An empty window selects the origin `count`, which is out of bounds, and the scatter drops it.
    inits = (_worst(ctx, operand.dtype), np.int32(count))
    pair = (operand, origin)
    chosen = _reduce_real(ctx, slides, pair, inits, _chooser(ctx), starts=False)[1]
    out = jnp.zeros(count, source.dtype).at[chosen.reshape(-1)].add(source.reshape(-1), mode="drop")
    return out.reshape(operand.shape)


def select_and_scatter(ctx: RuleContext, operand: Array, source: Array, init: Array) -> Any:
    """Only rows of their own can be padding: what a user's scatter does with it is unknown."""
    if any(map(_is_open, _slides(ctx, ctx.in_shapes[0], ctx.in_shapes[1]))):
        ctx.refuse("windows slide along a symbolic axis, and its scatter is the user's own")
    return ctx.bind(operand, source, init)


TABLE: dict[Any, Rule] = {
    "reduce_window": reduce_window,
    "reduce_window_sum": reduction(reductions.zero),
    "reduce_window_max": reduction(reductions.lowest),
    "reduce_window_min": reduction(reductions.highest),
    "select_and_gather_add": select_and_gather_add,
    "select_and_scatter_add": select_and_scatter_add,
    "select_and_scatter": select_and_scatter,
}
