"""Sorting and selection: padding sorts after everything real and loses every tie.

Padding comes after all real data along the sorted axis. In a stable order it therefore loses
every tie by its position, even against a real NaN or infinity, once it holds the value that
nothing sorts after. Operands keep their number, so the fast sorts of the backends still apply.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import dtypes

from bucketjit import _jax
from bucketjit._dims import is_symbolic
from bucketjit._rule import Rule, RuleContext, crop
from bucketjit.rules._monoids import last, lowest

_UNSTABLE = "which of equal values comes first is up to the backend and the size of the axis"


def sort(ctx: RuleContext, *operands: Any) -> list[Any]:
    """Keys of padding hold what sorts last; a stable sort keeps it behind real equals.

    Where every operand is a key, equal rows are the same row, so the order of ties is moot.
    """
    axis, num_keys = ctx.params["dimension"], ctx.params["num_keys"]
    if not is_symbolic(ctx.in_shapes[0][axis]):
        return list(ctx.bind(*operands))
    if not ctx.params["is_stable"] and num_keys < len(operands):
        ctx.refuse(f"the sort is not stable: {_UNSTABLE}", "use is_stable=True")
    keys = [ctx.fill(x, axes=(axis,), value=last(x.dtype)) for x in operands[:num_keys]]
    return list(ctx.bind(*keys, *operands[num_keys:]))


def top_k(ctx: RuleContext, operand: Any) -> list[Any]:
    """Padding holds what is below everything in the total order, -NaN included.

    Equal values go by index, and ``k`` is at most the logical size, so padding is never taken.
    """
    axis = ctx.params.get("axis", operand.ndim - 1)
    k = ctx.params["k"]
    dim = ctx.in_shapes[0][axis]
    if is_symbolic(dim) and not ctx.params.get("is_stable", True):
        ctx.refuse(f"top_k is not stable: {_UNSTABLE}", "use is_stable=True")
    filled = ctx.fill(operand, axes=(axis,), value=_below_all(operand.dtype))
    out = ctx.bind(filled, k=min(k, operand.shape[axis]))
    return [crop(x, axis, k) for x in out]


def _below_all(dtype: Any) -> Any:
    """The first value of the total order of a dtype: for floats the sign and every bit set."""
    if dtypes.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits >= 8:
        bits = jnp.finfo(dtype).bits
        return np.array(-1, f"int{bits}").view(dtype)
    return lowest(dtype)


def approx_top_k(ctx: RuleContext, operand: Any) -> list[Any]:
    """Rows are searched by themselves; an open axis cannot be searched approximately.

    On TPU the axis is dealt out over bins by its size, so another size finds other values.
    Elsewhere it is an unstable sort: equal values are found at positions that vary with it.
    """
    axis = ctx.params["reduction_dimension"]
    if is_symbolic(ctx.in_shapes[0][axis]):
        ctx.refuse(
            "what an approximate search finds depends on the size of the axis", "use lax.top_k"
        )
    return list(ctx.bind(operand))


_RULES: dict[str, Rule] = {"sort": sort, "top_k": top_k, "approx_top_k": approx_top_k}

TABLE: dict[Any, Rule] = {
    p: rule for name, rule in _RULES.items() if (p := _jax.primitive(name)) is not None
}
