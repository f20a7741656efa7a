"""Collectives over axes that ``vmap`` has turned into axes of an array.

Under ``vmap(axis_name=...)``, a ``psum`` over the mapped axis becomes a sum over an axis given by
its position. Its transpose becomes a sum over no axis at all. These are reductions like any other.
"""

from __future__ import annotations

from typing import Any

from jax import Array

from bucketjit._jax.primitives import primitive
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules._monoids import Identity, highest, lowest, zero
from bucketjit._masking.rules.refused import COLLECTIVE, COLLECTIVE_REMEDY


def fold(identity: Identity) -> Rule:
    """The rule of a fold over axes given by position.

    Args:
        identity: The neutral element by dtype.

    Returns:
        The rule. It refuses an axis given by name.
    """

    def rule(ctx: RuleContext, *operands: Array) -> Any:
        """Padding holds the neutral element, so it cannot change the result."""
        axes = ctx.params["axes"]
        if not all(isinstance(a, int) for a in axes):
            ctx.refuse(COLLECTIVE, COLLECTIVE_REMEDY)
        if not axes:
            return operands if ctx.primitive.multiple_results else operands[0]
        return ctx.bind(*(ctx.fill(x, axes=axes, value=identity(x.dtype)) for x in operands))

    return rule


TABLE: dict[Any, Rule] = {
    p: rule
    for name, rule in {"psum": fold(zero), "pmax": fold(lowest), "pmin": fold(highest)}.items()
    if (p := primitive(name)) is not None
}
