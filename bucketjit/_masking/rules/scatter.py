"""Scatters: updates land by logical sizes; those of padded rows and padded windows do not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bucketjit._ir.expressions import Dim, Shape, is_symbolic
from bucketjit._masking.constants import known_int
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules import indexing

_MODE = lax.GatherScatterMode


def scatter(combine: Callable[[Any, Any], Any] | None) -> Rule:
    """The rule of the scatter that puts ``combine(old, update)`` in place."""

    def rule(ctx: RuleContext, operand: Any, indices: Any, updates: Any) -> Any:
        """One window is written in place; many have their indices rewritten."""
        applies = ctx.primitive.name == "scatter" and ctx.params["update_jaxpr"] is not None
        if indices.ndim == 1 and not applies:
            return _written_window(ctx, operand, indexing.as_index(indices), updates, combine)
        return _many_windows(ctx, operand, indices, updates)

    return rule


def _window_sizes(ctx: RuleContext) -> Shape:
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
            here = indexing.inside(ctx, index[k], shape[axis], sizes[axis])
            where = here if where is None else where & here
    update = lax.expand_dims(update, numbers.inserted_window_dims)
    places = map(known_int, starts)
    lies_inside = all(map(functools.partial(_surely_inside, ctx), places, shape, sizes))
    if lies_inside and combine in (None, lax.add) and ctx.padding.is_zeros(operand, shape):
        cut = [a for a, n in enumerate(sizes) if not indexing.is_whole(shape[a], n)]
        update = ctx.fill(update, axes=cut, value=0, shape=sizes)
        sides = zip(map(int, starts), update.shape, operand.shape, strict=True)
        edges = [(start, room - start - width, 0) for start, width, room in sides]
        return lax.pad(update, np.zeros((), update.dtype), edges)
    options = {"combine": combine, "where": where}
    return indexing.write_window(ctx, operand, shape, update, sizes, starts, **options)


def _surely_inside(ctx: RuleContext, start: int | None, dim: Dim, size: Dim) -> bool:
    if start is None or start < 0:
        return False
    return (start == 0 and indexing.is_whole(dim, size)) or (
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
    batch = () if unique else numbers.scatter_indices_batching_dims
    good = ctx.in_bounds(dims, [a for a in range(len(dims)) if a not in batch])
    opened = [a for a, n in enumerate(sizes) if is_symbolic(n)]
    partial = [a for a in opened if not indexing.is_whole(shape[a], sizes[a])]
    if good is None and not partial and all(indexing.fits(ctx, shape[a], sizes[a]) for a in mapped):
        kept = ctx.params["indices_are_sorted"] and not any(map(is_symbolic, dims))
        return ctx.bind(operand, indices, updates, indices_are_sorted=kept)
    if not mapped and not partial:
        ctx.refuse("it has no index by which to drop the updates of padded rows")

    def moved() -> Any:
        good = ctx.in_bounds((*dims, 1), [a for a in range(len(dims)) if a not in batch])
        clips, outside = ctx.params["mode"] == _MODE.CLIP, functools.partial(_outside, unique)
        return indexing.judged(ctx, indexing.as_index(indices), sizes, mapped, clips, outside, good)

    if not partial:
        places = ctx.once(indices, "scattered", moved)
    else:
        starts = indexing.as_index(indices)
        numbers, places, updates = _positions(ctx, partial, starts, good, updates)
    options = {"indices_are_sorted": False, "mode": _MODE.FILL_OR_DROP}
    return ctx.bind(operand, places, updates, dimension_numbers=numbers, **options)


def _positions(
    ctx: RuleContext, partial: list[int], indices: Array, good: Any, updates: Array
) -> tuple[Any, Any, Any]:
    """Dimension numbers, indices and updates of single positions in place of windows."""
    shape, sizes = ctx.in_shapes[0], _window_sizes(ctx)
    columns = []
    for k, axis in enumerate(ctx.params["dimension_numbers"].scatter_dims_to_operand_dims):
        start = indices[..., k]
        if ctx.params["mode"] == _MODE.CLIP:
            start = indexing.clamp(ctx, start, shape[axis], sizes[axis])
        else:
            here = indexing.inside(ctx, start, shape[axis], sizes[axis])
            good = here if good is None else good & here
        columns.append(start)
    numbers, columns, good, updates = _taken_apart(ctx, partial, columns, good, updates)
    columns = list(jnp.broadcast_arrays(*columns))
    unique = ctx.params["unique_indices"]
    columns[0] = jnp.where(good, columns[0], _outside(unique, columns[0].shape))
    return numbers, jnp.stack(columns, axis=-1), updates


def _outside(unique: bool, shape: tuple[int, ...]) -> Any:
    """Indices beyond every axis; each another one where indices are promised to be unique."""
    if not unique:
        return jnp.int32(indexing.INT32_MAX)
    return indexing.INT32_MAX - lax.reshape(lax.iota(jnp.int32, math.prod(shape)), shape)


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
    "scatter": scatter(None),
    "scatter-add": scatter(lax.add),
    "scatter-sub": scatter(lax.sub),
    "scatter-mul": scatter(lax.mul),
    "scatter-min": scatter(lax.min),
    "scatter-max": scatter(lax.max),
}
