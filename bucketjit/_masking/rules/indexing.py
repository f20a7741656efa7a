"""Gather: indices are clamped or judged by the logical sizes of the axes they index."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bucketjit._jax.primitives import primitives
from bucketjit._masking.array_ops import select
from bucketjit._masking.rule_context import Rule, RuleContext, zeros
from bucketjit._masking.rules._regions import (
    as_index,
    clamp,
    fits,
    inside,
    read_window,
    with_room,
    wrapped,
)
from bucketjit._sizes.expressions import is_symbolic

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
        indices = _judged(ctx, indices)
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
    """Indices moved into logical bounds; in a filling gather, -1 for those outside of them."""
    shape, sizes = ctx.in_shapes[0], ctx.symbolic_params["slice_sizes"]
    columns = []
    for k, axis in enumerate(ctx.params["dimension_numbers"].start_index_map):
        start = indices[..., k]
        if ctx.params["mode"] == _FILL:
            good = inside(ctx, start, shape[axis], sizes[axis])
            columns.append(jnp.where(good, start, jnp.int32(-1)))
        else:
            columns.append(clamp(ctx, start, shape[axis], sizes[axis]))
    return jnp.stack(columns, axis=-1)


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


TABLE: dict[Any, Rule] = dict.fromkeys(primitives("gather"), gather)
