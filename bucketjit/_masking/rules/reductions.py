"""Reductions, sorts and cumulative operations: what padding holds does not count, or comes last.

The padding of a reduction holds the neutral element of the fold, so the fold does not see it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes, lax

from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax.arrays import by_platform
from bucketjit._jax.jaxprs import all_equations, is_literal, name_of, open_jaxpr
from bucketjit._masking.array_ops import crop
from bucketjit._masking.rule_context import Rule, RuleContext

# --- monoids ------------------------------------------------------------------------------------

# Neutral elements: the value that padding holds so that a reduction ignores it.
#
# Each function maps a dtype to a scalar of this dtype.

Identity = Callable[[Any], Any]
Fold = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]  # of two elements of each array


def zero(dtype: np.dtype[Any]) -> Any:
    """The neutral element of addition, bitwise or and bitwise xor (False for bool)."""
    return np.zeros((), dtype)


def unit(dtype: np.dtype[Any]) -> Any:
    """The neutral element of multiplication."""
    return np.ones((), dtype)


def all_ones(dtype: np.dtype[Any]) -> Any:
    """The neutral element of bitwise and (True for bool)."""
    return np.array(True) if dtypes.issubdtype(dtype, np.bool_) else np.array(-1).astype(dtype)


def lowest(dtype: np.dtype[Any]) -> Any:
    """The neutral element of maximum: -inf where the dtype has one, else its smallest value."""
    return _extreme(dtype, -1)


def highest(dtype: np.dtype[Any]) -> Any:
    """The neutral element of minimum: +inf where the dtype has one, else its largest value."""
    return _extreme(dtype, 1)


def last(dtype: np.dtype[Any]) -> Any:
    """What nothing sorts after: NaN where the dtype has a positive one, else `highest`."""
    if dtypes.issubdtype(dtype, np.complexfloating):
        return np.array(complex(np.nan, np.nan), dtype)
    if dtypes.issubdtype(dtype, np.floating):
        # A dtype may lack NaN (then this is another number), or have a NaN that sorts first.
        nan = np.array(np.nan).astype(dtype)
        if np.isnan(nan.astype(np.float32)) and only_nan(dtype) is None:
            return nan
    return highest(dtype)


def only_nan(dtype: np.dtype[Any]) -> Any | None:
    """The one NaN of ``float8_*fnuz``, what would be -0: it comes first in their order."""
    return np.array(np.nan).astype(dtype) if dtype.name.endswith("fnuz") else None


def _extreme(dtype: np.dtype[Any], sign: int) -> Any:
    """The greatest value of a dtype for ``sign`` 1 and the smallest for -1, infinities included."""
    if dtypes.issubdtype(dtype, np.bool_):
        return np.array(sign > 0)
    if dtypes.issubdtype(dtype, np.integer):
        info = jnp.iinfo(dtype)
        return np.array(info.max if sign > 0 else info.min, dtype)
    if dtypes.issubdtype(dtype, np.complexfloating):
        return np.array(complex(sign * np.inf, sign * np.inf), dtype)
    # The conversion gives NaN or a finite number if the dtype has no infinity.
    infinity = np.array(sign * np.inf).astype(dtype)
    if np.isinf(infinity.astype(np.float32)):
        return infinity
    limits = jnp.finfo(dtype)
    return np.array(limits.max if sign > 0 else limits.min, dtype)


# --- reductions ---------------------------------------------------------------------------------


def reduction(identity: Identity) -> Rule:
    """The rule of a fold with this neutral element."""

    def rule(ctx: RuleContext, operand: Array) -> Any:
        """Padding holds the neutral element, so it cannot change the result."""
        return ctx.bind(ctx.fill(operand, axes=ctx.params["axes"], value=identity(operand.dtype)))

    return rule


def extremum(identity: Identity, choose: Callable[[Any, Any], Any]) -> Rule:
    """The rule of a maximum or minimum.

    For complex numbers ``max(nan, x)`` is ``x``. Nothing is neutral next to a NaN there, so the
    reduction skips padding.
    """
    plain = reduction(identity)

    def rule(ctx: RuleContext, operand: Array) -> Any:
        """Padding holds the lowest (highest) value, or is skipped."""
        if not jnp.issubdtype(operand.dtype, np.complexfloating):
            return plain(ctx, operand)
        start = identity(operand.dtype)
        fold = lambda a, b: [choose(a[0], b[0])]  # noqa: E731
        return _fold_real(ctx, [operand], [start], ctx.params["axes"], fold)[0]

    return rule


def position_of(identity: Identity) -> Rule:
    """The rule of argmax and argmin.

    A tie goes to the lower index, and padding comes after all real data. So the neutral element
    never wins: neither against the same value nor against a NaN, of which the first wins.
    """

    def rule(ctx: RuleContext, operand: Array) -> Any:
        """Padding holds what loses every comparison and every tie."""
        (axis,) = ctx.params["axes"]
        filled = ctx.fill(operand, axes=(axis,), value=identity(operand.dtype))
        wanted = ctx.params["index_dtype"]
        if operand.shape[axis] - 1 <= jnp.iinfo(wanted).max:
            return ctx.bind(filled)
        # The index type holds every real position, perhaps not every padded one.
        return lax.convert_element_type(ctx.bind(filled, index_dtype=np.dtype(np.int32)), wanted)

    return rule


def general(ctx: RuleContext, *operands: Array) -> list[Any]:
    """A fold with the user's own function: padding is neutral where known, else skipped.

    The user's start value is included once, unchanged. A single element is not combined with it:
    XLA assumes that start values are neutral and returns the element.
    """
    half = len(operands) // 2
    arrays, starts = operands[:half], operands[half:]
    for shape in ctx.in_shapes[1:half]:
        ctx.require_equal(ctx.in_shapes[0], shape)
    axes = ctx.params["dimensions"]
    inner, consts = open_jaxpr(ctx.params["jaxpr"])
    if any(name_of(eqn) == "dim_as_value" for eqn in all_equations(inner)):
        ctx.refuse(
            "its function reads a symbolic size",
            "use the size outside of the function, or leave the axis static (None or _)",
        )
    if not any(is_symbolic(ctx.in_shapes[0][a]) for a in axes):
        return list(ctx.bind(*operands))
    identity = known_monoid(inner)
    if identity is not None and not jnp.issubdtype(arrays[0].dtype, np.complexfloating):
        filled = ctx.fill(arrays[0], axes=axes, value=identity(arrays[0].dtype))
        folded = list(ctx.bind(filled, *starts))
    else:
        fold = lambda a, b: jax.core.eval_jaxpr(inner, consts, *a, *b)  # noqa: E731
        folded = _fold_real(ctx, arrays, starts, axes, fold)
    padded = math.prod(arrays[0].shape[a] for a in axes)
    if padded == 0:
        return folded
    if padded == 1:  # XLA returned the one element; a logical size of 0 needs the start value
        folded = [jnp.broadcast_to(start, x.shape) for start, x in zip(starts, folded, strict=True)]
    lengths = [ctx.logical(ctx.in_shapes[0][a]) for a in axes]
    single = functools.reduce(operator.and_, [jnp.asarray(n) == 1 for n in lengths])
    front = tuple(0 if i in axes else slice(None) for i in range(arrays[0].ndim))
    return [lax.select_n(single, x, y[front]) for x, y in zip(folded, arrays, strict=True)]


def _fold_real(
    ctx: RuleContext, arrays: Sequence[Any], starts: Sequence[Any], axes: Sequence[int], fold: Fold
) -> list[Any]:
    """Reduce real positions only, in order, for a fold without a known neutral element."""
    mask = ctx.in_bounds(ctx.in_shapes[0], axes)
    real = jnp.broadcast_to(True if mask is None else mask, arrays[0].shape)
    return list(lax.reduce((real, *arrays), (True, *starts), skipping(fold), tuple(axes))[1:])


def skipping(fold: Fold) -> Fold:
    """A fold of values with a flag before them, which says whether they are real.

    Two real values are combined; a real value and padding give the real value. This adds a neutral
    element to any associative function.
    """

    def combine(a: Sequence[Any], b: Sequence[Any]) -> Sequence[Any]:
        (a_real, *x), (b_real, *y) = a, b
        both = zip(fold(x, y), x, y, strict=True)
        chosen = (jnp.where(a_real & b_real, z, jnp.where(a_real, p, q)) for z, p, q in both)
        return (a_real | b_real, *chosen)

    return combine


_MONOIDS: dict[str, Identity] = {
    "add": zero,
    "mul": unit,
    "max": lowest,
    "min": highest,
    "and": all_ones,
    "or": zero,
    "xor": zero,
}


def known_monoid(inner: Any) -> Identity | None:
    """The neutral element of a jaxpr that is one known operation of its two arguments."""
    if len(inner.eqns) != 1 or len(inner.invars) != 2:
        return None
    (eqn,) = inner.eqns
    arguments = [v for v in eqn.invars if not is_literal(v)]
    same = len(arguments) == 2 and set(arguments) == set(inner.invars)
    if not same or list(inner.outvars) != list(eqn.outvars):
        return None
    return _MONOIDS.get(name_of(eqn))


# --- sorts ----------------------------------------------------------------------------------------

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
    first, low = _first_in_total_order(dtype), lowest(dtype)
    least = by_platform(cpu=lambda: jnp.asarray(first), default=lambda: jnp.asarray(low))
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
    **dict.fromkeys(("reduce_sum", "reduce_or", "reduce_xor"), reduction(zero)),
    "reduce_prod": reduction(unit),
    "reduce_max": extremum(lowest, lax.max),
    "reduce_min": extremum(highest, lax.min),
    "reduce_and": reduction(all_ones),
    "argmax": position_of(lowest),
    "argmin": position_of(highest),
    "reduce": general,
    "sort": sort,
    "top_k": top_k,
    "approx_top_k": approx_top_k,
    "cumsum": cumulative(zero),
    "cumprod": cumulative(unit),
    "cummax": cumulative(lowest, ordered=True),
    "cummin": cumulative(highest, ordered=True),
    # The neutral element is -inf, without an imaginary part, which is an angle.
    "cumlogsumexp": cumulative(np.array(-np.inf).astype),
}
