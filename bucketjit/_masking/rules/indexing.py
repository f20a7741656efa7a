"""Gathers and scatters: positions are compared with the logical sizes, not with the padded ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bucketjit._ir.expressions import Dim, Shape, is_symbolic
from bucketjit._masking.array_ops import crop, extend, select, shift_right
from bucketjit._masking.constant_folding import known_int
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
    found = _gather(ctx, operand, indices, fill_value=0)
    real = _gather(ctx, jnp.ones(operand.shape, bool), indices, fill_value=False)
    return select(real, found, ctx.logical(fill))


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
        given = indices
        indices = ctx.once(given, "gathered", lambda: _judged(ctx, given))
    for axis, (dim, size) in enumerate(zip(shape, sizes, strict=True)):
        operand = with_room(ctx, operand, axis, dim, size)
    ragged = any(map(is_symbolic, ctx.in_shapes[1]))
    flags = ctx.params
    return ctx.bind(
        operand,
        indices,
        unique_indices=flags["unique_indices"] and not changed and not ragged,
        indices_are_sorted=flags["indices_are_sorted"] and not changed and not ragged,
        **fill,
    )


def _judged(ctx: RuleContext, indices: Array) -> Any:
    """Indices moved into logical bounds; in a filling gather, -1 for those beyond them."""
    shape, sizes = ctx.in_shapes[0], ctx.symbolic_params["slice_sizes"]
    mapped = ctx.params["dimension_numbers"].start_index_map
    columns = [*lax.split(indices, (1,) * len(mapped), indices.ndim - 1)]
    for k, axis in enumerate(mapped):
        if ctx.params["mode"] != _FILL:
            columns[k] = clamp(ctx, columns[k], shape[axis], sizes[axis])
        elif not fits(ctx, shape[axis], sizes[axis]):
            good = columns[k] <= ctx.logical(shape[axis] - sizes[axis])
            columns[k] = select(good, columns[k], jnp.int32(-1))
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


# --- scatter ------------------------------------------------------------------------------------

# Scatters: updates land by logical sizes; those of padded rows and padded windows do not.

_MODE = lax.GatherScatterMode


def scatter(combine: Callable[[Any, Any], Any] | None) -> Rule:
    """The rule of the scatter that puts ``combine(old, update)`` in place."""

    def rule(ctx: RuleContext, operand: Any, indices: Any, updates: Any) -> Any:
        """One window is written in place; many have their indices rewritten."""
        applies = ctx.primitive.name == "scatter" and ctx.params["update_jaxpr"] is not None
        if indices.ndim == 1 and not applies:
            return _written_window(ctx, operand, as_index(indices), updates, combine)
        return _many_windows(ctx, operand, indices, updates)

    return rule


def _window_sizes(ctx: RuleContext) -> Shape:
    """Size of the update window along each axis of the operand."""
    numbers = ctx.params["dimension_numbers"]
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    updates, rank = ctx.in_shapes[2], len(ctx.in_shapes[0])
    rest = iter(numbers.update_window_dims)
    return tuple(1 if axis in single else updates[next(rest)] for axis in range(rank))


def _written_window(ctx: RuleContext, operand: Any, index: Any, update: Any, combine: Any) -> Any:
    """A single window is written like a dynamic update: how ``x.at[1:].add(y)`` is traced."""
    numbers = ctx.params["dimension_numbers"]
    shape, sizes = ctx.in_shapes[0], _window_sizes(ctx)
    starts, where = [np.int32(0)] * len(shape), None
    for k, axis in enumerate(numbers.scatter_dims_to_operand_dims):
        starts[axis] = index[k]
        if ctx.params["mode"] != _MODE.CLIP:
            here = inside(ctx, index[k], shape[axis], sizes[axis])
            where = here if where is None else where & here
    update = lax.expand_dims(update, numbers.inserted_window_dims)
    known = [*map(known_int, starts)]
    lies_inside = all(map(functools.partial(_surely_inside, ctx), known, shape, sizes))
    if lies_inside and combine in (None, lax.add) and ctx.padding.is_zeros(operand):
        cut = [a for a, n in enumerate(sizes) if not is_whole(shape[a], n)]
        update = ctx.fill(update, axes=cut, value=0, shape=sizes)
        sides = zip(map(int, starts), update.shape, operand.shape, strict=True)
        edges = [(start, room - start - width, 0) for start, width, room in sides]
        return lax.pad(update, np.zeros((), update.dtype), edges)
    return write_window(ctx, operand, shape, update, sizes, starts, combine=combine, where=where)


def _surely_inside(ctx: RuleContext, start: int | None, dim: Dim, size: Dim) -> bool:
    """Whether a window lies in an axis at all sizes of the bucket."""
    if start is None or start < 0:
        return False
    return (start == 0 and is_whole(dim, size)) or (
        not is_symbolic(dim) and start + ctx.padded(size) <= dim
    )


def _many_windows(ctx: RuleContext, operand: Any, indices: Any, updates: Any) -> Any:
    """Indices that must not write are sent out of bounds, where a scatter drops updates.

    A window whose padding would be written is first split into single positions.
    """
    numbers, unique = ctx.params["dimension_numbers"], ctx.params["unique_indices"]
    shape, sizes = ctx.in_shapes[0], _window_sizes(ctx)
    mapped = numbers.scatter_dims_to_operand_dims
    dims = ctx.in_shapes[1][:-1]
    # Padded rows of a batch write to padded rows of the operand, which does no harm. But their
    # indices may repeat, so they are dropped if the equation promises unique indices.
    own = () if unique else numbers.scatter_indices_batching_dims
    good = ctx.in_bounds(dims, [a for a in range(len(dims)) if a not in own])
    partial = [a for a, n in enumerate(sizes) if is_symbolic(n) and not is_whole(shape[a], n)]
    if good is None and not partial and all(fits(ctx, shape[a], sizes[a]) for a in mapped):
        kept = ctx.params["indices_are_sorted"] and not any(map(is_symbolic, dims))
        return ctx.bind(operand, indices, updates, indices_are_sorted=kept)
    if not mapped and not partial:
        ctx.refuse("it has no index by which to drop the updates of padded rows")

    if not partial:
        judged = ctx.once(indices, "scattered", lambda: _kept_or_dropped(ctx, indices, own))
    else:
        numbers, judged, updates = _positions(ctx, partial, as_index(indices), good, updates)
    return ctx.bind(
        operand,
        judged,
        updates,
        dimension_numbers=numbers,
        indices_are_sorted=False,
        mode=_MODE.FILL_OR_DROP,
    )


def _kept_or_dropped(ctx: RuleContext, indices: Array, own: Sequence[int]) -> Any:
    """Indices of which those that must not write are out of bounds.

    What is beyond the padded operand, or negative, is so already.
    """
    shape, sizes = ctx.in_shapes[0], _window_sizes(ctx)
    mapped = ctx.params["dimension_numbers"].scatter_dims_to_operand_dims
    rows = ctx.in_shapes[1][:-1]
    good = ctx.in_bounds((*rows, 1), [a for a in range(len(rows)) if a not in own])
    columns = [*lax.split(as_index(indices), (1,) * len(mapped), indices.ndim - 1)]
    for k, axis in enumerate(mapped):
        if ctx.params["mode"] == _MODE.CLIP:
            columns[k] = clamp(ctx, columns[k], shape[axis], sizes[axis])
        elif not fits(ctx, shape[axis], sizes[axis]):
            here = columns[k] <= ctx.logical(shape[axis] - sizes[axis])
            good = here if good is None else good & here
    if good is not None:
        outside = _outside(columns[0].shape, ctx.params["unique_indices"])
        columns[0] = select(good, columns[0], outside)
    return columns[0] if len(columns) == 1 else lax.concatenate(columns, indices.ndim - 1)


def _positions(
    ctx: RuleContext, partial: list[int], indices: Array, good: Any, updates: Array
) -> tuple[Any, Any, Any]:
    """Dimension numbers, indices and updates of single positions in place of windows."""
    shape, sizes = ctx.in_shapes[0], _window_sizes(ctx)
    columns = []
    for k, axis in enumerate(ctx.params["dimension_numbers"].scatter_dims_to_operand_dims):
        start = indices[..., k]
        if ctx.params["mode"] == _MODE.CLIP:
            start = clamp(ctx, start, shape[axis], sizes[axis])
        else:
            here = inside(ctx, start, shape[axis], sizes[axis])
            good = here if good is None else good & here
        columns.append(start)
    numbers, columns, good, updates = _taken_apart(ctx, partial, columns, good, updates)
    columns = list(jnp.broadcast_arrays(*columns))
    unique = ctx.params["unique_indices"]
    columns[0] = jnp.where(good, columns[0], _outside(columns[0].shape, unique))
    return numbers, jnp.stack(columns, axis=-1), updates


def _outside(shape: tuple[int, ...], unique: bool) -> Any:
    """Indices beyond every axis; each another one where indices are promised to be unique."""
    if not unique:
        return jnp.int32(INT32_MAX)
    return INT32_MAX - lax.reshape(lax.iota(jnp.int32, math.prod(shape)), shape)


def _taken_apart(
    ctx: RuleContext, axes: list[int], columns: list[Any], good: Any, updates: Array
) -> tuple[Any, list[Any], Any, Any]:
    """Turn the window positions along these axes of the operand into rows of indices."""
    numbers = ctx.params["dimension_numbers"]
    sizes = _window_sizes(ctx)
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windowed = [a for a in range(len(sizes)) if a not in single]
    place = dict(zip(windowed, numbers.update_window_dims, strict=True))
    rows = [a for a in range(updates.ndim) if a not in numbers.update_window_dims]
    left = [a for a in windowed if a not in axes]

    updates = lax.transpose(updates, [*rows, *(place[a] for a in axes), *(place[a] for a in left)])
    num_indices = len(rows) + len(axes)
    widths = updates.shape[:num_indices]
    columns = [lax.expand_dims(c, range(len(rows), num_indices)) for c in columns]
    good = True if good is None else lax.expand_dims(good, range(len(rows), num_indices))
    mapped = [*numbers.scatter_dims_to_operand_dims]
    for i, axis in enumerate(axes):
        shape = [n if a == len(rows) + i else 1 for a, n in enumerate(widths)]
        position = lax.broadcasted_iota(jnp.int32, shape, len(rows) + i)
        good = good & (position < ctx.logical(sizes[axis]))
        if axis in mapped:
            columns[mapped.index(axis)] += position
        else:
            mapped.append(axis)
            columns.append(position)
    columns[0] = jnp.broadcast_to(columns[0], widths)
    numbers = numbers._replace(
        update_window_dims=tuple(range(num_indices, updates.ndim)),
        inserted_window_dims=tuple(sorted([*numbers.inserted_window_dims, *axes])),
        scatter_dims_to_operand_dims=tuple(mapped),
    )
    return numbers, columns, good, updates


TABLE: dict[Any, Rule] = {
    "gather": gather,
    "scatter": scatter(None),
    "scatter-add": scatter(lax.add),
    "scatter-sub": scatter(lax.sub),
    "scatter-mul": scatter(lax.mul),
    "scatter-min": scatter(lax.min),
    "scatter-max": scatter(lax.max),
}
