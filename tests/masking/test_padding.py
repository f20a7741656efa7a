"""Padding that is known: fills are dropped, read again or written once, and no others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from bucketjit import BucketedExec, Check, Fallback
from bucketjit._masking.constants import constant_of, exponent_of_zeros
from bucketjit._masking.padding import Padding
from tests.comparison import assert_as_jit, assert_like_jit, ramp
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
def test_dropped_fills(name: str) -> None:
    if name != "cumulative":
        assert fills(DROPPED[name], "b, 3") == 0
    assert fills(DROPPED[name], "b, 3", padding=None) > 0


@pytest.mark.parametrize("name", KEPT)
def test_kept_fills(name: str) -> None:
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

    executor = BucketedExec(lambda x: (x * x).sum(0)).with_pow2().with_rules({lax.mul_p: mul})
    for n in (3, 4, 5):
        assert_as_jit(executor, ramp(n, 2) + 1)


_F = np.float32


def test_factors_of_sixteen_bits() -> None:
    executor = BucketedExec(lambda x: jnp.sum(jnp.minimum(x * 300.0 * 300.0, 1))).with_pow2()
    for n in (5, 8, 3):
        assert_as_jit(executor, np.full(n, 1e-3, np.float16))


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


def operands_of(name: str, fn: Callable[..., Any], *shapes: str) -> list[list[str]]:
    """What made the operands of each equation of a primitive, in the masked program."""
    jaxpr = masked_jaxpr(fn, *shapes, padding=None).jaxpr
    made = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    return [
        [made.get(v, "argument") for v in eqn.invars if not hasattr(v, "val")]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == name
    ]


def _spread(x: Any) -> Any:
    return x - x.max(0)


@pytest.mark.parametrize("fn", [_spread, lambda x: jax.jit(_spread)(x)], ids=["plain", "inner"])
def test_an_elementwise_equation_reads_what_was_filled(fn: Callable[[Any], Any]) -> None:
    ((filled, _),) = operands_of("sub", fn, "b, 3")
    assert filled == "select_n"


def test_the_last_fill_before_it_is_read() -> None:
    def fn(x: Any) -> Any:
        return x.sum(0), x.max(0), jnp.exp(x)

    assert operands_of("exp", fn, "b, 3") == [["select_n"]]
    jaxpr = masked_jaxpr(fn, "b, 3", padding=None).jaxpr
    selects = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "select_n"]
    assert len(selects) == 2
    assert all(jaxpr.invars[-1] in eqn.invars for eqn in selects)  # each fills the argument itself


@pytest.mark.parametrize(
    "name, fn",
    [
        ("dot_general", lambda x: (x.max(0), x @ jnp.ones((3, 2)))),
        ("transpose", lambda x: (x.max(0), x.T)),
        ("reshape", lambda x: (x.max(0), x.reshape(x.shape[0], 3, 1))),
    ],
)
def test_what_is_not_elementwise_reads_the_value_itself(name: str, fn: Any) -> None:
    assert ["argument"] in [made[:1] for made in operands_of(name, fn, "b, 3")]


def test_known_padding_is_not_given_up() -> None:
    """The argument is padded with zeros: of its squares the sum needs no fill."""

    def fn(x: Any) -> Any:
        return x.max(0), (x * x).sum(0)

    assert str(masked_jaxpr(fn, "b, 3", padding=0)).count("= select_n") == 1


def test_a_value_of_another_shape_is_another_value() -> None:
    array, filled = np.ones(4), np.zeros(4)
    (eqn,) = jax.make_jaxpr(jnp.exp)(array).jaxpr.eqns
    stand_ins = Padding()
    stand_ins.note_filled(eqn, array, (3,), filled, 1)
    assert stand_ins.operands(eqn, [array])[0] is array
    stand_ins.note_filled(eqn, array, (4,), filled, 1)
    assert stand_ins.operands(eqn, [array])[0] is filled


def _in_a_branch(x: Any, y: Any) -> Any:
    high = lax.cond(y.sum() > 0, lambda: (x - x.max()).sum(), lambda: x.min())
    return high, jnp.exp(x)


def _in_a_loop(x: Any, y: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return carry + (x.max() - x).sum(), row - x.min()

    return lax.scan(body, y.sum(), y), x * 2


def _while(x: Any, y: Any) -> Any:
    return lax.while_loop(lambda c: c < x.max(), lambda c: c + jnp.abs(x).max() + 1, y.sum()), -x


def _mapped(x: Any, y: Any) -> Any:
    return jax.vmap(lambda row: (x - x.max()) * row.sum())(y[:, None]), x + 1


def _remembered(x: Any, y: Any) -> Any:
    return jax.grad(jax.checkpoint(lambda v: jnp.sum(jax.nn.softmax(v) * y)))(x), jax.nn.softmax(x)


@pytest.mark.parametrize("fn", [_in_a_branch, _in_a_loop, _while, _mapped, _remembered])
def test_what_is_filled_inside_stays_inside(fn: Callable[..., Any]) -> None:
    """A value that is filled while a branch or a body is traced is none of the program around."""
    executor = BucketedExec(fn, check=Check.POISON).with_pow2()
    for n in (5, 8, 3):
        assert_like_jit(executor, fn, ramp(n) - 2, np.linspace(-1, 2, n, dtype=np.float32))
    assert executor.stats().fallback_calls == 0


RANDOM = np.random.default_rng(5)


def by_hand(x: Any) -> Any:
    shifted = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return shifted / jnp.sum(shifted, -1, keepdims=True)


def attention(x: Any) -> Any:
    return jax.nn.softmax(x @ x.T, -1) @ x


SOFTMAXES: dict[str, Callable[[Any], Any]] = {
    "jax": lambda x: jax.nn.softmax(x, -1) @ jnp.ones((x.shape[1], 2)),
    "by hand": lambda x: by_hand(x) @ jnp.ones((x.shape[1], 2)),
    "attention": attention,
    "of halves": lambda x: jax.nn.softmax(x.astype(jnp.float16), -1) @ jnp.ones((x.shape[1], 2)),
    "a sum that rounds to 0": lambda x: (
        (y := jax.nn.softmax(x, -1) / 2**11)
        / y.astype(jnp.float8_e4m3fn).astype(jnp.float32).sum(-1, keepdims=True)
    ).sum(-1),
    "a sum to halves": lambda x: (
        (y := jnp.exp(x - x.max(-1, keepdims=True))) / y.sum(-1, keepdims=True).astype(jnp.float16)
    ).sum(-1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "softmax of a row": lambda x: jax.nn.softmax(x[0]) @ jnp.ones(x.shape[1]),
    "logsumexp of all": lambda x: jax.nn.logsumexp(x) + jax.nn.logsumexp(x[0]),
    "log softmax": lambda x: jax.nn.log_softmax(x, -1).max(-1),
    "over both axes": lambda x: jax.nn.softmax(x, (0, 1)).sum(),
    "over one of two": lambda x: jax.nn.softmax(x, (0, 1)).sum(0),
    "along axis 0": lambda x: jnp.ones((3, x.shape[0])) @ jax.nn.softmax(x, 0),
    "gradient": lambda x: jax.grad(lambda y: (jax.nn.softmax(y @ y.T, -1) @ y)[0].sum())(x),
    "in a scan": lambda x: jax.lax.scan(
        lambda c, row: (c + (jax.nn.softmax(row) * row).sum(), None), jnp.zeros(()), x
    )[0],
    "mask": lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf), -1) @ jnp.ones(x.shape[1]),
    # These have the equations of a softmax, and are none.
    "another maximum": lambda x: jnp.exp(x - jnp.max(jnp.flip(x, 0), -1, keepdims=True)).sum(-1),
    "along another axis": lambda x: jnp.exp(x - jnp.max(x, 0, keepdims=True)).sum(-1),
    "another sum": lambda x: (by_hand(x) / by_hand(x * 2).sum(0)).sum(-1),
    "of the exponential": lambda x: jnp.exp(jnp.max(x, -1, keepdims=True) - x).sum(-1),
    "a convolution": lambda x: jnp.convolve(by_hand(x)[0], jnp.ones(3), "full"),
    "a cumulative sum": lambda x: jnp.cumsum(by_hand(x)[:, ::-1], -1),
    "a product": lambda x: jnp.prod(by_hand(x), -1),
}

SPECIAL: dict[str, Callable[[np.ndarray], None]] = {
    "finite": lambda x: None,
    "nan": lambda x: x.__setitem__((0, 0), np.nan),
    "inf": lambda x: x.__setitem__((0, -1), np.inf),
    "-inf": lambda x: x.__setitem__((0, slice(1, None)), -np.inf),
    "all -inf": lambda x: x.__setitem__(0, -np.inf),
    "all nan": lambda x: x.__setitem__(0, np.nan),
    "large": lambda x: x.__imul__(1e30),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_results_of_softmaxes(name: str) -> None:
    fn = SOFTMAXES[name]
    spec = "n, _" if name in ("attention", "gradient") else "n, m"
    executor = BucketedExec(fn, dynamic_axes=spec).with_pow2(min=8)
    exact = jax.jit(fn)
    for n, m in [(3, 5), (1, 1), (5, 8)]:
        for special in SPECIAL.values():
            x = RANDOM.standard_normal((n, 5 if spec == "n, _" else m)).astype(np.float32)
            special(x)
            np.testing.assert_allclose(executor(x), exact(x), rtol=2e-5, atol=1e-6)
    assert executor.stats().fallback_calls == 0
    BucketedExec(fn, dynamic_axes="n, _", check=Check.POISON).with_pow2(min=8)(x)


NOTHING: dict[str, Callable[..., Any]] = {
    "all but the last": lambda x: jax.nn.softmax(x @ x[:-1].T, -1) @ x[:-1],
    "all but the first": lambda x: jax.nn.softmax(x @ x[1:].T, -1).sum(-1),
    "half": lambda x: jax.nn.softmax(x @ x[: x.shape[0] // 2].T, -1) @ x[: x.shape[0] // 2],
    "its gradient": jax.grad(lambda x: (jax.nn.softmax(x @ x[:-1].T, -1) @ x[:-1]).sum()),
    "a selection": lambda x: jax.nn.softmax(x @ x[x[:, 0] > 9].T, 1) @ x[x[:, 0] > 9],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NOTHING)
def test_an_axis_that_has_nothing(name: str) -> None:
    fn = NOTHING[name]
    exact = fn if name == "a selection" else jax.jit(fn)
    executor = BucketedExec(fn, dynamic_axes="n, _").with_pow2(min=8)
    for n in (1, 5):
        x = RANDOM.standard_normal((n, 4)).astype(np.float32)
        want = exact(jnp.asarray(x))
        np.testing.assert_allclose(executor(x), want, rtol=2e-5, atol=1e-6)
        if name != "a selection":  # its examples run one by one
            np.testing.assert_allclose(executor.map([x, x])[1], want, rtol=2e-5, atol=1e-6)


def selects(fn: Callable[..., Any]) -> int:
    executor = BucketedExec(fn, dynamic_axes="n, _").with_pow2(min=8)
    lowered = executor.lower(jax.ShapeDtypeStruct((5, 4), jnp.float32))
    return lowered.as_text().count("stablehlo.select")


def test_a_softmax_is_filled_once() -> None:
    # The scores, and the padding of the result.
    assert selects(attention) == 2
    # Halves are summed as floats.
    assert selects(lambda x: attention(x.astype(jnp.float16)).astype(jnp.float32)) == 2
    # The same where the scores are an argument, whose padding is known to hold 0.
    assert selects(lambda x: jax.nn.softmax(x, 0)) == 2
    # The scores, and 0 in the place of a maximum that is not finite.
    assert selects(lambda x: jax.nn.logsumexp(x @ x.T)) == 2
    # The exponentials are filled again: their sum could be NaN where no real value is.
    assert selects(lambda x: jnp.exp(x @ x.T - jnp.ones((1, x.shape[0]))).sum(-1)) == 2
