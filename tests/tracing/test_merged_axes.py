"""Axes that a program merges and splits again are kept apart, where that saves gathers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Fallback
from bucketjit._tracing.symbolic import trace
from tests.harness import Arg, Case, check, gradient_of, leaves_of, tree_of

X, W, V = "b, s, 4", "4, 6", "6"


def flat(x: Any) -> Any:
    return x.reshape(-1, *x.shape[2:])


def back(y: Any, x: Any) -> Any:
    return y.reshape(*x.shape[:2], *y.shape[1:])


def layer(x: Any, w: Any, v: Any) -> Any:
    return back(jax.nn.relu(flat(x) @ w + v), x)


def block(x: Any, w: Any, v: Any) -> Any:
    h = flat(x) @ w
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-3)
    return back(jax.nn.softmax(h * v), x).sum(1)


def rows_on_the_right(x: Any, w: Any) -> Any:
    return back(jnp.einsum("de,nd->en", w, flat(x)).T, x)


def batch_of_both(x: Any, w: Any) -> Any:
    y = flat(x) @ w
    return back(jnp.einsum("nd,ne->nde", flat(x), y), x)


def contracted(x: Any, w: Any) -> Any:
    y = flat(x)
    return back(y @ (y.T @ y) / 100, x) @ w


def moved(x: Any, w: Any) -> Any:
    y = (flat(x) @ w).T[:, None]
    return back(jnp.squeeze(lax.cumsum(y, axis=0), 1).T, x)


def reduced(x: Any, w: Any) -> Any:
    y = flat(x) @ w
    return back(y - y.mean(0) + y.max(0), x)


def chosen(x: Any, w: Any) -> Any:
    y = flat(x) @ w
    return back(jnp.where(jnp.arange(6) < 3, y, jnp.zeros_like(y)), x)


def three_axes(x: Any) -> Any:
    y = x.reshape(-1, 2)
    return (jnp.tanh(y) * 2).reshape(x.shape).sum((1, 2))


def with_heads(x: Any, w: Any) -> Any:
    y = (flat(x) @ w).reshape(-1, 2, 3)
    return y.sum(-1).reshape(*x.shape[:2], 2)


def case(fn: Callable[..., Any], *args: str | Arg, **more: Any) -> Case:
    return Case(f"unmerge_{fn.__name__}", fn, args, rtol=2e-4, atol=2e-4, **more)


CASES = [
    case(layer, X, W, V),
    case(block, X, W, V),
    case(rows_on_the_right, X, W),
    case(batch_of_both, X, W),
    case(contracted, X, W),
    case(moved, X, W),
    case(reduced, X, W),
    case(chosen, X, W),
    case(three_axes, "b, s, t, 2", buckets={"b": 2, "s": 4, "t": 3}),
    case(with_heads, X, W),
]


def program(of: Case, fn: Callable[..., Any]) -> Any:
    leaves = leaves_of(of.arguments)
    return trace(fn, tree_of(leaves), leaves, of.bucket).jaxpr


def merged_axes(jaxpr: Any) -> list[Any]:
    """The sizes in a program that are products of two variables."""
    shapes = [v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars]
    return [d for shape in shapes for d in shape if "*" in str(d)]


@pytest.mark.parametrize("of", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_no_axis_stays_merged(of: Case, gradient: bool) -> None:
    fn = gradient_of(of) if gradient else of.fn
    assert merged_axes(program(of, fn)) == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("of", CASES, ids=lambda c: c.name)
def test_the_same_numbers(of: Case) -> None:
    check(of, fn=gradient_of(of), poisons=("nan", "index"))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: flat(x) @ w,  # never split
        lambda x, w: back(jnp.sort(flat(x), axis=0), x) @ w,  # needed merged at once
        lambda x, w: back(jnp.roll(flat(x), 1, axis=0) @ w, x),
        lambda x, w: flat(x @ w).reshape(x.shape[1], x.shape[0], 6),  # split another way
    ],
)
def test_what_does_not_pay_is_left_alone(fn: Callable[..., Any]) -> None:
    of = Case("unmerge_left_alone", fn, (X, W))
    assert merged_axes(program(of, fn))
    check(of, poisons=("nan", "index"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", ["n, m", "_, m", "n, _"])
def test_one_array_meets_merged_axes_as_rows_and_as_columns(axes: str) -> None:
    def pairs(x: Any) -> Any:
        ones = jnp.ones((x.size, x.size))
        rows, columns = ones * x.reshape(-1, 1), ones * x.reshape(-1)
        return rows.sum(0).reshape(x.shape) + columns.sum(1).reshape(x.shape)

    def outer(x: Any) -> Any:
        return jax.grad(lambda y: (jnp.outer(y, y) * y.reshape(-1)).sum())(x)

    for function in (pairs, outer):
        executor = BucketedExec(function, dynamic_axes=axes, fallback=Fallback.ERROR).with_pow2()
        for shape in ((3, 5), (3, 2) if axes == "_, m" else (4, 5)):
            x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            np.testing.assert_allclose(executor(x), jax.jit(function)(x), rtol=1e-4, atol=1e-4)
