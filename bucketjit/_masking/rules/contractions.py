"""Contractions: both operands hold zero in the padding of every contracted axis."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax import Array

from bucketjit._jax.devices import by_platform
from bucketjit._jax.primitives import primitive
from bucketjit._masking.array_ops import crop
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules._cpu_contractions import arranged, contracted
from bucketjit._sizes.expressions import Dim, is_symbolic


def _matched(arrays: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> list[Any]:
    """Crop paired axes of two operands, equal at run time, to one padded size."""
    left, right = arrays
    for a, b in pairs:
        size = min(left.shape[a], right.shape[b])
        left, right = crop(left, a, size), crop(right, b, size)
    return [left, right]


def dot_general(ctx: RuleContext, lhs: Array, rhs: Array) -> Any:
    """Contracted padding is zero on both sides, since 0 * NaN is NaN; other axes are carried."""
    contract, batch = ctx.params["dimension_numbers"]
    lhs = ctx.fill(lhs, axes=contract[0], value=0)
    rhs = ctx.fill(rhs, axes=contract[1], value=0)
    lhs, rhs = _matched((lhs, rhs), [*zip(*contract, strict=True), *zip(*batch, strict=True)])
    arrangement = arranged(ctx, lhs, rhs)
    if arrangement is None:
        return ctx.bind(lhs, rhs)
    on_cpu = functools.partial(contracted, ctx, arrangement)
    return by_platform(lhs, rhs, cpu=on_cpu, default=ctx.bind)


def ragged_dot_general(ctx: RuleContext, lhs: Array, rhs: Array, group_sizes: Array) -> Any:
    """As `dot_general`; padded groups have no rows and meet zeros.

    Groups are laid out from the front of the ragged axis, so its padding stays at its end.
    """
    numbers = ctx.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    lhs = ctx.fill(lhs, axes=contract[0], value=0)
    rhs = ctx.fill(rhs, axes=(*contract[1], *numbers.rhs_group_dimensions), value=0)
    group_sizes = ctx.fill(group_sizes, value=0)
    pairs = [*zip(*contract, strict=True), *zip(*batch, strict=True)]
    lhs, rhs = _matched((lhs, rhs), pairs)
    return ctx.bind(lhs, rhs, group_sizes)


def scaled_dot(ctx: RuleContext, *operands: Array) -> Any:
    """As `dot_general`; padded scales are one, since a scale type need not have a zero."""
    contract, batch = ctx.params["dimension_numbers"]
    filled = []
    for position, operand in enumerate(operands):
        axes = contract[position % 2]
        filled.append(ctx.fill(operand, axes=axes, value=0 if position < 2 else 1))
    pairs = [*zip(*contract, strict=True), *zip(*batch, strict=True)]
    sides, scales = _matched(filled[:2], pairs), filled[2:]
    for side, axes in enumerate(contract):
        for axis in axes:
            size, count = ctx.in_shapes[side][axis], ctx.in_shapes[2 + side][axis]
            if not _whole_blocks(size, count, sides[side].shape[axis], scales[side].shape[axis]):
                ctx.refuse(
                    "a padded axis would not consist of whole blocks of one scale", in_bucket=True
                )
    return ctx.bind(*sides, *scales)


def _whole_blocks(size: Dim, count: Dim, padded_size: int, padded_count: int) -> bool:
    """Whether padding leaves the blocks that share a scale as they are."""
    if not is_symbolic(size) or (isinstance(count, int) and count == 1):
        return True
    block = size // count
    # `size // count` is an int only if the block size is the same at all logical sizes.
    return isinstance(block, int) and padded_size == block * padded_count


_RULES: dict[str, Rule] = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "scaled_dot": scaled_dot,
}

TABLE: dict[Any, Rule] = {
    p: rule for name, rule in _RULES.items() if (p := primitive(name)) is not None
}
