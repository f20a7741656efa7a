"""Fills that would write what the padding holds already are dropped, and no others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from bucketjit import BucketedExec, Fallback
from bucketjit._masking.constants import constant_of, exponent_of_zeros
from bucketjit._masking.padding import Padding
from tests.comparison import assert_like_jit, ramp
from tests.masked import masked_jaxpr


def fills(fn: Callable[..., Any], *shapes: str, padding: Any = 0) -> int:
    """How many fills are left in a function of open arrays padded with zeros."""
    return str(masked_jaxpr(fn, *shapes, padding=padding)).count("= select_n")


DROPPED: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(0),
    "sum of squares": lambda x: (x * x).sum(0),
    "norm": lambda x: jnp.sqrt(jnp.sum(jnp.tanh(x) ** 2)),
    "scaled": lambda x: (x * 3.0 + x).sum(0),
    "of a function": lambda x: jax.jit(jnp.sin)(x).sum(0),
    "transposed": lambda x: x.T[:, :, None].sum((1, 2)),
    "closed axis first": lambda x: jnp.abs(x).sum(1).sum(0),
    "dot": lambda x: x.T @ x,
    "cast": lambda x: x.astype(jnp.int32).sum(0),
    "negative zero": lambda x: (x * -1.0).sum(0),
    "cumulative": lambda x: jnp.cumsum(x[::-1] * 0 + x, axis=1).shape[0] + x.sum(0),
}

KEPT: dict[str, Callable[[Any], Any]] = {
    "exp": lambda x: jnp.exp(x).sum(0),
    "shifted": lambda x: (x + 1.0).sum(0),
    "max": lambda x: x.max(0),
    "product": lambda x: x.prod(0),
    "a slice": lambda x: x[:-1].sum(0),
    "a slice of a function": lambda x: jnp.sin(x)[: x.shape[0] - 1].sum(0),
    "reversed": lambda x: x[::-1][1:].sum(0),
    "its own size": lambda x: (x * x.shape[0]).sum(0),
    "a matrix product": lambda x: (x @ jnp.ones((3, 3))).sum(0),
    "divided": lambda x: (x / x).sum(0),
    "chosen": lambda x: jnp.where(x > 0, x, 1.0).sum(0),
}


@pytest.mark.parametrize("name", DROPPED)
def test_dropped(name: str) -> None:
    if name != "cumulative":
        assert fills(DROPPED[name], "b, 3") == 0
    assert fills(DROPPED[name], "b, 3", padding=None) > 0


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    assert fills(KEPT[name], "b, 3") > 0


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", [*DROPPED, *KEPT])
def test_the_same_numbers(name: str) -> None:
    fn = {**DROPPED, **KEPT}[name]
    executor = BucketedExec(fn, dynamic_axes="b, _").with_pow2()
    for n in (5, 3):
        x = ramp(n, 3) + 1
        for value in (x, jnp.asarray(x), -x):
            assert_like_jit(executor, fn, value)
    assert executor.stats().fallback_calls == 0


def test_what_a_dtype_cannot_hold_is_not_claimed() -> None:
    known = Padding()
    array = jnp.zeros(4, jnp.int8)
    assert not known.holds(array, ("b",), 0)
    known.note_zeros(array, ("b",))
    assert known.holds(array, ("b",), 0)
    assert known.holds(array, ("b",), False)
    assert not known.holds(array, ("b",), 1)
    assert not known.holds(array, ("b - 1",), 0)
    assert not known.holds(array, ("b",), jnp.int8(0))
    without_zero = jnp.ones(4, jnp.float8_e8m0fnu)
    known.note_zeros(without_zero, ("b",))
    assert not known.holds(without_zero, ("b",), 0)


def test_of_what_a_rule_of_ones_own_does_nothing_is_known() -> None:
    """The padding of its product is one, not the zero of zeros multiplied."""

    def mul(ctx: Any, x: Any, y: Any) -> Any:
        return ctx.bind(ctx.fill(x, value=1), ctx.fill(y, value=1))

    def fn(x: Any) -> Any:
        return (x * x).sum(0)

    executor = BucketedExec(fn).with_pow2().with_rules({lax.mul_p: mul})
    for n in (3, 4, 5):
        assert_like_jit(executor, fn, ramp(n, 2) + 1)


_F = np.float32


def test_factors_of_sixteen_bits() -> None:
    def fn(x: Any) -> Any:
        return jnp.sum(jnp.minimum(x * 300.0 * 300.0, 1))

    executor = BucketedExec(fn).with_pow2()
    for n in (5, 8, 3):
        assert_like_jit(executor, fn, np.full(n, 1e-3, np.float16))


@pytest.mark.parametrize(
    ("name", "a", "b", "result"),
    [
        ("mul", _F(0), _F(3), True),
        ("mul", _F(0), _F(-1), False),
        ("mul", _F(0), _F(np.inf), False),
        ("mul", np.int8(0), np.int8(-3), True),
        ("mul", np.complex64(0), np.complex64(-1), False),
        ("add", _F(0), _F(-0.0), True),
        ("add", _F(0), _F(1), False),
        ("add", np.complex64(0), np.complex64(0), True),
        ("sub", _F(0), _F(0), True),
        ("max", _F(0), _F(-0.0), False),
        ("max", _F(0), _F(-3), True),
        ("min", _F(0), _F(6), True),
        ("and", np.int8(0), np.int8(5), True),
        ("add", jnp.bfloat16(0), jnp.bfloat16(0), True),
    ],
)
def test_only_exact_zeros_are_followed(name: str, a: Any, b: Any, result: bool) -> None:
    operation = getattr(lax, {"and": "bitwise_and"}.get(name, name))
    jaxpr = jax.make_jaxpr(operation)(a, b).jaxpr
    constants = [constant_of(x, x.dtype) for x in (a, b)]
    with np.errstate(all="raise"):
        assert (exponent_of_zeros(jaxpr.eqns[0], constants) is not None) is result


def own_primitive(name: str, function: Any) -> Primitive:
    """A user's primitive, which may have the name of one of JAX's."""
    made = Primitive(name)
    made.def_impl(function)
    made.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


@pytest.mark.parametrize("name", ["square", "abs", "floor", "copy", "neg", "of_my_own"])
def test_a_primitive_of_the_users_is_none_of_jax(name: str) -> None:
    shifted = own_primitive(name, lambda x: x * x + 1)
    rules = {shifted: lambda ctx, x: ctx.bind(x)}
    executor = BucketedExec(lambda x: shifted.bind(x).sum(), fallback=Fallback.ERROR)
    executor = executor.with_rules(rules).with_pow2()
    assert executor(np.ones(5, np.float32)) == 10
