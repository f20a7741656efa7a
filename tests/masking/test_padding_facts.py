"""Sums whose padding is known to add nothing are not filled, and all others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Check
from tests.masked import masked_jaxpr

WEIGHTS = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)


def gradients(layer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Those of three layers and a mean, by the weights and by the input."""

    def loss(w: Any, x: Any) -> Any:
        return (layer(w, layer(w, layer(w, x))) ** 2).mean()

    return jax.value_and_grad(loss, (0, 1))


def attention(w: Any, x: Any) -> Any:
    return jax.nn.softmax((x @ w) @ x.T / 2) @ (x @ w) + x


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "dense": lambda w, x: jax.nn.gelu(x @ w),
    "relu": lambda w, x: jax.nn.relu(x @ w + w[0]),
    # Of zeros these are infinite or NaN, and so are their derivatives.
    "reciprocal": lambda w, x: (1 / x) @ w,
    "logarithm": lambda w, x: jnp.log(jnp.abs(x)) @ w,
    "square root": lambda w, x: jnp.sqrt(jnp.abs(x)) @ w,
    "norm": lambda w, x: x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ w,
    "exponential": lambda w, x: jnp.exp(90 - 100 * jnp.abs(x @ w)),
    "power": lambda w, x: jnp.abs(x) ** -1.5 @ w,
    "where": lambda w, x: jnp.where(x > 0, 1 / x, 0) @ w,
    # These mix rows, or know which row they are in.
    "attention": attention,
    "normalised": lambda w, x: (x - x.mean(0)) / (x.std(0) + 1e-6) @ w,
    "row numbers": lambda w, x: x @ w / jnp.arange(x.shape[0])[:, None].clip(1),
    "reversed": lambda w, x: x[::-1] @ w + x,
    "cumulative": lambda w, x: jnp.cumsum(x @ w, 0),
    "sorted": lambda w, x: jnp.sort(x @ w, 0),
    "all but one": lambda w, x: jnp.concatenate([x[1:] @ w, x[:1]]),
    "of products": lambda w, x: x @ (x.T @ x) @ w,
    "scattered": lambda w, x: (x @ w).at[jnp.argsort(x[:, 0])].add(x),
    "gathered": lambda w, x: x[jnp.argsort(x[:, 0])] @ w,
}

SPECIAL: dict[str, Callable[[Any, Any], Any]] = {
    "finite": lambda w, x: None,
    "a zero row": lambda w, x: x.__setitem__(-1, 0),
    "nan": lambda w, x: x.__setitem__((-1, 0), np.nan),
    "inf": lambda w, x: x.__setitem__((-1, -1), np.inf),
    "an infinite weight": lambda w, x: w.__setitem__((1, 2), np.inf),
    "a weight of nan": lambda w, x: w.__setitem__((0, 0), np.nan),
    "large weights": lambda w, x: w.__imul__(np.float32(1e9)),
}


def same(one: Any, other: Any) -> None:
    """Finite numbers are the same, and what is not finite is so on both sides."""
    for got, want in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        got, want = np.asarray(got), np.asarray(want)
        real = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(got), real)
        scale = np.abs(want[real]).max(initial=0)
        np.testing.assert_allclose(got[real], want[real], rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name: str) -> None:
    fn = gradients(LAYERS[name])
    executor = BucketedExec(fn, dynamic_axes=(None, "n, _")).with_pow2(min=8)
    exact, rng = jax.jit(fn), np.random.default_rng(4)
    for n in (5, 1, 8):
        for special in SPECIAL.values():
            w, x = WEIGHTS.copy(), rng.standard_normal((n, 4)).astype(np.float32)
            special(w, x)
            same(executor(w, x), exact(w, x))
    assert executor.stats().fallback_calls == 0
    checked = BucketedExec(fn, dynamic_axes=(None, "n, _"), check=Check.POISON).with_pow2(min=8)
    checked(WEIGHTS, np.ones((5, 4), np.float32))


# An expert fills the cotangent of the loss; the input repeats; a softmax has scores.
FILLS = {"dense": 3, "relu": 3, "reciprocal": 3, "norm": 3, "attention": 6, "sorted": 9}


@pytest.mark.parametrize("name", FILLS)
def test_fills(name: str) -> None:
    fn = gradients(LAYERS[name])
    plain = str(jax.make_jaxpr(fn)(WEIGHTS, np.ones((8, 4), np.float32)))
    masked = str(masked_jaxpr(fn, "4, 4", "n, 4", padding=0))
    assert masked.count("select_n") - plain.count("select_n") <= FILLS[name]


def recurrent(x: Any, w: Any) -> Any:
    def step(h: Any, now: Any) -> Any:
        h = jnp.tanh(now @ w + h @ w)
        return h, h

    return jax.lax.scan(step, jnp.zeros((x.shape[0], 4)), x.swapaxes(0, 1))[1]


def unlike(x: Any, w: Any) -> Any:
    """What is carried repeats at first, and then does not."""

    def step(h: Any, now: Any) -> Any:
        return h @ w + now + jnp.arange(x.shape[0])[:, None], h

    return jax.lax.scan(step, jnp.zeros((x.shape[0], 4)), x.swapaxes(0, 1))[1]


@pytest.mark.parametrize("fn", [recurrent, unlike])
@pytest.mark.parametrize("spec", ["b, _, _", "b, s, _"])
def test_loops(fn: Callable[[Any, Any], Any], spec: str) -> None:
    whole = jax.value_and_grad(lambda w, x: (fn(x, w) ** 2).mean(), (0, 1))
    executor = BucketedExec(whole, dynamic_axes=(None, spec)).with_pow2(min=8)
    exact, rng = jax.jit(whole), np.random.default_rng(4)
    for n in (5, 1):
        for special in SPECIAL.values():
            w, x = WEIGHTS.copy() / 8, rng.standard_normal((n, 3, 4)).astype(np.float32)
            special(w, x)
            same(executor(w, x), exact(w, x))
    assert executor.stats().fallback_calls == 0
