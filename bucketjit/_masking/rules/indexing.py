"""Gathers: positions are compared with the logical sizes, not with the padded ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bucketjit._ir.expressions import Dim, Shape, is_symbolic
from bucketjit._masking.array_ops import crop, extend, select, shift_right
from bucketjit._masking.constants import known_int
from bucketjit._masking.rule_context import Rule, RuleContext, zeros

# --- regions ------------------------------------------------------------------------------------

# One window at a run-time position: read or written at the place that the logical sizes give.
#
# The rules of slices, gathers and scatters share this. A start is clamped, or compared with the end
# of the axis, by the logical sizes. A window of symbolic size may then reach beyond the padded
# array, because its padded size is larger than its logical one. So an array that is read gets room
# at its end (`with_room`), and a window that is written is moved back (`write_window`).

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
    begin: list[Any] = []
    for axis, (dim, start, size) in enumerate(zip(shape, starts, sizes, strict=True)):
        begin.append(clamp(ctx, start, dim, size))
        operand = with_room(ctx, operand, axis, dim, size, known_int(begin[axis]))
    widths, places = ctx.padded_shape(sizes), [*map(known_int, begin)]
    if None in places:
        return lax.dynamic_slice(operand, begin, widths, allow_negative_indices=False)
    limits = [int(n) + width for n, width in zip(begin, widths, strict=True)]
    return lax.slice(operand, [*map(int, begin)], limits)


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


# --- indexing -----------------------------------------------------------------------------------

_FILL = lax.GatherScatterMode.FILL_OR_DROP


def gather(ctx: RuleContext, operand: Any, indices: Any) -> Any:
    """Rewrite the indices so that judging them by padded sizes gives the logical answer.

    Padded rows of indices gather padded rows of the result, whatever they hold. A window of
    symbolic size may need room after the padded operand.
    """
    fill = ctx.symbolic_params.get("fill_value")
    if not is_symbolic(fill):
        return _gather(ctx, operand, indices)
    gathered = _gather(ctx, operand, indices, fill_value=0)
    real = _gather(ctx, jnp.ones(operand.shape, bool), indices, fill_value=False)
    return select(real, gathered, ctx.logical(fill))


def _gather(ctx: RuleContext, operand: Array, indices: Array, **fill: Any) -> Any:
    """Gather with a fill value that is a number, not a size."""
    if 0 in ctx.padded_shape(ctx.out_shapes[0]):
        # XLA's gather takes no slice of size 1 from an axis of size 0, however few slices it takes.
        return zeros(ctx, ctx.out_avals[0])
    # The plain gather that fills wraps wide indices to int32 before it judges them.
    indices = wrapped(indices) if ctx.params["mode"] == _FILL else as_index(indices)
    if indices.ndim == 1:
        return _one_window(ctx, operand, indices, **fill)
    shape, sizes = ctx.in_shapes[0], ctx.symbolic_params["slice_sizes"]
    mapped = ctx.params["dimension_numbers"].start_index_map
    changed = not all(fits(ctx, shape[axis], sizes[axis]) for axis in mapped)
    if changed:
        clips, before = ctx.params["mode"] != _FILL, indices
        moved = lambda: judged(ctx, before, sizes, mapped, clips, lambda _: jnp.int32(-1))  # noqa: E731
        indices = ctx.once(before, "gathered", moved)
    for axis, (dim, size) in enumerate(zip(shape, sizes, strict=True)):
        operand = with_room(ctx, operand, axis, dim, size)
    ragged = any(map(is_symbolic, ctx.in_shapes[1]))
    flags = {
        name: ctx.params[name] and not changed and not ragged
        for name in ("unique_indices", "indices_are_sorted")
    }
    return ctx.bind(operand, indices, **flags, **fill)


def judged(
    ctx: RuleContext,
    indices: Array,
    sizes: Shape,
    mapped: Sequence[int],
    clips: bool,
    outside: Callable[[tuple[int, ...]], Any],
    good: Any = None,
) -> Any:
    """Indices of windows moved into logical bounds, or sent outside: those that lie beyond them.

    Those of rows that are not ``good`` are sent outside, too. What is beyond the padded operand, or
    negative, is so already.
    """
    shape = ctx.in_shapes[0]
    columns = [*lax.split(indices, (1,) * len(mapped), indices.ndim - 1)]
    for k, axis in enumerate(mapped):
        if clips:
            columns[k] = clamp(ctx, columns[k], shape[axis], sizes[axis])
        elif not fits(ctx, shape[axis], sizes[axis]):
            here = columns[k] <= ctx.logical(shape[axis] - sizes[axis])
            good = here if good is None else good & here
    if good is not None:
        columns[0] = select(good, columns[0], outside(columns[0].shape))
    return columns[0] if len(columns) == 1 else lax.concatenate(columns, indices.ndim - 1)


def _one_window(ctx: RuleContext, operand: Array, indices: Array, **fill: Any) -> Any:
    """A single window is a dynamic slice: how JAX traces ``x[1:]`` of a symbolic axis."""
    numbers = ctx.params["dimension_numbers"]
    shape, sizes = ctx.in_shapes[0], ctx.symbolic_params["slice_sizes"]
    starts = [np.int32(0)] * len(shape)
    for k, axis in enumerate(numbers.start_index_map):
        starts[axis] = indices[k]
    out = read_window(ctx, operand, shape, starts, sizes)
    out = lax.squeeze(out, numbers.collapsed_slice_dims)
    if ctx.params["mode"] != _FILL or not numbers.start_index_map:
        return out
    good = [inside(ctx, starts[a], shape[a], sizes[a]) for a in numbers.start_index_map]
    value = {**ctx.params, **fill}["fill_value"]
    return select(functools.reduce(jnp.logical_and, good), out, value)


TABLE: dict[Any, Rule] = {"gather": gather}
