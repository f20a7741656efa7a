"""Reshape: axes are merged and split by their logical sizes.

    b:f32[m] = reshape a:f32[n,3]    a is padded to [8,3], real rows at the front: plain reshape
    b:f32[m] = reshape a:f32[3,n]    a is padded to [3,8], real data in 3 pieces: taken by index

Both shapes are cut into groups of axes of equal product. A group is reshaped plainly if its only
symbolic axis is its first one, both before and after. Its real data is then at the front of the
flattened group at any padded size. In any other group, real data is scattered over the padded
group. There each position of the result computes the place of its element from the logical strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from bucketjit._jax.primitives import primitives
from bucketjit._masking.array_ops import crop
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules._regions import INT32_MAX
from bucketjit._sizes.expressions import Shape, is_symbolic
from bucketjit._sizes.reshape_groups import groups, without_ones


def reshape(ctx: RuleContext, operand: Array) -> Any:
    """Each group of axes is reshaped by itself, plainly or by computed index."""
    sharding = ctx.params.get("sharding")  # inside ``shard_map`` one that cuts nothing
    if sharding is not None and any(n is not None for n in getattr(sharding, "spec", (sharding,))):
        ctx.refuse(
            "a reshape with an explicit sharding",
            "reshape first and reshard the result, or leave the axis static (None or _)",
        )
    shape = ctx.in_shapes[0]
    if (order := ctx.params.get("dimensions")) is not None:
        operand, shape = lax.transpose(operand, order), tuple(shape[a] for a in order)
    before, after = without_ones(shape), without_ones(ctx.out_shapes[0])
    out = lax.reshape(operand, ctx.padded_shape(before))
    axis = 0
    for old, new in groups(before, after):
        out = _regroup(ctx, out, axis, old, new)
        axis += len(new)
    return lax.reshape(out, ctx.padded_shape(ctx.out_shapes[0]))


def _regroup(ctx: RuleContext, array: Array, axis: int, old: Shape, new: Shape) -> Any:
    """Reshape the axes from ``axis`` on, of logical sizes ``old``, to ``new``."""
    if old == new:
        return array
    head, tail = array.shape[:axis], array.shape[axis + len(old) :]
    flat = lax.reshape(array, (*head, math.prod(ctx.padded_shape(old)), *tail))
    target = ctx.padded_shape(new)
    if flat.shape[axis] == 0 or not any(map(is_symbolic, (*old[1:], *new[1:]))):
        return lax.reshape(crop(flat, axis, math.prod(target)), (*head, *target, *tail))
    if max(flat.shape[axis], math.prod(target)) > INT32_MAX:
        ctx.refuse("it has more positions than int32 holds in this bucket", in_bucket=True)
    position = _ravel(target, _strides([ctx.logical(d) for d in new]))
    source = _unravel(position, [ctx.logical(d) for d in old], ctx.padded_shape(old))
    return jnp.take(flat, source, axis=axis, mode="clip")


def _strides(sizes: Sequence[Any]) -> list[Any]:
    """Row-major strides of an array of these sizes, ints or run-time scalars."""
    strides: list[Any] = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def _ravel(shape: Sequence[int], strides: Sequence[Any]) -> Any:
    """Number of each position of ``shape`` under these strides."""
    total = jnp.zeros((), jnp.int32)
    for axis, stride in enumerate(strides):
        total = total + lax.broadcasted_iota(jnp.int32, shape, axis) * stride
    return total


def _unravel(position: Array, sizes: Sequence[Any], padded: Sequence[int]) -> Any:
    """Where the elements of these numbers stand in the flattened padded array.

    An array with a logical size of 0 has no real element to find. The size counts as 1, to keep the
    division defined.
    """
    source = jnp.zeros((), jnp.int32)
    for axis, stride in enumerate(_strides(padded)):
        step = _strides(sizes)[axis]
        source = source + position // jnp.maximum(step, 1) * stride
        position = position % jnp.maximum(step, 1)
    return source


TABLE: dict[Any, Rule] = dict.fromkeys(primitives("reshape"), reshape)
