"""Windows that slide along an axis of symbolic size: what convolutions and pooling share.

Output ``o`` of a window of size ``w`` reads the positions ``o * stride + k * window_dilation -
low`` for ``k < w`` of the axis, whose elements lie ``base_dilation`` apart. A window of a logical
output position therefore never reads past the logical high padding. The high padding may be
whatever gives the padded output size. The low padding moves the data: if it depends on the logical
size, the data is placed at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from bucketjit._masking.array_ops import crop, select, take
from bucketjit._masking.rule_context import RuleContext
from bucketjit._sizes.expressions import Dim, is_symbolic

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
        found = (self.window, self.stride, self.low, self.high, self.base_dilation)
        return not any(map(is_symbolic, found)) and found == (1, 1, 0, 0, 1)

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
        at = out * ctx.logical(self.stride) + tap * self.window_dilation - ctx.logical(self.low)
        element = at // self.base_dilation
        real = (tap < ctx.logical(self.window)) & (at >= 0) & (element < ctx.logical(self.size))
        if self.base_dilation != 1:
            real &= at % self.base_dilation == 0
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
