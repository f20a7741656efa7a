"""Sums whose padding is known to add nothing are not filled, and all others are."""

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

    return jax.value_and_grad(lambda w, x: (layer(w, layer(w, layer(w, x))) ** 2).mean(), (0, 1))


def attention(w: Any, x: Any) -> Any:
    return jax.nn.softmax((x @ w) @ x.T / 2) @ (x @ w) + x


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "dense": lambda w, x: jax.nn.gelu(x @ w),
    "relu": lambda w, x: jax.nn.relu(x @ w + w[0]),
    # Of zeros these are infinite or NaN, and so are their derivatives.
    "reciprocal": lambda w, x: (1 / x) @ w,
    "logarithm": lambda w, x: jnp.log(jnp.abs(x)) @ w,
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


@pytest.mark.sampled(2)
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
FILLS = {"dense": 3, "relu": 6, "reciprocal": 3, "norm": 3, "attention": 6, "sorted": 9}


@pytest.mark.parametrize("name", FILLS)
def test_fills(name: str) -> None:
    fn = gradients(LAYERS[name])
    plain = str(jax.make_jaxpr(fn)(WEIGHTS, np.ones((8, 4), np.float32)))
    masked = str(masked_jaxpr(fn, "4, 4", "n, 4", padding=0))
    assert masked.count("select_n") - plain.count("select_n") <= FILLS[name]


def cross_entropy(w: Any, x: Any, labels: Any) -> Any:
    """A training step of a classifier: labels choose where cotangents are scattered."""

    def loss(w: Any) -> Any:
        out = jax.nn.relu(jax.nn.relu(x @ w) @ w) @ w
        picked = jnp.take_along_axis(out, labels[:, None], -1)[:, 0]
        return (jax.nn.logsumexp(out, -1) - picked).mean()

    return jax.value_and_grad(loss)(w)


def test_a_training_step_fills_its_input_the_loss_and_its_cotangent() -> None:
    executor = BucketedExec(cross_entropy, dynamic_axes=(None, "n, _", "n")).with_pow2(min=8)
    exact, rng = jax.jit(cross_entropy), np.random.default_rng(4)
    for n in (5, 1, 8):
        for special in SPECIAL.values():
            w, x = WEIGHTS.copy(), rng.standard_normal((n, 4)).astype(np.float32)
            special(w, x)
            labels = rng.integers(0, 4, n)
            same(executor(w, x, labels), exact(w, x, labels))
    selects = [
        fn.lower(w, x, labels).as_text().count("stablehlo.select") for fn in (executor, exact)
    ]
    assert selects[0] - selects[1] <= 3


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


@pytest.mark.sampled(2)
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


def _unlikely(counts: Any, p: Any) -> Any:
    ll = jnp.sum(counts[:, None, :] * jnp.log(p), axis=(0, 2))
    return jax.nn.softmax(ll), jnp.argmax(ll), jax.nn.softmax((counts @ jnp.log(p).T).sum(0))


def _by_zero(x: Any, s: Any) -> Any:
    total = jnp.sum(x * jnp.log(s))
    return jnp.exp(total), jnp.clip(total, -1e6), jnp.sum(x / s)


def _forces(p: Any, m: Any) -> Any:
    squares = ((p[:, None] - p[None]) ** 2).sum(-1)
    w = jnp.fill_diagonal(m[:, None] * m / squares, 0.0, inplace=False)
    return w @ p, w.sum(1), w.sum()


def _overwritten(x: Any, y: Any) -> Any:
    h = (x / y[:, None]).at[0].set(0.0)
    return h.T @ x, h.T @ h, jnp.exp(x).T @ h


def _joined(x: Any, y: Any) -> Any:
    rows = jnp.zeros((x.shape[0], y.shape[0])), jnp.ones((1, y.shape[0]))
    return (y / jnp.concatenate(rows).sum(0)).sum()


def _permuted(p: Any, v: Any, y: Any) -> Any:
    n, k = y.shape[0], p.shape[0]

    def one(i: Any, v: Any) -> Any:
        return jnp.full(k, jnp.nan).at[i].set(v, unique_indices=True)

    rows = jax.vmap(one)(jnp.broadcast_to(p, (n, k)), jnp.broadcast_to(v, (n, k)))
    return rows.T @ y


def _inverse(d: Any, y: Any) -> Any:
    return 1 / ((1 / d) @ y[:, 0]), y.T @ (1 / d), (y**2).T @ (1 / d), y.T @ (1 / d**2)


def _divided(x: Any, s: Any) -> Any:
    e = jnp.exp(x - x.max())
    p = e / jnp.where(s > 0, e.sum(), s)
    rows = jax.lax.map(lambda s: (x / s) @ x, s[None])
    return p @ x, p.sum(), p @ e, (p * x) @ x, (x / s) @ x, rows


_ROWS = np.random.default_rng(3).normal(size=(5, 3)).astype(np.float32)
_P = np.array([[0.5, 0.5, 0], [0.3, 0.3, 0.4]], np.float32)
_FROM_0 = np.arange(5, dtype=np.float32)


@pytest.mark.parametrize(
    ("fn", "axes", "args"),
    [
        (_unlikely, ("n, _", None), (np.ones((5, 3), np.float32), _P)),
        (_by_zero, ("n", None), (np.ones(5, np.float32), np.float32(0))),
        (_forces, ("n, _", "n"), (_ROWS, _ROWS[:, 0] ** 2)),
        (_overwritten, ("n, _", "n"), (_ROWS, _FROM_0)),
        (_joined, ("n", "d"), (_ROWS[:, 0], _FROM_0)),
        (_permuted, (None, None, "n"), (np.array([2, 0, 1]), _ROWS[0], _ROWS[:, 1])),
        (_inverse, ("n", "n, _"), (_FROM_0, np.abs(_ROWS))),
        (_divided, ("n", None), (_ROWS[:, 0] ** 2, np.float32(0))),
    ],
)
def test_what_is_infinite_in_the_first_row_stays_as_it_is(fn: Any, axes: Any, args: Any) -> None:
    got = jax.tree.leaves(BucketedExec(fn, dynamic_axes=axes).with_pow2()(*args))
    for one, other in zip(got, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def counted_by_zeros(w: Any, x: Any) -> Any:
    """Ones that are a sum of zeros and a one: their rule fills the zeros."""
    n = x.shape[0]
    ones = jnp.concatenate([jnp.zeros((n, n)), jnp.ones((n, 1))], 1).sum(1, keepdims=True)
    return jax.value_and_grad(lambda w: ((jnp.tanh((x / ones) @ w) @ w) ** 2).mean())(w)


def picked(w: Any, x: Any) -> Any:
    """Cotangents of a softmax are scattered to column 1, never to column 0."""
    columns = jnp.ones((x.shape[0], 1), int)

    def loss(w: Any) -> Any:
        return jax.nn.softmax(x[:, 0]) @ jnp.take_along_axis(x * 0 + w[0], columns, -1)[:, 0]

    return jax.grad(loss)(w)


def overwritten(w: Any, x: Any) -> Any:
    rows = jnp.arange(x.shape[0])[::-1]
    return jax.nn.softmax(jnp.tanh(x) + x, 0).at[rows].set(0).sum(0) + w[0]


def carried(w: Any, x: Any) -> Any:
    """What a softmax exponentiates is carried, and its rows are overwritten in the next turn."""
    rows = jnp.arange(x.shape[0])

    def step(e: Any, r: Any) -> Any:
        sums = e.at[rows].set(r).sum(0), e.at[rows].set(r).T @ jnp.ones_like(x)
        return jnp.exp(x * r - (x * r).max(0)), sums

    return jax.lax.scan(step, jnp.zeros_like(x), w[0])[1]


@pytest.mark.parametrize("fn", [counted_by_zeros, picked, overwritten, carried])
def test_zeros_that_are_none(fn: Callable[[Any, Any], Any]) -> None:
    executor = BucketedExec(fn, dynamic_axes=(None, "n, _")).with_pow2(min=8)
    exact, rng = jax.jit(fn), np.random.default_rng(4)
    for n in (3, 5, 1):
        for place in ((-1, 0), (0, 0)):
            for value in (1, np.inf, np.nan):
                x = rng.standard_normal((n, 4)).astype(np.float32)
                x[place] = value
                same(executor(WEIGHTS, x), exact(WEIGHTS, x))
    assert executor.stats().fallback_calls == 0
