"""What a program of concrete traces takes from the trace at the logical sizes.

Such a program comes from traces at several concrete sizes. A constant that differs between the
traces is a size constant: an input of the executable, taken from a trace at the logical sizes of
the call. See `bucketjit._tracing.concrete`.
"""

from __future__ import annotations

from typing import Any

from bucketjit._ir.size_constant import size_constant_p
from bucketjit._jax.arrays import with_type
from bucketjit._masking.rule_context import Rule, RuleContext


def size_constant(ctx: RuleContext) -> Any:
    """An input of the executable, padded like any other."""
    aval = ctx.out_avals[0]
    value = ctx.size_constant(ctx.params["index"])
    return with_type(value, aval.dtype, bool(getattr(aval, "weak_type", False)))


TABLE: dict[Any, Rule] = {size_constant_p: size_constant}
