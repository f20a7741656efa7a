"""Collectives, over axes that ``vmap`` has turned into axes of an array and over axes of a mesh.

Under ``vmap(axis_name=...)``, a ``psum`` over the mapped axis becomes a sum over an axis given by
its position. Its transpose becomes a sum over no axis at all. These are reductions like any other.

Over an axis of a mesh, a collective of closed axes runs as it stands, and no rule is asked. One of
open axes combines positions of different shards. If the sizes are the same on all shards, as in a
``shard_map``, so are the positions of the padding, and a sum by element is right. If they differ
(`RuleContext.uneven`), the exact program would combine arrays of different shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bucketjit._ir.shard_reductions import shard_mean_p, shard_psum_p
from bucketjit._jax.primitives import primitive, primitives
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules._monoids import Identity, highest, lowest, zero
from bucketjit._masking.rules.refused import MOVED, REDUCE_FIRST
from bucketjit._masking.shard_types import CASTS, WITHOUT_TYPES
from bucketjit._sizes.expressions import is_symbolic


def fold(identity: Identity, name: str = "") -> Rule:
    """The rule of a fold over axes given by position, or of a mesh."""

    def rule(ctx: RuleContext, *operands: Array) -> Any:
        """Padding holds the neutral element, so it cannot change the result."""
        axes = ctx.params["axes"]
        placed = tuple(a for a in axes if isinstance(a, int))
        if _is_uneven(ctx, axes):
            ctx.refuse(
                "it combines an open axis whose size differs from shard to shard", REDUCE_FIRST
            )
        if not axes:
            return operands if ctx.primitive.multiple_results else operands[0]
        return _bind(
            ctx, name, *(ctx.fill(x, axes=placed, value=identity(x.dtype)) for x in operands)
        )

    return rule


def _is_uneven(ctx: RuleContext, axes: Iterable[Any]) -> bool:
    """Whether open axes of shards whose sizes differ are combined."""
    named = any(a in ctx.uneven for a in axes)
    return named and any(any(map(is_symbolic, shape)) for shape in ctx.in_shapes)


def _bind(ctx: RuleContext, name: str, *operands: Array) -> Any:
    """Run the primitive of the equation, or another one that takes groups of shards besides."""
    other = primitive(name) if name else None
    if other is None:
        return ctx.bind(*operands)
    return other.bind(*operands, **ctx.params, axis_index_groups=None)


def gather(ctx: RuleContext, operand: Array) -> Any:
    """Closed axes are gathered as they are."""
    if any(map(is_symbolic, ctx.in_shapes[0])):
        ctx.refuse(MOVED, REDUCE_FIRST)
    return _bind(ctx, WITHOUT_TYPES[ctx.primitive.name], operand)


def mean(ctx: RuleContext, operand: Array) -> Any:
    """The rows of each shard weigh its value; half floats are summed in float32."""
    axis, rows = ctx.symbolic_params["axis"], ctx.logical(ctx.symbolic_params["rows"])
    if _is_uneven(ctx, (axis,)):
        ctx.refuse("it combines an open axis whose size differs from shard to shard", REDUCE_FIRST)
    kind = jnp.promote_types(operand.dtype, jnp.float32)
    weight = jnp.asarray(rows, jnp.finfo(kind).dtype)
    total = jax.lax.psum(operand.astype(kind) * weight, axis)
    return (total / jax.lax.psum(weight, axis)).astype(operand.dtype)


def total(ctx: RuleContext, operand: Array) -> Any:
    """The values of all shards are added as they are."""
    axis = ctx.symbolic_params["axis"]
    if _is_uneven(ctx, (axis,)):
        ctx.refuse("it combines an open axis whose size differs from shard to shard", REDUCE_FIRST)
    return jax.lax.psum(operand, axis)


def cast(ctx: RuleContext, operand: Array) -> Any:
    """The value stays as it is: types of masked programs do not say over which axes it varies."""
    return operand


_FOLDS = {"psum": zero, "pmax": lowest, "pmin": highest}

TABLE: dict[Any, Rule] = {
    **{p: fold(_FOLDS[name]) for name in _FOLDS for p in primitives(name)},
    **{p: fold(zero, WITHOUT_TYPES[p.name]) for p in primitives("psum_invariant")},
    **{p: gather for p in primitives("all_gather_invariant")},
    shard_mean_p: mean,
    shard_psum_p: total,
    **{p: cast for p in primitives(*CASTS)},
}
