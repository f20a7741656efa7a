"""Elementwise equations read a value as it has been filled for another; nothing else does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Check
from bucketjit._masking.padding import Padding
from tests.comparison import assert_like_jit, ramp
from tests.masked import masked_jaxpr


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


def test_an_elementwise_equation_reads_what_was_filled() -> None:
    ((filled, _),) = operands_of("sub", _spread, "b, 3")
    assert filled == "select_n"


def test_so_it_does_in_an_inner_function() -> None:
    ((filled, _),) = operands_of("sub", lambda x: jax.jit(_spread)(x), "b, 3")
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
def test_what_is_not_elementwise_reads_the_value_itself(
    name: str, fn: Callable[[Any], Any]
) -> None:
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
