"""What a program of concrete traces takes from the trace at the logical sizes."""

from __future__ import annotations

from typing import Any

from bucketjit import _jax
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._tracing.skeleton import leaked_p


def leaked(ctx: RuleContext) -> Any:
    """An input of the executable, padded like any other."""
    aval = ctx.out_avals[0]
    value = ctx.leaked(ctx.params["index"])
    return _jax.with_type(value, aval.dtype, bool(getattr(aval, "weak_type", False)))


TABLE: dict[Any, Rule] = {leaked_p: leaked}
