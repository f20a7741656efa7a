"""Primitives that say something about an array without changing it: names, placement, metadata."""

from __future__ import annotations

from typing import Any

from jax import Array

from bucketjit._jax.primitives import primitives
from bucketjit._masking.rule_context import Rule, RuleContext


def annotation(ctx: RuleContext, *operands: Array) -> Any:
    """The padded array is named, placed or kept like the logical one."""
    return ctx.bind(*operands)


_NAMES = (
    *("name", "tie", "dce_sink"),
    *("device_put", "with_memory_space_constraint"),
    *("sharding_constraint", "reshard", "layout_constraint", "inspect_sharding"),
)

TABLE: dict[Any, Rule] = {
    **dict.fromkeys(primitives(*_NAMES), annotation),
    "xla_metadata_value": annotation,  # by name: programs that use it import its module
}
