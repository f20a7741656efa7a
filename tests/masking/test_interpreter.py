"""The engine with a table of two rules."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.program import Program
from bucketjit._masking.interpreter import interpret
from bucketjit._masking.rules import default_rules
from bucketjit.errors import MaskingError
from bucketjit.rules import RuleContext
from tests.comparison import ramp
from tests.harness import traced


def double(ctx: RuleContext, x: Any) -> Any:
    return ctx.bind(x)


def add(ctx: RuleContext, x: Any, y: Any) -> Any:
    return ctx.bind(x, y)


def total(ctx: RuleContext, x: Any) -> Any:
    return ctx.bind(ctx.fill(x, axes=ctx.params["axes"], value=0))


TOY: dict[Any, Any] = {lax.neg_p: double, lax.reduce_sum_p: total}


def run(
    program: Program,
    args: list[Any],
    bucket: Mapping[str, int],
    sizes: Mapping[str, int],
    rules: Any = TOY,
    after: Any = None,
) -> list[Any]:
    at = BucketSizes(bucket, program.lower, {v: np.int32(n) for v, n in sizes.items()})
    made = None if after is None else lambda: after
    return interpret(program.jaxpr, program.consts, args, at, rules, made)


def padded(x: np.ndarray, *shape: int, value: float = np.nan) -> np.ndarray:
    wide = np.full(shape, value, x.dtype)
    wide[tuple(map(slice, x.shape))] = x
    return wide


def test_one_trace_serves_every_bucket_and_size() -> None:
    program = traced(lambda x: (-x).sum(0), "b, 2", b=3)
    for bucket in (4, 8):
        for n in range(1, bucket + 1):
            (out,) = run(program, [padded(ramp(n, 2), bucket, 2)], {"b": bucket}, {"b": n})
            np.testing.assert_array_equal(out, -ramp(n, 2).sum(0))


def test_sizes_are_run_time_values() -> None:
    program = traced(lambda x: (-x).sum(), "b", b=3)

    @jax.jit
    def masked(n: Any, x: Any) -> Any:
        at = BucketSizes({"b": 8}, program.lower, {"b": n})
        return interpret(program.jaxpr, program.consts, [x], at, TOY)[0]

    for n in (1, 3, 8):
        assert float(masked(np.int32(n), padded(ramp(n), 8))) == -ramp(n).sum()
    assert masked._cache_size() == 1


def test_equations_without_symbolic_sizes_need_no_rule() -> None:
    def fn(x: Any, w: Any) -> Any:
        return -x, jnp.exp(w @ w.T) + lax.fori_loop(0, 3, lambda i, c: c * 2, 1.0)

    program = traced(fn, "b; 2, 2", b=3)
    w = ramp(2, 2)
    out, static = run(program, [padded(ramp(3), 4), w], {"b": 4}, {"b": 3})
    np.testing.assert_array_equal(out[:3], -ramp(3))
    np.testing.assert_allclose(static, np.exp(w @ w.T) + 8, rtol=1e-6)


def test_constants_and_literals() -> None:
    table = jnp.asarray(ramp(2))
    rules = {**TOY, lax.mul_p: add, lax.add_p: add}
    program = traced(lambda x: (x * 2 + 1, table + 1), "b", b=3)
    out, static = run(program, [padded(ramp(3), 4)], {"b": 4}, {"b": 3}, rules)
    np.testing.assert_array_equal(out[:3], 2 * ramp(3) + 1)
    np.testing.assert_array_equal(static, ramp(2) + 1)


def test_a_missing_rule_names_primitive_place_and_remedy() -> None:
    program = traced(lambda x: jnp.exp(-x), "b", b=3)
    with pytest.raises(MaskingError) as raised:
        run(program, [padded(ramp(3), 4)], {"b": 4}, {"b": 3})
    assert raised.value.reason.startswith("exp: no masking rule")
    assert "test_interpreter.py" in raised.value.reason
    assert "with_rules" in raised.value.remedy


def test_a_refusal_names_the_place_once() -> None:
    def refuse(ctx: RuleContext, x: Any) -> Any:
        ctx.refuse("cannot", "do otherwise")

    program = traced(lambda x: jax.jit(lambda y: -y)(x), "b", b=3)
    call = next(e for e in program.jaxpr.eqns).primitive

    def inline(ctx: RuleContext, *operands: Any) -> Any:
        return ctx.evaluate(ctx.symbolic_params["jaxpr"], *operands)

    rules = {call: inline, lax.neg_p: refuse}
    with pytest.raises(MaskingError) as raised:
        run(program, [padded(ramp(3), 4)], {"b": 4}, {"b": 3}, rules)
    assert raised.value.reason.startswith("neg: cannot")
    assert raised.value.reason.count("test_interpreter.py") == 1
    assert raised.value.remedy == "do otherwise"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda x: 1.0, "gave float, expected an array"),
        (lambda x: None, "gave NoneType, expected an array"),
        (lambda x: [x], "gave list, expected an array"),
        (lambda x: x.astype(jnp.float16), "gave dtype float16, expected float32"),
    ],
)
def test_a_rule_gives_an_array_of_the_dtype(given: Any, told: str) -> None:
    program = traced(lambda x: -x, "b", b=3)
    rules = {lax.neg_p: lambda ctx, x: given(x)}
    with pytest.raises(MaskingError, match=f"neg: its rule {told}") as raised:
        run(program, [padded(ramp(3), 4)], {"b": 4}, {"b": 3}, rules)
    assert raised.value.is_defect


def test_an_inner_program_may_return_a_literal() -> None:
    program = traced(lambda x: x * jax.jit(lambda y: (y, 2))(x)[1], "b", b=3)
    got = run(program, [padded(ramp(3), 4)], {"b": 4}, {"b": 3}, default_rules())
    np.testing.assert_array_equal(got[0][:3], 2 * ramp(3))


@pytest.mark.parametrize(
    ("given", "told"),
    [(lambda x: [x], "gave 1 results, expected 2"), (lambda x: 5, "failed with TypeError")],
)
def test_a_rule_gives_every_result(given: Any, told: str) -> None:
    program = traced(lambda x: lax.sort((x, -x)), "b", b=3)
    rules = {lax.neg_p: lambda ctx, x: -x, lax.sort_p: lambda ctx, x, y: given(x)}
    with pytest.raises(MaskingError, match=told):
        run(program, [padded(ramp(3), 4)], {"b": 4}, {"b": 3}, rules)


def test_sub_programs_are_walked_with_the_same_table() -> None:
    inner = jax.jit(lambda y: (-y).sum())
    program = traced(lambda x: inner(x), "b", b=3)
    (eqn,) = (e for e in program.jaxpr.eqns if "jaxpr" in e.params)

    def inline(ctx: RuleContext, *operands: Any) -> Any:
        return ctx.evaluate(ctx.symbolic_params["jaxpr"], *operands)

    (out,) = run(program, [padded(ramp(3), 4)], {"b": 4}, {"b": 3}, {**TOY, eqn.primitive: inline})
    assert float(out) == -6


def test_after_sees_every_equation_and_changes_its_outputs() -> None:
    seen = []

    def after(eqn: Any, outs: list[Any], sizes: BucketSizes) -> list[Any]:
        seen.append(
            (eqn.primitive.name, outs[0].shape, int(sizes.logical(eqn.invars[0].aval.shape[0])))
        )
        return [out + 1 for out in outs]

    program = traced(lambda x: (-x).sum(), "b", b=3)
    (out,) = run(program, [padded(ramp(3), 4)], {"b": 4}, {"b": 3}, after=after)
    assert seen == [("neg", (4,), 3), ("reduce_sum", (), 3)]
    assert float(out) == -6 + 3 + 1


def test_the_context_of_a_rule() -> None:
    seen: dict[str, Any] = {}

    def look(ctx: RuleContext, x: Any) -> Any:
        seen["primitive"] = ctx.primitive
        seen["padded"] = (ctx.params["shape"], x.shape)
        seen["symbolic"] = str(ctx.symbolic_params["shape"])
        seen["shapes"] = (str(ctx.in_shapes[0]), str(ctx.out_shapes[0]))
        seen["avals"] = (ctx.in_avals[0].dtype, ctx.out_avals[0].dtype)
        seen["axes"] = ctx.symbolic_axes()
        d = ctx.in_shapes[0][0]
        seen["sizes"] = (ctx.padded(d), int(ctx.logical(d)), ctx.logical(7), ctx.padded(7))
        seen["padded_shape"] = ctx.padded_shape((d, 2 * d, 5))
        return ctx.bind(x)

    program = traced(
        lambda x: lax.broadcast_in_dim(x, (2, x.shape[0], 3), (1, 2)), "b, 3", sizes={"b": 3}
    )
    rules = {lax.broadcast_in_dim_p: look}
    (out,) = run(program, [padded(ramp(3, 3), 4, 3)], {"b": 4}, {"b": 3}, rules)
    assert out.shape == (2, 4, 3)
    assert seen["primitive"] is lax.broadcast_in_dim_p
    assert seen["padded"] == ((2, 4, 3), (4, 3))
    assert seen["symbolic"] == "(2, b, 3)"
    assert seen["shapes"] == ("(b, 3)", "(2, b, 3)")
    assert seen["axes"] == (0,)
    assert seen["sizes"] == (4, 3, 7, 7)
    assert seen["padded_shape"] == (4, 8, 5)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", -np.inf), ("int8", -128), ("bool", True), ("bfloat16", 1), ("complex64", 2j)],
)
@pytest.mark.parametrize("unfused", [False, True])
def test_fill_writes_into_padding_only(dtype: str, value: Any, unfused: bool) -> None:
    """A select: what was there, NaN included, is gone; what is real, NaN included, stays."""
    filled: list[Any] = []

    def rule(ctx: RuleContext, x: Any) -> Any:
        filled.append(ctx.fill(x, value=value, unfused=unfused))
        filled.append(ctx.fill(x, axes=(-1,), value=value, unfused=unfused))
        filled.append(ctx.fill(x, axes=(1,), value=value, unfused=unfused))
        return ctx.bind(x)

    program = traced(lambda x: jnp.transpose(x, (2, 1, 0)), f"{dtype}[b, 2, s]", b=2, s=3)
    real = ramp(2, 2, 3).astype(jnp.dtype(dtype))
    wide = np.full((4, 2, 8), 77 if dtype != "bool" else False).astype(jnp.dtype(dtype))
    wide[:2, :, :3] = real
    run(program, [wide], {"b": 4, "s": 8}, {"b": 2, "s": 3}, {lax.transpose_p: rule})
    both, last, static = (np.asarray(x) for x in filled)
    want = np.full_like(wide, value)
    want[:2, :, :3] = real
    np.testing.assert_array_equal(both, want)
    np.testing.assert_array_equal(last[:, :, :3], wide[:, :, :3])
    np.testing.assert_array_equal(last[:, :, 3:], np.full_like(wide, value)[:, :, 3:])
    np.testing.assert_array_equal(static, wide)


def test_fill_keeps_a_real_nan_and_drops_one_in_padding() -> None:
    program = traced(lambda x: (-x).sum(), "b", b=3)
    x = np.array([1, 2, 3, np.nan, np.nan], np.float32)
    assert float(run(program, [x], {"b": 5}, {"b": 3})[0]) == -6
    x = np.array([1, np.nan, 3, 5, 5], np.float32)
    assert np.isnan(run(program, [x], {"b": 5}, {"b": 3})[0])


def test_rules_may_be_keyed_by_name() -> None:
    program = traced(lambda x: (-x).sum(), "b", b=3)
    rules = {"neg": double, "reduce_sum": total}
    assert float(run(program, [padded(ramp(3), 4)], {"b": 4}, {"b": 3}, rules)[0]) == -6
