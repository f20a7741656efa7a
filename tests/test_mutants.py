"""Broken masking rules, planted one at a time: the harness must catch every one of them.

Each mutant is a mistake that is easy to make. Its case passes with the rules as they are (or
catching the mutant would prove nothing), and fails with the mutant in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit._jax import jaxprs
from bucketjit._jax.jaxprs import scan_arity
from bucketjit._masking.array_ops import crop, select
from bucketjit._masking.rules import default_rules
from bucketjit.rules import RuleContext
from tests.harness import Arg, Case, check, gradient_of
from tests.test_cases import DAILY

pytestmark = pytest.mark.mutants

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Mutant:
    """A broken rule for one primitive, and a case that must notice."""

    name: str
    primitive: str
    rule: Rule
    case: Case
    gradient: bool = False


# --- mistakes ----------------------------------------------------------------------------------


def unmasked(ctx: RuleContext, *operands: Any) -> Any:
    """Run the primitive at padded sizes and hope."""
    return ctx.bind(*operands)


def filled_with(value: Any, *, positions: tuple[int, ...] = (0,)) -> Rule:
    """Fill all padding with the same value, whatever the dtype and the operation."""

    def rule(ctx: RuleContext, *operands: Any) -> Any:
        chosen = value(operands[0].dtype) if callable(value) else value
        given = [ctx.fill(x, value=chosen) if i in positions else x for i, x in enumerate(operands)]
        return ctx.bind(*given)

    return rule


def multiplied(*positions: int) -> Rule:
    """Multiply by a mask: 0 * NaN is NaN."""

    def rule(ctx: RuleContext, *operands: Any) -> Any:
        given = list(operands)
        for i in positions:
            mask = ctx.in_bounds(ctx.in_shapes[i])
            if mask is not None:
                # The barrier keeps XLA from making a select of it, which would be right.
                given[i] = given[i] * lax.optimization_barrier(mask.astype(given[i].dtype))
        return ctx.bind(*given)

    return rule


def lowest_finite(dtype: Any) -> Any:
    return jnp.finfo(dtype).min


def highest_finite(dtype: Any) -> Any:
    return jnp.finfo(dtype).max


def infinity(dtype: Any) -> Any:
    return np.inf


def first_symbolic_axis_only(value: Any) -> Rule:
    def rule(ctx: RuleContext, operand: Any) -> Any:
        axes = ctx.symbolic_axes()[:1]
        return ctx.bind(ctx.fill(operand, axes=axes, value=value))

    return rule


def one_too_many(value: Any) -> Rule:
    """Off by one: the last real element is filled too."""

    def rule(ctx: RuleContext, operand: Any) -> Any:
        out = operand
        for axis in ctx.symbolic_axes():
            where = lax.broadcasted_iota(jnp.int32, out.shape, axis)
            out = select(where < ctx.logical(ctx.in_shapes[0][axis]) - 1, out, value)
        return ctx.bind(out)

    return rule


def one_too_few(value: Any) -> Rule:
    """Off by one: the first padded element is taken for real."""

    def rule(ctx: RuleContext, operand: Any) -> Any:
        out = operand
        for axis in ctx.symbolic_axes():
            where = lax.broadcasted_iota(jnp.int32, out.shape, axis)
            out = select(where <= ctx.logical(ctx.in_shapes[0][axis]), out, value)
        return ctx.bind(out)

    return rule


def padded_size(ctx: RuleContext, *operands: Any) -> Any:
    """The size that the program reads is that of the bucket: a mean over padding."""
    return jnp.asarray(ctx.params["dim"], ctx.out_avals[0].dtype)


def at_padded_ends(ctx: RuleContext, *operands: Any) -> Any:
    """The second piece after the first one's padding."""
    out = lax.concatenate(operands, ctx.params["dimension"])
    axis = ctx.params["dimension"]
    return crop(out, axis, ctx.padded(ctx.out_shapes[0][axis]))


def every_padded_step(ctx: RuleContext, *operands: Any) -> Any:
    """A scan over the padded length: the carry runs on into the padding."""
    num_consts, num_carry = scan_arity(ctx.params)
    split = num_consts + num_carry
    consts, init, xs = operands[:num_consts], operands[num_consts:split], operands[split:]

    def step(carry: Any, x: Any) -> Any:
        outs = ctx.evaluate(ctx.params["jaxpr"], *consts, *carry, *x)
        return tuple(outs[:num_carry]), tuple(outs[num_carry:])

    carry, ys = lax.scan(step, init, xs, length=ctx.params["length"], reverse=ctx.params["reverse"])
    return [*carry, *ys]


def plain_reshape(ctx: RuleContext, operand: Any) -> Any:
    return lax.reshape(operand, ctx.padded_shape(ctx.out_shapes[0]))


def first_and_last_swapped(ctx: RuleContext, *operands: Any) -> Any:
    """Starts are read from the wrong end."""
    return ctx.bind(operands[0], *(jnp.maximum(s - 1, 0) for s in operands[1:]))


def padded_slice(ctx: RuleContext, operand: Any) -> Any:
    """A start such as ``n - 2`` at its padded value."""
    return lax.slice(operand, ctx.params["start_indices"], ctx.params["limit_indices"])


def padded_split(ctx: RuleContext, operand: Any) -> Any:
    axis, pieces, start = ctx.params["axis"], [], 0
    for size in ctx.params["sizes"]:
        pieces.append(crop(lax.slice_in_dim(operand, start, None, axis=axis), axis, size))
        start += size
    return pieces


def padded_high(ctx: RuleContext, operand: Any, value: Any) -> Any:
    """What is padded at the end stands after the bucket's padding."""
    return lax.pad(operand, value, ctx.params["padding_config"])


def unfilled_pad(ctx: RuleContext, operand: Any, value: Any) -> Any:
    """The operand's own padding shows where the padding value should."""
    out = operand
    for axis, (low, _, _) in enumerate(ctx.params["padding_config"]):
        size = ctx.padded(ctx.out_shapes[0][axis])
        edges = (low, size - low - out.shape[axis], 0)
        out = lax.pad(out, value, [edges if i == axis else (0, 0, 0) for i in range(out.ndim)])
    return out


def sort_by_sentinel(value: Any) -> Rule:
    def rule(ctx: RuleContext, *operands: Any) -> Any:
        axes = (ctx.params["dimension"],)
        keys = [ctx.fill(x, axes=axes, value=value(x.dtype)) for x in operands[:1]]
        return list(ctx.bind(*keys, *operands[1:]))

    return rule


def unstable_sort(ctx: RuleContext, *operands: Any) -> Any:
    """Padding in front: equal keys of padding and data come in the wrong order."""
    axes = (ctx.params["dimension"],)
    keys = [ctx.fill(x, axes=axes, value=np.nan) for x in operands[:1]]
    flipped = [lax.rev(x, axes) for x in (*keys, *operands[1:])]
    return list(ctx.bind(*flipped))


def drawn_at_padded_shape(ctx: RuleContext, *operands: Any) -> Any:
    """Bits of the padded shape: other numbers as soon as an inner axis is padded."""
    return ctx.bind(*operands)


def forward_only(rule: Rule) -> Rule:
    """A reverse cumulative operation turned into a forward one."""

    def mutant(ctx: RuleContext, operand: Any) -> Any:
        return ctx.bind(operand, reverse=False)

    return mutant


# --- cases -------------------------------------------------------------------------------------

ALL = ("mixed", "negative", "positive", "special")


def _half_nan(x: Any, rng: np.random.Generator) -> Any:
    return np.where(rng.random(x.shape) < 0.5, np.nan, x).astype(x.dtype)


def case(name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Case:
    return Case(f"mutant_{name}", fn, args, **options)


SUM = case("sum", lambda x: x.sum(), "b, s", domains=ALL)
MAX_INF = case("max_inf", lambda x: x.max(1), Arg("b, s", make=lambda x, rng: x - np.inf))
MIN_INF = case("min_inf", lambda x: x.min(1), Arg("b, s", make=lambda x, rng: x + np.inf))
SUM_INTS = case("sum_ints", lambda x: x.sum(1), Arg("b, s", "int32"))
MEAN = case("mean", lambda x: x.mean(1), "b, s")
PROD = case("prod", lambda x: x.prod(1), "b, s")
MAX = case("max", lambda x: x.max(), "b, s", domains=ALL)
MAX_INTS = case("max_ints", lambda x: x.max(0), Arg("b, s", "int32", low=-9, high=-2))
MAX_UNSIGNED = case("max_uint8", lambda x: x.min(0), Arg("b, s", "uint8", low=3, high=9))
MIN = case("min", lambda x: x.min(0), "b, s", domains=ALL)
ALL_TRUE = case("all", lambda x: x.all(1), Arg("b, s", "bool"))
ANY_TRUE = case("any", lambda x: x.any(1), Arg("b, s", "bool"))
AND_BITS = case(
    "and_bits", lambda x: lax.reduce_and(x, (1,)), Arg("b, s", "uint8", low=128, high=256)
)
XOR_BITS = case("xor_bits", lambda x: lax.reduce_xor(x, (0,)), Arg("b, s", "int32"))
ARGMAX = case("argmax", lambda x: jnp.argmax(x, 1), "b, s", domains=ALL)
ARGMIN = case("argmin", lambda x: jnp.argmin(x, 0), "b, s", domains=ALL)
ARGMAX_INTS = case("argmax_ints", lambda x: jnp.argmax(x, 1), Arg("b, s", "int8", -9, -2))
SOFTMAX = case("softmax", lambda x: jax.nn.softmax(x, 1), "b, s")
REDUCE_INIT = case(
    "reduce_init",
    lambda x: lax.reduce(x, jnp.float32(3), lambda a, b: a + b, (0,)),
    "b, s",
)
DOT = case("dot", lambda x, y: x @ y, "b, s", "s, 3")
DOT_OUTER = case("dot_both", lambda x: x @ x.T, "b, s")
ATTENTION = case(
    "attention",
    lambda q, k: jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k), -1),
    "b, s, 2",
    "b, s, 2",
)
DOT_GRAD = case("dot_grad", lambda x, w: jnp.tanh(x @ w), "b, 3", "3, 2", grad=True)
CUMSUM = case("cumsum_reverse", lambda x: lax.cumsum(x, 1, reverse=True), "b, s")
CUMPROD = case("cumprod_reverse", lambda x: lax.cumprod(x, 1, reverse=True), "b, s")
CUMMAX = case("cummax_reverse", lambda x: lax.cummax(x, 1, reverse=True), "b, s")
CUMMIN = case("cummin_reverse", lambda x: lax.cummin(x, 0, reverse=True), "b, s")
CUMLOGSUMEXP = case("cumlogsumexp_reverse", lambda x: lax.cumlogsumexp(x, 1, reverse=True), "b, s")
CUMSUM_GRAD = case("cumsum_grad", lambda x: jnp.cumsum(x, 1), "b, s", grad=True)
SORT = case("sort", lambda x: jnp.sort(x, 1), "b, s", domains=ALL)
SORT_INTS = case("sort_ints", lambda x: jnp.sort(x, 0), Arg("b, s", "int32"))
ARGSORT = case("argsort", lambda x: jnp.argsort(x, 1), Arg("b, s", make=_half_nan))
TOP_K = case("top_k", lambda x: lax.top_k(x, 1), "b, s", domains=("negative", "mixed"))
MEDIAN = case("median", lambda x: jnp.median(x, 1), "b, s")
REV = case("rev", lambda x: x[:, ::-1], "b, s")
FLIP_BOTH = case("flip", lambda x: jnp.flip(x), "b, s")
CONCATENATE = case("concatenate", lambda x, y: jnp.concatenate([x, y], 1), "b, s", "b, t")
CONCATENATE_SELF = case("concatenate_self", lambda x: jnp.concatenate([x, -x]), "b, s")
STATIC_END = case("class_token", lambda x, c: jnp.concatenate([x, c], 1), "b, s", "b, 1")
LAST_TWO = case(
    "last_two",
    lambda x: lax.slice(x, (x.shape[0] - 2,), (x.shape[0],)),
    "s",
    constraints=("s >= 2",),
    sizes=({"s": 2}, {"s": 5}, {"s": 8}),
)
TAKE = case("take", lambda x, i: jnp.take(x, i, 0, mode="clip"), "s, 2", Arg("b", "int32", 0, 12))
TAKE_FILL = case(
    "take_fill", lambda x, i: jnp.take(x, i, 0, mode="fill"), "s, 2", Arg("b", "int32", -12, 12)
)
DYNAMIC_SLICE = case(
    "dynamic_slice",
    lambda x, i: lax.dynamic_slice(x, (i[0],), (2,)),
    "s",
    Arg("1", "int32", 0, 12),
    constraints=("s >= 2",),
    sizes=({"s": 2}, {"s": 3}, {"s": 6}, {"s": 8}),
)
SCATTER_ADD = case(
    "scatter_add",
    lambda x, i, u: x.at[i].add(u),
    "6",
    Arg("s", "int32", 0, 6),
    "s",
)
SCATTER_SET = case("scatter_set", lambda x, i, u: x.at[i].set(u), "6", Arg("b", "int32", 2, 3), "b")
SEGMENT_SUM = case(
    "segment_sum",
    lambda x, i: jax.ops.segment_sum(x, i, 3),
    "s",
    Arg("s", "int32", 0, 3),
)
UPDATE = case(
    "dynamic_update_slice",
    lambda x, u, i: lax.dynamic_update_slice(x, u, (i[0],)),
    "s",
    "2",
    Arg("1", "int32", 0, 12),
    constraints=("s >= 2",),
    sizes=({"s": 2}, {"s": 3}, {"s": 6}, {"s": 8}),
)
PAD_HIGH = case("pad_high", lambda x: jnp.pad(x, (1, 2), constant_values=7.0), "s")
MERGE = case("merge", lambda x: x.reshape(-1) * 2, "b, s")
SPLIT_AXIS = case("split_axis", lambda x, y: x.reshape(y.shape), "b*s", "b, s")
SPLIT = case(
    "split",
    lambda x: lax.split(x, (x.shape[0] - 2, 2)),
    "s",
    constraints=("s >= 3",),
    sizes=({"s": 3}, {"s": 5}, {"s": 8}),
)
TILE = case("tile", lambda x: jnp.tile(x, 2), "s")
SCAN = case("scan", lambda x: lax.scan(lambda c, y: (c * 0.5 + y, c - y), jnp.float32(0), x), "s")
SCAN_REVERSE = case(
    "scan_reverse",
    lambda x: lax.scan(lambda c, y: (c * 0.5 + y, c - y), jnp.float32(0), x, reverse=True),
    "s",
)
RANDOM = case("random", lambda x: jax.random.bits(jax.random.key(3), x.shape), "b, s")
DROPOUT = case(
    "dropout",
    lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, 0),
    "b, s",
)
CONVOLUTION = case(
    "convolution",
    lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME"),
    "b, 2, s",
    "3, 2, 3",
)
WINDOW_SUM = case(
    "window_sum",
    lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"),
    "b, s",
)
WINDOW_MAX = case(
    "window_max",
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "b, s",
)


def _positive_definite(x: Any, rng: np.random.Generator) -> Any:
    return (x @ x.T + 3 * np.eye(len(x))).astype(x.dtype)


CHOLESKY = case("cholesky", jnp.linalg.cholesky, Arg("b, b", make=_positive_definite))

MUTANTS = [
    Mutant("sum unmasked", "reduce_sum", unmasked, SUM),
    Mutant("sum by a product with a mask", "reduce_sum", multiplied(0), SUM),
    Mutant("sum filled with one", "reduce_sum", filled_with(1), SUM_INTS),
    Mutant("sum along the first axis only", "reduce_sum", first_symbolic_axis_only(0), SUM),
    Mutant("sum without the last element", "reduce_sum", one_too_many(0), SUM),
    Mutant("sum with one element of padding", "reduce_sum", one_too_few(0), SUM),
    Mutant("softmax's sum unmasked", "reduce_sum", unmasked, SOFTMAX),
    Mutant("softmax's max unmasked", "reduce_max", unmasked, SOFTMAX),
    Mutant("mean over the bucket", "dim_as_value", padded_size, MEAN),
    Mutant("prod unmasked", "reduce_prod", unmasked, PROD),
    Mutant("prod filled with zero", "reduce_prod", filled_with(0), PROD),
    Mutant("max unmasked", "reduce_max", unmasked, MAX),
    Mutant("max filled with zero", "reduce_max", filled_with(0), MAX),
    Mutant("max filled with the lowest finite", "reduce_max", filled_with(lowest_finite), MAX_INF),
    Mutant("max of integers filled with zero", "reduce_max", filled_with(0), MAX_INTS),
    Mutant("min of unsigned filled with zero", "reduce_min", filled_with(0), MAX_UNSIGNED),
    Mutant("min unmasked", "reduce_min", unmasked, MIN),
    Mutant("min filled with zero", "reduce_min", filled_with(0), MIN),
    Mutant(
        "min filled with the highest finite", "reduce_min", filled_with(highest_finite), MIN_INF
    ),
    Mutant("all unmasked", "reduce_and", unmasked, ALL_TRUE),
    Mutant("all filled with false", "reduce_and", filled_with(False), ALL_TRUE),
    Mutant("any unmasked", "reduce_or", unmasked, ANY_TRUE),
    Mutant("any filled with true", "reduce_or", filled_with(True), ANY_TRUE),
    Mutant("and of bits filled with one", "reduce_and", filled_with(1), AND_BITS),
    Mutant("xor unmasked", "reduce_xor", unmasked, XOR_BITS),
    Mutant("argmax unmasked", "argmax", unmasked, ARGMAX),
    Mutant("argmax filled with zero", "argmax", filled_with(0), ARGMAX),
    Mutant("argmax filled with the lowest finite", "argmax", filled_with(lowest_finite), ARGMAX),
    Mutant("argmax of integers filled with zero", "argmax", filled_with(0), ARGMAX_INTS),
    Mutant("argmin unmasked", "argmin", unmasked, ARGMIN),
    Mutant("argmin filled with zero", "argmin", filled_with(0), ARGMIN),
    Mutant("reduce unmasked", "reduce", unmasked, REDUCE_INIT),
    Mutant("dot unmasked", "dot_general", unmasked, DOT),
    Mutant("dot with the left side filled", "dot_general", filled_with(0), DOT),
    Mutant("dot with the right side filled", "dot_general", filled_with(0, positions=(1,)), DOT),
    Mutant("dot by products with masks", "dot_general", multiplied(0, 1), DOT),
    Mutant(
        "dot with the left side filled, twice the same", "dot_general", filled_with(0), DOT_OUTER
    ),
    Mutant("attention's sum unmasked", "reduce_sum", unmasked, ATTENTION),
    Mutant("attention's sum by a product with a mask", "reduce_sum", multiplied(0), ATTENTION),
    Mutant("gradient of a dot unmasked", "dot_general", unmasked, DOT_GRAD, gradient=True),
    Mutant(
        "gradient of a dot with one side filled",
        "dot_general",
        filled_with(0),
        DOT_GRAD,
        gradient=True,
    ),
    Mutant("reverse cumsum unmasked", "cumsum", unmasked, CUMSUM),
    Mutant("reverse cumsum forward", "cumsum", forward_only(unmasked), CUMSUM),
    Mutant("reverse cumprod filled with zero", "cumprod", filled_with(0), CUMPROD),
    Mutant("reverse cummax filled with zero", "cummax", filled_with(0), CUMMAX),
    Mutant("reverse cummin filled with zero", "cummin", filled_with(0), CUMMIN),
    Mutant("reverse cumlogsumexp filled with zero", "cumlogsumexp", filled_with(0), CUMLOGSUMEXP),
    Mutant("gradient of cumsum unmasked", "cumsum", unmasked, CUMSUM_GRAD, gradient=True),
    Mutant("sort unmasked", "sort", unmasked, SORT),
    Mutant("sort by infinity as a sentinel", "sort", sort_by_sentinel(infinity), SORT),
    Mutant("sort by the highest finite", "sort", sort_by_sentinel(highest_finite), SORT),
    Mutant("sort of integers filled with zero", "sort", filled_with(0), SORT_INTS),
    Mutant("argsort by infinity as a sentinel", "sort", sort_by_sentinel(infinity), ARGSORT),
    Mutant("argsort with padding in front", "sort", unstable_sort, ARGSORT),
    Mutant("median unmasked", "sort", unmasked, MEDIAN),
    Mutant("median of the bucket", "dim_as_value", padded_size, MEDIAN),
    Mutant("top_k unmasked", "top_k", unmasked, TOP_K),
    Mutant("top_k filled with zero", "top_k", filled_with(0), TOP_K),
    Mutant("rev without a shift", "rev", unmasked, REV),
    Mutant("flip without a shift", "rev", unmasked, FLIP_BOTH),
    Mutant("concatenate at padded ends", "concatenate", at_padded_ends, CONCATENATE),
    Mutant(
        "concatenate with itself at padded ends", "concatenate", at_padded_ends, CONCATENATE_SELF
    ),
    Mutant("a class token behind padding", "concatenate", at_padded_ends, STATIC_END),
    Mutant("a slice from a padded start", "slice", padded_slice, LAST_TWO),
    Mutant("gather clamped by the padded size", "gather", unmasked, TAKE),
    Mutant("gather filled by the padded size", "gather", unmasked, TAKE_FILL),
    Mutant("dynamic_slice clamped by the padded size", "dynamic_slice", unmasked, DYNAMIC_SLICE),
    Mutant("dynamic_slice off by one", "dynamic_slice", first_and_last_swapped, DYNAMIC_SLICE),
    Mutant("scatter-add of padded updates", "scatter-add", unmasked, SCATTER_ADD),
    Mutant(
        "scatter-add of zeros at padded indices",
        "scatter-add",
        multiplied(2),
        SCATTER_ADD,
    ),
    Mutant("scatter of padded updates", "scatter", unmasked, SCATTER_SET),
    Mutant("segment_sum of padded rows", "scatter-add", unmasked, SEGMENT_SUM),
    Mutant(
        "dynamic_update_slice clamped by the padded size",
        "dynamic_update_slice",
        unmasked,
        UPDATE,
    ),
    Mutant("pad behind the padding", "pad", padded_high, PAD_HIGH),
    Mutant("pad without its own value", "pad", unfilled_pad, PAD_HIGH),
    Mutant("merged axes with padding in between", "reshape", plain_reshape, MERGE),
    Mutant("a split axis at padded strides", "reshape", plain_reshape, SPLIT_AXIS),
    Mutant("split at padded sizes", "split", padded_split, SPLIT),
    Mutant("tiles of padding", "tile", unmasked, TILE),
    Mutant("a scan over the padded length", "scan", every_padded_step, SCAN),
    Mutant("a reversed scan from the padded end", "scan", every_padded_step, SCAN_REVERSE),
    Mutant("random bits of the padded shape", "random_bits", drawn_at_padded_shape, RANDOM),
    Mutant("dropout of the padded shape", "random_bits", drawn_at_padded_shape, DROPOUT),
    Mutant("convolution unmasked", "conv_general_dilated", unmasked, CONVOLUTION),
    Mutant("window sum unmasked", "reduce_window_sum", unmasked, WINDOW_SUM),
    Mutant("window max filled with zero", "reduce_window_max", filled_with(0), WINDOW_MAX),
    Mutant("cholesky of zeros", "cholesky", filled_with(0), CHOLESKY),
]


_passed: set[tuple[str, bool]] = set()


def _passes(case: Case, gradient: bool) -> bool:
    if (case.name, gradient) not in _passed:
        check(case, fn=gradient_of(case) if gradient else None)
        _passed.add((case.name, gradient))
    return True


def _caught(case: Case, gradient: bool = False, rules: Any = None) -> None:
    with pytest.raises(AssertionError) as raised:
        check(case, fn=gradient_of(case) if gradient else None, rules=rules)
    assert case.name in str(raised.value), "failed for another reason"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_harness_catches(mutant: Mutant) -> None:
    assert _passes(mutant.case, mutant.gradient)
    primitive = jaxprs.primitive(mutant.primitive)
    assert primitive in default_rules(), f"there is no rule for {mutant.primitive} to break"
    _caught(mutant.case, mutant.gradient, {**default_rules(), primitive: mutant.rule})


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_daily_case_catches_it_too(mutant: Mutant) -> None:
    """What is left out of the daily form of cases catches nothing alone."""
    primitive = jaxprs.primitive(mutant.primitive)
    broken = {**default_rules(), primitive: mutant.rule}
    for case in DAILY:
        if mutant.primitive in case.covers:
            try:
                check(case, fn=gradient_of(case) if case.grad else None, rules=broken)
            except AssertionError:
                return
            except Exception:  # a mutant that cannot run a case is none of it
                continue
    pytest.fail("no case of tests/cases catches it")


# --- mistakes in what all rules share ----------------------------------------------------------

_fill = RuleContext.fill


def _never(self: Any, operand: Any, **options: Any) -> Any:
    return operand


def _product(self: Any, operand: Any, *, value: Any, axes: Any = None, shape: Any = None) -> Any:
    mask = self.in_bounds(self.shape_of(operand) if shape is None else shape, axes)
    if mask is None:
        return operand
    factor = lax.optimization_barrier(mask.astype(operand.dtype))
    return operand * factor + jnp.where(mask, 0, value).astype(operand.dtype)


def _zeros(self: Any, operand: Any, *, value: Any, axes: Any = None, shape: Any = None) -> Any:
    return _fill(self, operand, value=0, axes=axes, shape=shape)


def _first_axis(self: Any, operand: Any, *, value: Any, axes: Any = None, shape: Any = None) -> Any:
    axes = range(operand.ndim) if axes is None else axes
    return _fill(self, operand, value=value, axes=list(axes)[:1], shape=shape)


def _everything(self: Any, operand: Any, *, value: Any, axes: Any = None, shape: Any = None) -> Any:
    """Where the mask's shape is that of the whole operand, real data is lost."""
    filled = _fill(self, operand, value=value, axes=axes, shape=shape)
    return filled if filled is operand else jnp.full_like(operand, value)


@pytest.mark.parametrize("fill", [_never, _product, _zeros, _first_axis, _everything])
def test_the_harness_catches_a_broken_fill(fill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _passes(MAX, False) and _passes(SUM, False)
    caught = []
    monkeypatch.setattr(RuleContext, "fill", fill)
    for broken in (MAX, SUM):
        try:
            check(broken)
        except AssertionError as error:
            assert broken.name in str(error)
            caught.append(broken.name)
    assert caught


def test_the_harness_catches_an_interpreter_that_trusts_the_padded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bucketjit._ir.bucket_sizes import BucketSizes

    assert _passes(MEAN, False)
    monkeypatch.setattr(BucketSizes, "logical", lambda self, dim: self.padded(dim))
    _caught(MEAN)


def test_zero_padding_alone_would_not_catch_them() -> None:
    """Why the harness poisons with more than zeros and draws more than mixed data."""
    blind = []
    for mutant in MUTANTS:
        if mutant.name in (
            "sum unmasked",
            "sum by a product with a mask",
            "dot with the left side filled",
            "max unmasked",
        ):
            primitive = jaxprs.primitive(mutant.primitive)
            rules = {**default_rules(), primitive: mutant.rule}
            tame = Case(mutant.case.name, mutant.case.fn, mutant.case.args, domains=("positive",))
            try:
                check(tame, rules=rules, poisons=("zero",))
            except AssertionError:
                continue
            blind.append(mutant.name)
    assert blind
