"""Cumulative operations: forward, padding comes after all that is real and is never seen.

In reverse they start in the padding, which then holds the neutral element.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from bucketjit._jax.primitives import primitive
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules._monoids import Identity, highest, lowest, one, zero
from bucketjit._sizes.expressions import is_symbolic


def cumulative(identity: Identity, ordered: bool = False) -> Rule:
    """The rule of a cumulative operation with this neutral element."""

    def rule(ctx: RuleContext, operand: Array) -> Any:
        """In reverse, padding holds the neutral element."""
        axis = ctx.params["axis"]
        if not is_symbolic(ctx.in_shapes[0][axis]):
            return ctx.bind(operand)
        if ordered and jnp.issubdtype(operand.dtype, np.complexfloating):
            ctx.refuse(
                "complex numbers have no order next to a NaN, so padding would change the result"
            )
        if not ctx.params["reverse"]:
            return ctx.bind(operand)
        return ctx.bind(ctx.fill(operand, axes=(axis,), value=identity(operand.dtype)))

    return rule


def _log_of_zero(dtype: np.dtype[Any]) -> Any:
    """The neutral element of logsumexp: -inf, without an imaginary part, which is an angle."""
    return np.array(-np.inf).astype(dtype)


_RULES: dict[str, Rule] = {
    "cumsum": cumulative(zero),
    "cumprod": cumulative(one),
    "cummax": cumulative(lowest, ordered=True),
    "cummin": cumulative(highest, ordered=True),
    "cumlogsumexp": cumulative(_log_of_zero),
}

TABLE: dict[Any, Rule] = {
    p: rule for name, rule in _RULES.items() if (p := primitive(name)) is not None
}
