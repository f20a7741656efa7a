"""Sorts, the largest elements, and cumulative operations: padding comes after all that is real."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes, lax

from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax.arrays import by_platform
from bucketjit._masking.array_ops import crop
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules.reductions import Identity, highest, last, lowest, one, only_nan, zero

# XLA orders these dtypes as wider floats, in which the NaN with all bits set is positive.
_WITHOUT_NEGATIVE_NAN = {"float8_e5m2", "float8_e8m0fnu"}


def sort(ctx: RuleContext, *operands: Array) -> list[Any]:
    """Keys of padding hold what sorts last; a stable sort keeps it behind real equals.

    An unstable sort may leave equal keys in any order, so it becomes a stable one. If every operand
    is a key, it need not, because rows of equal keys are equal.
    """
    axis, num_keys = ctx.params["dimension"], ctx.params["num_keys"]
    if not is_symbolic(ctx.in_shapes[0][axis]):
        return list(ctx.bind(*operands))
    keys = [ctx.fill(x, axes=(axis,), value=last(x.dtype)) for x in operands[:num_keys]]
    stable = ctx.params["is_stable"] or num_keys < len(operands)
    return list(ctx.bind(*keys, *operands[num_keys:], is_stable=stable))


def top_k(ctx: RuleContext, operand: Array) -> list[Any]:
    """Padding holds what nothing is below; ties go by index, so it is taken last.

    ``k`` is at most the logical size, so padding is never taken. On CPU, floats are in total order,
    in which -NaN is below -inf. Other backends may compare with ``>``, which does not order NaN.
    """
    axis = ctx.params.get("axis", operand.ndim - 1)
    k = ctx.params["k"]
    if not is_symbolic(ctx.in_shapes[0][axis]):
        return list(ctx.bind(operand))
    dtype = operand.dtype
    if dtype.name in _WITHOUT_NEGATIVE_NAN:
        ctx.refuse(f"{dtype.name} has nothing that is below all else", "convert it to float16")
    least = by_platform(
        cpu=lambda: jnp.asarray(_first_in_total_order(dtype)),
        default=lambda: jnp.asarray(lowest(dtype)),
    )
    filled = ctx.fill(operand, axes=(axis,), value=least)
    stable = {"is_stable": True} if "is_stable" in ctx.params else {}
    out = ctx.bind(filled, k=min(k, operand.shape[axis]), **stable)
    return [crop(x, axis, k) for x in out]


def _first_in_total_order(dtype: np.dtype[Any]) -> Any:
    """The first value of the total order of a dtype: for floats -NaN, every bit set."""
    if (nan := only_nan(dtype)) is not None:
        return nan
    if dtypes.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits >= 8:
        bits = jnp.finfo(dtype).bits
        return np.array(-1, f"int{bits}").view(dtype)
    return lowest(dtype)


def approx_top_k(ctx: RuleContext, operand: Array) -> list[Any]:
    """Off TPU the approximate search is exact, a sort, which padding goes through as in `sort`.

    On TPU the search distributes the axis over bins by its size, so another size finds other
    values.
    """
    axis, k = ctx.params["reduction_dimension"] % operand.ndim, ctx.params["k"]
    if not is_symbolic(ctx.in_shapes[0][axis]):
        return list(ctx.bind(operand))
    if jax.default_backend() == "tpu":
        ctx.refuse(
            "what an approximate search finds depends on the size of the axis", "use lax.top_k"
        )
    if not ctx.params["aggregate_to_topk"]:
        ctx.refuse(
            "how much an approximate search returns depends on the size of the axis",
            "leave aggregate_to_topk=True",
        )
    dtype, largest = operand.dtype, ctx.params["is_max_k"]
    if dtypes.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits <= 8:
        ctx.refuse(f"an approximate search orders {dtype.name} by itself", "convert it to float16")
    keys = ctx.fill(operand, axes=(axis,), value=(lowest if largest else last)(dtype))
    pair = [keys, lax.broadcasted_iota(jnp.int32, keys.shape, axis)]
    if largest:  # equals keep their order when everything is sorted back to front
        pair = [lax.rev(x, (axis,)) for x in pair]
    pair = list(lax.sort(pair, dimension=axis, num_keys=1))
    if largest:
        pair = [lax.rev(x, (axis,)) for x in pair]
    return [crop(x, axis, k) for x in pair]


# --- cumulative ---------------------------------------------------------------------------------

# Cumulative operations: forward, padding comes after all that is real and is never seen.
#
# In reverse they start in the padding, which then holds the neutral element.


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


TABLE: dict[Any, Rule] = {
    "sort": sort,
    "top_k": top_k,
    "approx_top_k": approx_top_k,
    "cumsum": cumulative(zero),
    "cumprod": cumulative(one),
    "cummax": cumulative(lowest, ordered=True),
    "cummin": cumulative(highest, ordered=True),
    # The neutral element is -inf, without an imaginary part, which is an angle.
    "cumlogsumexp": cumulative(np.array(-np.inf).astype),
}
