"""One window at a run-time position: read or written at the place that the logical sizes give.

The rules of slices, gathers and scatters share this. A start is clamped, or compared with the end
of the axis, by the logical sizes. A window of symbolic size may then reach beyond the padded array,
because its padded size is larger than its logical one. So an array that is read gets room at its
end (`with_room`), and a window that is written is moved back (`write_window`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bucketjit._masking.array_ops import crop, extend, select, shift_right
from bucketjit._masking.constant_folding import known_int
from bucketjit._masking.rule_context import RuleContext
from bucketjit._sizes.expressions import Dim, Shape, is_symbolic

INT32_MAX = 2**31 - 1  # the largest index: sizes and positions are int32 at run time


def saturate(index: Any) -> Any:
    """``index`` as int32; what int32 cannot hold becomes its nearest value."""
    info = jnp.iinfo(index.dtype)
    numpy: Any = np if isinstance(index, np.ndarray | np.integer) else jnp
    if info.max > INT32_MAX:
        index = numpy.minimum(index, numpy.asarray(INT32_MAX, index.dtype))
    if info.min < -INT32_MAX - 1:
        index = numpy.maximum(index, numpy.asarray(-INT32_MAX - 1, index.dtype))
    return wrapped(index)


def as_index(index: Array) -> Any:
    """Indices of a gather or scatter as int32.

    ``jax.numpy`` indexes an axis of static size with int32, and one of symbolic size with the
    widest signed type. The exact run has static sizes, so the low 32 bits of a wide index are the
    index that it uses.
    """
    unsigned = jnp.issubdtype(index.dtype, jnp.unsignedinteger)
    return saturate(index) if unsigned else wrapped(index)


def wrapped(index: Any) -> Any:
    """``index`` as int32, by its low bits."""
    if isinstance(index, np.ndarray | np.integer):
        return index.astype(np.int32)
    return lax.convert_element_type(index, jnp.int32)


def clamp(ctx: RuleContext, start: Array, dim: Dim, size: Dim) -> Any:
    """Starts (int32) of a window of ``size`` moved inside an axis of logical size ``dim``."""
    constant = _clamped(start, dim, size)
    if constant is not None:
        return np.int32(constant)
    end = lax.convert_element_type(ctx.logical(dim - size), start.dtype)
    return lax.clamp(np.zeros((), start.dtype), start, end)


def _clamped(start: Array, dim: Dim, size: Dim) -> int | None:
    """The start that `clamp` gives, if that is the same whatever the logical sizes are."""
    constant, room = known_int(start), dim - size
    if constant is None:
        return None
    if constant <= 0:
        return 0
    return None if is_symbolic(room) else min(constant, int(room))


def inside(ctx: RuleContext, start: Array, dim: Dim, size: Dim) -> Any:
    """Whether a window of ``size`` at ``start`` (int32) lies in an axis of logical ``dim``."""
    return (start >= 0) & (start <= ctx.logical(dim - size))


def fits(ctx: RuleContext, dim: Dim, size: Dim) -> bool:
    """Whether starts may be judged by the padded sizes: the room for them is the same."""
    room = dim - size
    return not is_symbolic(room) and ctx.padded(dim) - ctx.padded(size) == room


def is_whole(dim: Dim, size: Dim) -> bool:
    """Whether a window of ``size`` is all of an axis of size ``dim``."""
    room = dim - size
    return not is_symbolic(room) and room == 0


def with_room(
    ctx: RuleContext, operand: Array, axis: int, dim: Dim, size: Dim, start: int | None = None
) -> Any:
    """Extend ``axis`` so that a window of padded size fits at ``start``; by default, anywhere."""
    last = ctx.padded(dim - size) if start is None else start
    return extend(operand, axis, 0, max(0, last + ctx.padded(size) - operand.shape[axis]))


def read_window(
    ctx: RuleContext, operand: Array, shape: Shape, starts: Sequence[Any], sizes: Shape
) -> Any:
    """The window of symbolic ``sizes`` at ``starts`` (int32), which are clamped."""
    begin, known = [], []
    for axis, (dim, start, size) in enumerate(zip(shape, starts, sizes, strict=True)):
        begin.append(clamp(ctx, start, dim, size))
        place = known_int(begin[axis])
        operand = with_room(ctx, operand, axis, dim, size, place)
        if place is not None:
            known.append(place)
    widths = ctx.padded_shape(sizes)
    if len(known) < len(begin):
        return lax.dynamic_slice(operand, begin, widths, allow_negative_indices=False)
    return lax.slice(operand, known, [n + width for n, width in zip(known, widths, strict=True)])


def write_window(
    ctx: RuleContext,
    operand: Array,
    shape: Shape,
    update: Array,
    sizes: Shape,
    starts: Sequence[Any],
    *,
    combine: Callable[[Any, Any], Any] | None = None,
    where: Any | None = None,
) -> Any:
    """Write a window of symbolic ``sizes`` at ``starts`` (int32), which are clamped.

    If the padded window would reach beyond the operand, it starts earlier, and the update is
    shifted by the same amount within it. So the operand, which is often much larger than the
    window, is neither copied nor extended.
    """
    begin, mask = [], where
    for axis, (dim, start, size) in enumerate(zip(shape, starts, sizes, strict=True)):
        start = clamp(ctx, start, dim, size)
        room = operand.shape[axis]
        update = crop(update, axis, min(room, update.shape[axis]))
        width = update.shape[axis]
        if is_symbolic(size) and not is_whole(dim, size):
            shift = jnp.int32(0)
            # True if the window at its greatest start would reach beyond the padded operand.
            if ctx.padded(dim - size) + width > room:
                moved = jnp.minimum(start, room - width)
                start, shift = moved, start - moved
                update = shift_right(update, axis, shift, width)
            place = [1] * axis + [width] + [1] * (operand.ndim - axis - 1)
            position = lax.broadcasted_iota(jnp.int32, place, axis) - shift
            here = (position >= 0) & (position < ctx.logical(size))
            mask = here if mask is None else mask & here
        begin.append(start)
    if combine is not None or mask is not None:
        old = lax.dynamic_slice(operand, begin, update.shape, allow_negative_indices=False)
        update = update if combine is None else combine(old, update)
        if mask is not None:
            update = select(mask, update, old)
    return lax.dynamic_update_slice(operand, update, begin, allow_negative_indices=False)
