"""Convolution over open batch, feature and spatial axes, and the convolutions of its gradients.

Windows that reach beyond the data read zeros. If the low padding depends on the logical size
(``SAME`` with a stride), the data is placed at run time. In the gradient by the kernel, the
cotangent is a kernel of symbolic size that slides over the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.errors import InconclusiveDimensionOperation
from jax.typing import ArrayLike

from bucketjit._ir.expressions import Dim, is_symbolic
from bucketjit._masking.array_ops import crop, in_every_row, select, take
from bucketjit._masking.rule_context import Rule, RuleContext, zeros

# --- sliding ------------------------------------------------------------------------------------

# Windows that slide along an axis of symbolic size: what convolutions and pooling share.
#
# Output ``o`` of a window of size ``w`` reads the positions ``o * stride + k * window_dilation -
# low`` for ``k < w`` of the axis, whose elements lie ``base_dilation`` apart. A window of a logical
# output position therefore never reads past the logical high padding. The high padding may be
# whatever gives the padded output size. The low padding moves the data: if it depends on the
# logical size, the data is placed at run time.

UNFOLD_LIMIT = 1 << 24  # elements along an axis that `unfold` may lay out


@dataclass(frozen=True, eq=False)
class Slide:
    """How a window slides along one axis; all sizes may be symbolic.

    Attributes:
        size: Size of the axis.
        window: Size of the window.
        stride: Distance from one window to the next.
        low, high: Padding before and after the axis; a negative number cuts.
        base_dilation: Distance from one element of the axis to the next.
        window_dilation: Distance from one element of the window to the next.
        out: Number of windows.
    """

    size: Dim
    window: Dim
    stride: Dim
    low: Dim
    high: Dim
    base_dilation: Dim
    window_dilation: Dim
    out: Dim

    @property
    def is_static(self) -> bool:
        """True if no size is symbolic: nothing to mask."""
        return not any(map(is_symbolic, vars(self).values()))

    @property
    def is_pointwise(self) -> bool:
        """True if each output reads the input at its own position alone (a batch axis)."""
        numbers = (self.window, self.stride, self.low, self.high, self.base_dilation)
        return not any(map(is_symbolic, numbers)) and numbers == (1, 1, 0, 0, 1)

    def check(self, ctx: RuleContext) -> None:
        """Refuse dilations that depend on a size."""
        if is_symbolic(self.base_dilation) or is_symbolic(self.window_dilation):
            ctx.refuse("a dilation that depends on a symbolic size")

    def reads_padding(self, ctx: RuleContext) -> bool:
        """True if a window of some logical size may read past the end of the data."""
        return ctx.padded(self.high) > 0

    def span(self, ctx: RuleContext) -> int:
        """How many positions the windows of all padded outputs cover (a static stride)."""
        window = ctx.padded(self.window)
        return (ctx.padded(self.out) - 1) * self.stride + (window - 1) * self.window_dilation + 1

    def dilated_size(self, size: int) -> int:
        """The size of the axis, given as ``size``, after base dilation."""
        return (size - 1) * self.base_dilation + 1 if size else 0

    def static_padding(self, ctx: RuleContext) -> tuple[int, int]:
        """Low and high padding that give the padded output size, for a static low padding."""
        return self.low, self.span(ctx) - self.low - self.dilated_size(ctx.padded(self.size))

    def low_bounds(self, ctx: RuleContext) -> tuple[int, int]:
        """``(most, least)``: how far a symbolic low padding goes, ``-least <= low <= most``."""
        return ctx.padded(self.low), ctx.padded(-self.low)

    def place(self, ctx: RuleContext, array: Array, axis: int, value: ArrayLike) -> Any:
        """The dilated axis with its low padding before it, cut to `span`; ``value`` elsewhere."""
        span, size = self.span(ctx), self.dilated_size(array.shape[axis])
        if not is_symbolic(self.low):
            return _pad(array, axis, self.low, span - self.low - size, self.base_dilation, value)
        most, least = self.low_bounds(ctx)
        high = max(0, span + least - size)
        wide = _pad(array, axis, most, high, self.base_dilation, value)
        return lax.dynamic_slice_in_dim(wide, most - ctx.logical(self.low), span, axis=axis)

    def take_back(self, ctx: RuleContext, placed: Any, axis: int) -> Any:
        """Undo `place` for a base dilation of 1: the axis at its padded size, 0 beyond the span."""
        span, size = placed.shape[axis], ctx.padded(self.size)
        if not is_symbolic(self.low):
            return _pad(placed, axis, -self.low, size - (span - self.low), 1, 0)
        most, least = self.low_bounds(ctx)
        wide = _pad(placed, axis, least, max(0, most + size - span), 1, 0)
        return lax.dynamic_slice_in_dim(wide, least + ctx.logical(self.low), size, axis=axis)

    def unfold(self, ctx: RuleContext, array: Array, axis: int, value: ArrayLike) -> Any:
        """The windows laid out one after the other, each of the padded window size."""
        outs, taps = ctx.padded(self.out), ctx.padded(self.window)
        if outs * taps > UNFOLD_LIMIT:
            ctx.refuse(
                f"windows of size {self.window} at stride {self.stride} would need more than "
                f"{UNFOLD_LIMIT:,} elements laid out in this bucket",
                in_bucket=True,
            )
        if outs == 1 and (self.low, self.base_dilation, self.window_dilation) == (0, 1, 1):
            tap = jnp.arange(taps, dtype=jnp.int32)
            real = (tap < ctx.logical(self.window)) & (tap < ctx.logical(self.size))
            return select(along(real, axis, array.ndim), crop(array, axis, taps), value)
        out, tap = (lax.broadcasted_iota(jnp.int32, (outs, taps), i) for i in (0, 1))
        position, real = self.positions(ctx, out, tap)
        return gather(array, axis, position.reshape(-1), real.reshape(-1), value)

    def positions(self, ctx: RuleContext, out: Array, tap: Array) -> tuple[Any, Any]:
        """Which element of the axis a tap of a window reads."""
        place = out * ctx.logical(self.stride) + tap * self.window_dilation - ctx.logical(self.low)
        element = place // self.base_dilation
        real = (tap < ctx.logical(self.window)) & (place >= 0) & (element < ctx.logical(self.size))
        if self.base_dilation != 1:
            real &= place % self.base_dilation == 0
        return jnp.clip(element, 0, max(ctx.padded(self.size) - 1, 0)), real


def _pad(array: Array, axis: int, low: int, high: int, dilation: int, value: ArrayLike) -> Any:
    """Dilate and pad one axis with ``value``; negative padding cuts."""
    config = [(low, high, dilation - 1) if i == axis else (0, 0, 0) for i in range(array.ndim)]
    return lax.pad(array, lax.convert_element_type(value, array.dtype), config)


def along(vector: Array, axis: int, rank: int) -> Any:
    """A vector as an array of this rank that broadcasts along ``axis``."""
    return vector.reshape(tuple(-1 if i == axis else 1 for i in range(rank)))


def gather(array: Array, axis: int, position: Array, real: Array, value: ArrayLike) -> Any:
    """These positions along ``axis``, with ``value`` where not real."""
    return select(along(real, axis, array.ndim), take(array, position, axis), value)


def fit(ctx: RuleContext, array: jax.Array, output: int = 0) -> jax.Array:
    """Cut or extend an output to its padded shape."""
    for axis, size in enumerate(ctx.padded_shape(ctx.out_shapes[output])):
        array = crop(array, axis, size)
    return array


def fit_all(ctx: RuleContext, outs: Any) -> Any:
    """Cut or extend all outputs of a primitive to their padded shapes."""
    if not ctx.primitive.multiple_results:
        return fit(ctx, outs)
    return [fit(ctx, out, i) for i, out in enumerate(outs)]


# --- convolution --------------------------------------------------------------------------------


class _Axis:
    """One spatial axis of a convolution.

    Attributes:
        index: Its number among the spatial axes.
        lhs, rhs, out: The axis of the data, the kernel and the result.
        slide: How the kernel slides along it.
    """

    def __init__(self, ctx: RuleContext, index: int) -> None:
        numbers, params = ctx.params["dimension_numbers"], ctx.symbolic_params
        self.index = index
        self.lhs = numbers.lhs_spec[2 + index]
        self.rhs = numbers.rhs_spec[2 + index]
        self.out = numbers.out_spec[2 + index]
        low, high = params["padding"][index]
        self.slide = Slide(
            size=ctx.in_shapes[0][self.lhs],
            window=ctx.in_shapes[1][self.rhs],
            stride=params["window_strides"][index],
            low=low,
            high=high,
            base_dilation=params["lhs_dilation"][index],
            window_dilation=params["rhs_dilation"][index],
            out=ctx.out_shapes[0][self.out],
        )


def convolution(ctx: RuleContext, lhs: Array, rhs: Array) -> Any:
    """Zeros on every axis that is contracted or read beyond its end, then a plain convolution."""
    axes = [_Axis(ctx, i) for i in range(len(ctx.params["window_strides"]))]
    for axis in axes:
        axis.slide.check(ctx)
        if is_symbolic(axis.slide.stride):
            ctx.refuse(f"the stride depends on a symbolic size ({axis.slide.stride})")
    if 0 in (*ctx.padded_shape(ctx.out_shapes[0]), *lhs.shape, *rhs.shape):
        return zeros(ctx, ctx.out_avals[0])
    lhs, rhs = _in_groups(ctx, *_fill(ctx, lhs, rhs, axes))
    out = fit(ctx, _convolve(ctx, lhs, rhs, axes))
    loose = [a for a in axes if _overreaches(a.slide)]
    if not loose or not jnp.issubdtype(lhs.dtype, jnp.inexact):
        return out
    # The convolution stays outside the branches: XLA's CPU backend has fast ones only there.
    is_finite = in_every_row(jnp.all(jnp.isfinite(lhs)))
    by_window = lambda _, x, y: _window_by_window(ctx, x, y, axes, loose)  # noqa: E731
    return lax.cond(is_finite, lambda plain, x, y: plain, by_window, out, lhs, rhs)


def _in_groups(ctx: RuleContext, *operands: Array) -> list[Any]:
    """The operands with axes as long as their groups need, which may have more room than these."""
    numbers, fitted = ctx.params["dimension_numbers"], list[Any](operands)
    for place, name in enumerate(("batch_group_count", "feature_group_count")):
        groups = ctx.symbolic_params[name]
        for i, axis in enumerate((numbers.lhs_spec[place], numbers.rhs_spec[0])):
            size = ctx.in_shapes[i][axis]
            each = size // groups if is_symbolic(groups) or groups > 1 else None
            if is_symbolic(each) or (each is not None and size != groups * each):
                ctx.refuse(
                    f"{name}={groups} divides an axis of size {size} into groups of symbolic "
                    "size, so padding would lie between the groups"
                )
            if each is not None:
                fitted[i] = crop(fitted[i], axis, each * ctx.padded(groups))
    return fitted


def _fill(ctx: RuleContext, lhs: Array, rhs: Array, axes: Sequence[_Axis]) -> tuple[Any, ...]:
    """Zeros into what is contracted: features, kernels, and data read beyond its end.

    The padding of a batch or feature axis with groups makes groups of its own. XLA may nevertheless
    compute the groups as one dense convolution with zeros between them. There a NaN of one group
    would reach the others, so the padding is filled too.
    """
    numbers = ctx.params["dimension_numbers"]
    kernels = [a for a in axes if is_symbolic(a.slide.window)]
    read = [a for a in axes if a.slide.reads_padding(ctx) or a in kernels]
    lhs_axes, rhs_axes = [a.lhs for a in read], [a.rhs for a in kernels]
    if is_symbolic(ctx.in_shapes[1][numbers.rhs_spec[1]]):
        lhs_axes.append(numbers.lhs_spec[1])
        rhs_axes.append(numbers.rhs_spec[1])
    groups = {"batch_group_count": numbers.lhs_spec[0], "feature_group_count": numbers.lhs_spec[1]}
    for name, grouped in groups.items():
        if is_symbolic(ctx.symbolic_params[name]):
            lhs_axes.append(grouped)
            rhs_axes.append(numbers.rhs_spec[0])
    # XLA's CPU backend puts the features last. Where that moves the last axis, its transpose is
    # fast for one array alone, and took 3.5 times as long with a select fused into it.
    lhs_moves = numbers.lhs_spec[1] != lhs.ndim - 1
    rhs_moves = numbers.rhs_spec[0] != rhs.ndim - 1
    lhs_axes = [axis for axis in lhs_axes if is_symbolic(ctx.in_shapes[0][axis])]
    if (lhs_axes, rhs_axes) == ([numbers.lhs_spec[1]], [numbers.rhs_spec[1]]):
        return tuple(ctx.fill_products(lhs, rhs, (lhs_moves, rhs_moves)))
    lhs = ctx.fill(lhs, axes=lhs_axes, value=0, shape=ctx.in_shapes[0], unfused=lhs_moves)
    rhs = ctx.fill(rhs, axes=rhs_axes, value=0, shape=ctx.in_shapes[1], unfused=rhs_moves)
    return lhs, rhs


def _convolve(
    ctx: RuleContext, lhs: Any, rhs: Any, axes: Sequence[_Axis], windows: Sequence[_Axis] = ()
) -> Any:
    """Convolve filled operands, the data where its logical low padding puts it."""
    padding, dilation, strides, spread = (
        list(ctx.params[name])
        for name in ("padding", "lhs_dilation", "window_strides", "rhs_dilation")
    )
    shifts = []
    for axis in axes:
        slide, i = axis.slide, axis.index
        if axis in windows:
            padding[i], dilation[i], strides[i], spread[i] = (0, 0), 1, 1, 1
        elif slide.is_static:
            continue
        elif not is_symbolic(slide.low):
            padding[i] = slide.static_padding(ctx)
        elif slide.base_dilation != 1 and slide.stride == 1:
            # Shifting the output spares laying out the zeros between dilated data.
            most, least = slide.low_bounds(ctx)
            span = slide.span(ctx) + most + least
            padding[i] = (most, span - most - slide.dilated_size(lhs.shape[axis.lhs]))
            shifts.append((axis, most))
        else:
            lhs = slide.place(ctx, lhs, axis.lhs, 0)
            padding[i], dilation[i] = (0, 0), 1
    options = {
        **{"padding": tuple(padding), "lhs_dilation": tuple(dilation)},
        **{"window_strides": tuple(strides), "rhs_dilation": tuple(spread)},
    }
    out = ctx.bind(lhs, rhs, **options)
    for axis, most in shifts:
        start, size = most - ctx.logical(axis.slide.low), ctx.padded(axis.slide.out)
        out = lax.dynamic_slice_in_dim(out, start, size, axis=axis.out)
    return out


# --- kernels of symbolic size ---------------------------------------------------------------
#
# Padding makes the kernel longer. Its zeros are multiplied with data that the logical kernel does
# not reach. That adds 0 unless the data is infinite or NaN; then each window is laid out by itself.


def _overreaches(slide: Slide) -> bool:
    """True if a padded kernel may meet data that the logical kernel does not reach."""
    if not is_symbolic(slide.window):
        return False
    data = (slide.size - 1) * slide.base_dilation + 1
    try:
        return not bool(slide.window * slide.window_dilation - slide.low >= data)
    except InconclusiveDimensionOperation:
        return True


def _window_by_window(
    ctx: RuleContext, lhs: Any, rhs: Any, axes: Sequence[_Axis], loose: Sequence[_Axis]
) -> Any:
    """Convolve with every window along the ``loose`` axes laid out by itself, padding zeroed."""
    counts = tuple(ctx.padded(a.slide.out) for a in loose)

    def window(number: Any) -> Any:
        data = lhs
        for axis, out in zip(loose, jnp.unravel_index(number, counts), strict=True):
            taps = jnp.arange(ctx.padded(axis.slide.window), dtype=jnp.int32)
            position, real = axis.slide.positions(ctx, out.astype(jnp.int32), taps)
            data = gather(data, axis.lhs, position, real, 0)
        return _convolve(ctx, data, rhs, axes, loose)

    stacked = lax.map(window, jnp.arange(math.prod(counts), dtype=jnp.int32))
    stacked = stacked.reshape(*counts, *stacked.shape[1:])
    stacked = jnp.squeeze(stacked, tuple(len(loose) + a.out for a in loose))
    outs, rest = [a.out for a in loose], iter(range(len(loose), stacked.ndim))
    order = [outs.index(i) if i in outs else next(rest) for i in range(stacked.ndim)]
    return fit(ctx, jnp.transpose(stacked, order))


TABLE: dict[Any, Rule] = {"conv_general_dilated": convolution}
