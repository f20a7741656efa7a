"""Broken masking rules, planted one at a time: the harness must catch every one of them.

Each mutant is a mistake that is easy to make. Its case passes with the rules as they are (or
catching the mutant would prove nothing), and fails with the mutant in the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit._jax import jaxprs
from bucketjit._jax.jaxprs import scan_arity
from bucketjit._masking.array_ops import crop, select
from bucketjit._masking.rules import default_rules
from bucketjit.rules import RuleContext
from tests.harness import DOMAINS, Arg, Case, cases, check, family, gradient_of
from tests.test_cases import CASES, DAILY

pytestmark = pytest.mark.mutants

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Mutant:
    """A broken rule for one primitive, and the name of a case that must notice."""

    name: str
    primitive: str
    rule: Rule
    case_name: str
    gradient: bool = False

    @property
    def case(self) -> Case:
        return _CASE[self.case_name]


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


def lowest(dtype: Any) -> Any:
    return jnp.finfo(dtype).min


def highest(dtype: Any) -> Any:
    return jnp.finfo(dtype).max


def first_symbolic_axis_only(value: Any) -> Rule:
    def rule(ctx: RuleContext, operand: Any) -> Any:
        axes = ctx.symbolic_axes()[:1]
        return ctx.bind(ctx.fill(operand, axes=axes, value=value))

    return rule


def off_by_one(value: Any, more: int) -> Rule:
    """The last real element is filled too (-1), or the first padded one is taken for real (1)."""

    def rule(ctx: RuleContext, operand: Any) -> Any:
        out = operand
        for axis in ctx.symbolic_axes():
            where = lax.broadcasted_iota(jnp.int32, out.shape, axis)
            out = select(where < ctx.logical(ctx.in_shapes[0][axis]) + more, out, value)
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
        chosen = value(operands[0].dtype) if callable(value) else value
        keys = [ctx.fill(x, axes=axes, value=chosen) for x in operands[:1]]
        return list(ctx.bind(*keys, *operands[1:]))

    return rule


def unstable_sort(ctx: RuleContext, *operands: Any) -> Any:
    """Padding in front: equal keys of padding and data come in the wrong order."""
    axes = (ctx.params["dimension"],)
    keys = [ctx.fill(x, axes=axes, value=np.nan) for x in operands[:1]]
    flipped = [lax.rev(x, axes) for x in (*keys, *operands[1:])]
    return list(ctx.bind(*flipped))


def forward(ctx: RuleContext, operand: Any) -> Any:
    """A reverse cumulative operation turned into a forward one."""
    return ctx.bind(operand, reverse=False)


# --- cases -------------------------------------------------------------------------------------

FROM_2 = {"constraints": ("s >= 2",), "sizes": ({"s": 2}, {"s": 5}, {"s": 8})}
# What no two cases of tests/cases catch.
own = family(prefix="mutant_")
_OWN = cases(
    {
        "max_inf": own(lambda x: x.max(1), Arg("b, s", make=lambda x, rng: x - np.inf)),
        "min_inf": own(lambda x: x.min(1), Arg("b, s", make=lambda x, rng: x + np.inf)),
        "argmax": own(lambda x: jnp.argmax(x, 1), domains=DOMAINS),
        "last_two": own(lambda x: lax.slice(x, (x.shape[0] - 2,), x.shape), "s", **FROM_2),
    }
)
_CASE = {case.name: case for case in (*CASES, *_OWN)}
MAX, SUM, MEAN = _CASE["reduce_max_min"], _CASE["reduce_sum"], _CASE["mean"]

# Of each one the primitive, its broken rule, and the case that notices, by outputs or by gradients.
TABLE: dict[str, tuple[str, Rule, str]] = {
    "sum unmasked": ("reduce_sum", unmasked, "reduce_sum"),
    "sum by a product with a mask": ("reduce_sum", multiplied(0), "reduce_sum"),
    "sum filled with one": ("reduce_sum", filled_with(1), "reduce_sum_int"),
    "sum along the first axis only": ("reduce_sum", first_symbolic_axis_only(0), "reduce_sum"),
    "sum without the last element": ("reduce_sum", off_by_one(0, -1), "reduce_sum"),
    "sum with one element of padding": ("reduce_sum", off_by_one(0, 1), "reduce_sum"),
    "softmax's sum unmasked": ("reduce_sum", unmasked, "softmax"),
    "softmax's max unmasked": ("reduce_max", unmasked, "softmax"),
    "mean over the bucket": ("dim_as_value", padded_size, "mean"),
    "prod unmasked": ("reduce_prod", unmasked, "prod"),
    "prod filled with zero": ("reduce_prod", filled_with(0), "prod"),
    "max unmasked": ("reduce_max", unmasked, "reduce_max_min"),
    "max filled with zero": ("reduce_max", filled_with(0), "reduce_max_min"),
    "max filled with the lowest finite": ("reduce_max", filled_with(lowest), "mutant_max_inf"),
    "max of integers filled with zero": ("reduce_max", filled_with(0), "reduce_max_min_int8"),
    "min of unsigned filled with zero": ("reduce_min", filled_with(0), "reduce_max_min_uint32"),
    "min unmasked": ("reduce_min", unmasked, "reduce_max_min"),
    "min filled with zero": ("reduce_min", filled_with(0), "reduce_max_min"),
    "min filled with the highest finite": ("reduce_min", filled_with(highest), "mutant_min_inf"),
    "all unmasked": ("reduce_and", unmasked, "reduce_and_or_bool"),
    "all filled with false": ("reduce_and", filled_with(False), "reduce_and_or_bool"),
    "any unmasked": ("reduce_or", unmasked, "reduce_and_or_bool"),
    "any filled with true": ("reduce_or", filled_with(True), "reduce_and_or_bool"),
    "and of bits filled with one": ("reduce_and", filled_with(1), "reduce_bitwise"),
    "xor unmasked": ("reduce_xor", unmasked, "reduce_bitwise"),
    "argmax unmasked": ("argmax", unmasked, "argmax_argmin"),
    "argmax filled with zero": ("argmax", filled_with(0), "argmax_argmin"),
    "argmax filled with the lowest finite": ("argmax", filled_with(lowest), "mutant_argmax"),
    "argmax of integers filled with zero": ("argmax", filled_with(0), "argmax_argmin_int32"),
    "argmin unmasked": ("argmin", unmasked, "argmax_argmin"),
    "argmin filled with zero": ("argmin", filled_with(0), "argmax_argmin"),
    "reduce unmasked": ("reduce", unmasked, "reduce_known_function"),
    "dot unmasked": ("dot_general", unmasked, "dot_contract_open"),
    "dot with the left side filled": ("dot_general", filled_with(0), "dot_contract_open"),
    "dot, right side filled": ("dot_general", filled_with(0, positions=(1,)), "dot_contract_open"),
    "dot by products with masks": ("dot_general", multiplied(0, 1), "dot_contract_open"),
    "dot with the left side filled, twice the same": ("dot_general", filled_with(0), "gram"),
    "attention's sum unmasked": ("reduce_sum", unmasked, "attention"),
    "attention's sum by a product with a mask": ("reduce_sum", multiplied(0), "attention"),
    "gradient of a dot unmasked": ("dot_general", unmasked, "dot_contract_static"),
    "gradient of a dot with one side filled": ("dot_general", filled_with(0), "dot_contract_open"),
    "reverse cumsum unmasked": ("cumsum", unmasked, "cumsum"),
    "reverse cumsum forward": ("cumsum", forward, "cumsum"),
    "reverse cumprod filled with zero": ("cumprod", filled_with(0), "cumprod"),
    "reverse cummax filled with zero": ("cummax", filled_with(0), "cummax"),
    "reverse cummin filled with zero": ("cummin", filled_with(0), "cummin"),
    "reverse cumlogsumexp filled with zero": ("cumlogsumexp", filled_with(0), "cumlogsumexp"),
    "gradient of cumsum unmasked": ("cumsum", unmasked, "cumsum"),
    "sort unmasked": ("sort", unmasked, "sort"),
    "sort by infinity as a sentinel": ("sort", sort_by_sentinel(np.inf), "sort"),
    "sort by the highest finite": ("sort", sort_by_sentinel(highest), "sort_unstable"),
    "sort of integers filled with zero": ("sort", filled_with(0), "sort_gradient"),
    "argsort by infinity as a sentinel": ("sort", sort_by_sentinel(np.inf), "sort_descending"),
    "argsort with padding in front": ("sort", unstable_sort, "sort_descending"),
    "median unmasked": ("sort", unmasked, "median"),
    "median of the bucket": ("dim_as_value", padded_size, "median"),
    "top_k unmasked": ("top_k", unmasked, "top_k_gradient"),
    "top_k filled with zero": ("top_k", filled_with(0), "top_k_gradient"),
    "rev without a shift": ("rev", unmasked, "rev"),
    "concatenate at padded ends": ("concatenate", at_padded_ends, "concat_two"),
    "a slice from a padded start": ("slice", padded_slice, "mutant_last_two"),
    "gather clamped by the padded size": ("gather", unmasked, "get_clip"),
    "gather filled by the padded size": ("gather", unmasked, "get_promise_in_bounds"),
    "slice clamped by the padded size": ("dynamic_slice", unmasked, "dynamic_slice_of_static"),
    "slice off by one": ("dynamic_slice", first_and_last_swapped, "dynamic_slice_of_static"),
    "scatter-add of padded updates": ("scatter-add", unmasked, "add_rows_clip"),
    "scatter-add of zeros at padded indices": ("scatter-add", multiplied(2), "add_rows_clip"),
    "scatter of padded updates": ("scatter", unmasked, "set_rows_drop"),
    "segment_sum of padded rows": ("scatter-add", unmasked, "segment_sum_gradient"),
    "update by the padded size": ("dynamic_update_slice", unmasked, "dynamic_update_partial"),
    "pad behind the padding": ("pad", padded_high, "pad_low_by_size"),
    "pad without its own value": ("pad", unfilled_pad, "pad_low_by_size"),
    "merged axes with padding in between": ("reshape", plain_reshape, "merge_all"),
    "a split axis at padded strides": ("reshape", plain_reshape, "merge_three"),
    "split at padded sizes": ("split", padded_split, "split_half"),
    "tiles of padding": ("tile", unmasked, "tile_by_size"),
    "a scan over the padded length": ("scan", every_padded_step, "scan_of_an_array_and_its_length"),
    "random bits of the padded shape": ("random_bits", unmasked, "random_total_bits_8"),
    "dropout of the padded shape": ("random_bits", unmasked, "random_dropout"),
    "convolution unmasked": ("conv_general_dilated", unmasked, "conv_same_2d"),
    "window sum unmasked": ("reduce_window_sum", unmasked, "window_sum_int32"),
    "window max filled with zero": ("reduce_window_max", filled_with(0), "window_max_special"),
    "cholesky of zeros": ("cholesky", filled_with(0), "linalg_cholesky"),
}
MUTANTS = [Mutant(name, *row, gradient=name.startswith("gradient")) for name, row in TABLE.items()]


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
def test_another_daily_case_catches_it_too(mutant: Mutant) -> None:
    """What is left out of the daily form of cases catches nothing alone."""
    primitive = jaxprs.primitive(mutant.primitive)
    broken = {**default_rules(), primitive: mutant.rule}
    for case in DAILY:
        if mutant.primitive in case.covers and case != mutant.case:
            try:
                check(case, fn=gradient_of(case) if case.grad else None, rules=broken)
            except AssertionError:
                return
            except Exception:  # a mutant that cannot run a case is none of it
                continue
    pytest.fail("no other case of tests/cases catches it")


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
