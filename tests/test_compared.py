"""Values that are compared with themselves, or with what was chosen among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Check, Fallback, _jax
from bucketjit._compared import compared

Function = Callable[[Any], Any]

SIZES = (3, 8, 20)
WIDTH = 129  # whole vectors, and one element beyond
SCALES = np.random.default_rng(9).standard_normal(WIDTH).astype(np.float32)


def centred(x: Any) -> Any:
    return x - x.mean(0) * 0.7


def numbered(x: Any) -> Any:
    return x + jnp.arange(x.shape[0])[:, None] * 0.1


def normalised(x: Any) -> Any:
    centre = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
    return centre * SCALES[: x.shape[1]] + 0.3


def of_a_column(fn: Function) -> Function:
    return lambda x: fn(centred(x)[:, 0])


def beside(y: Any) -> Any:
    """Where the largest are, found by their position."""
    return jnp.take_along_axis(y, jnp.argmax(y, 0)[None], 0)[0] == y.max(0)


def in_segments(x: Any) -> Any:
    y, segment = x * 0.3 + SCALES[: x.shape[1]], jnp.arange(x.shape[0]) // 3
    return jax.ops.segment_max(y, segment, num_segments=x.shape[0]).clip(-99, 99).sum()


def in_a_branch(x: Any) -> Any:
    def smallest(x: Any) -> Any:
        return (centred(x) <= centred(x).min(0)).sum(0)

    def largest(x: Any) -> Any:
        return (centred(x) >= centred(x).max(0)).sum(0)

    return lax.cond(x.sum() > 0, largest, smallest, x)


def while_it_grows(x: Any) -> Any:
    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        i, x = state
        return i + 1, x + (centred(numbered(x)) >= centred(numbered(x)).max(0))

    return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]


def in_a_loop(x: Any) -> Any:
    def step(total: Any, row: Any) -> tuple[Any, None]:
        y = (x - row) * 0.7 + x * 0.1
        return total + (y == y.max(0)), None

    return lax.scan(step, jnp.zeros(x.shape, int), x)[0]


def scattered(x: Any) -> Any:
    at = jnp.arange(x.shape[0]) % 3
    return jnp.full((3, x.shape[1]), -9.0).at[at].max(x * 0.3 + 0.2).sum()


CHOSEN: dict[str, Function] = {
    **{
        f"gradient of a maximum, {fn.__name__}": jax.grad(lambda x, fn=fn: fn(x).max(0).sum())
        for fn in (centred, numbered, normalised)
    },
    "gradient of a minimum": jax.grad(lambda x: numbered(x).min(0).sum()),
    "gradient in segments": jax.grad(in_segments),
    "gradient of what is scattered": jax.grad(scattered),
    "gradient in rows": jax.grad(lambda x: jax.vmap(lambda r: (r * 0.3 + 0.1).max())(x).sum()),
    "gradient of an infinity norm": jax.grad(
        lambda x: jnp.linalg.norm(x * 0.3 + 0.1, jnp.inf, axis=0).sum()
    ),
    "gradient, recomputed": jax.grad(jax.checkpoint(lambda x: centred(x).max(0).sum())),
    "equal": lambda x: (centred(x) == centred(x).max(0)).sum(0),
    "not below": lambda x: (lambda y: jnp.where(y >= y.max(0), y, 0))(centred(x)),
    "up to the median": lambda x: (lambda y: (y <= jnp.median(y, 0)).sum(0))(centred(x)),
    "at its position": lambda x: beside(centred(x)),
    "each twice": of_a_column(lambda y: jnp.unique(jnp.concatenate([y, y]), size=9)),
    "the next one": of_a_column(lambda y: (jnp.sort(y[1:]) != y[:-1]).sum()),
    "with all others": of_a_column(lambda y: (y[:, None] >= y[None]).sum(1)),
    "root of the difference": lambda x: (lambda y: jnp.sqrt(y.max(0) - y))(centred(x)),
    "sign of the difference": lambda x: (lambda y: jnp.sign((y - y.max(0)) * 2))(centred(x)),
    "logarithm of the difference": lambda x: (lambda y: jnp.log(y.max(0) - y + 1e-30))(centred(x)),
    "in a loop": in_a_loop,
    "in a branch": in_a_branch,
    "while it grows": while_it_grows,
}

OTHERS: dict[str, Function] = {
    "softmax": lambda x: jax.nn.softmax(centred(x), 0),
    "gradient of a softmax": jax.grad(lambda x: jax.nn.log_softmax(centred(x))[:, 0].sum()),
    "gradient of a normalisation": jax.grad(lambda x: normalised(x).sum()),
    "gradient of a relu": jax.grad(lambda x: jax.nn.relu(centred(x)).sum()),
    "gradient of a maximum with 0": jax.grad(lambda x: jnp.maximum(centred(x), 0).sum()),
    "maximum of an argument": jax.grad(lambda x: x.max(0).sum()),
    "maximum of a product": jax.grad(lambda x: (x @ x.T).max(0).sum()),
    "labels": lambda x: (jnp.argmax(centred(x), 1) == jnp.arange(x.shape[0])).sum(),
    "a bound": lambda x: jnp.where(centred(x) > 0.5, 1, 0).sum(),
    "largest alone": lambda x: centred(x).max(0),
    "where it is NaN": lambda x: jnp.where(jnp.isnan(centred(x)), 0, centred(x)).sum(),
    "what a loop is given is in memory": of_a_column(lambda y: jnp.searchsorted(jnp.sort(y), y)),
}


@pytest.mark.parametrize("name", [*CHOSEN, *OTHERS])
def test_which_are_known(name: str) -> None:
    fn = CHOSEN.get(name) or OTHERS[name]
    jaxpr, _ = _jax.open_jaxpr(jax.make_jaxpr(fn)(np.ones((5, 8), np.float32)))
    assert bool(compared(_jax.without_dead_code(jaxpr))) is (name in CHOSEN)


@pytest.mark.parametrize("name", CHOSEN)
def test_they_are_computed_once(name: str) -> None:
    """As where each operation runs by itself."""
    fn = CHOSEN[name]
    bucketed = BucketedExec(fn, dynamic_axes="b, _", fallback=Fallback.ERROR).with_pow2()
    for n in SIZES:
        x = np.random.default_rng(0).standard_normal((n, WIDTH)).astype(np.float32)
        with jax.disable_jit():
            want = fn(jnp.asarray(x))
        np.testing.assert_allclose(bucketed(x), want, rtol=2e-3, atol=2e-3)


def test_a_derivative_of_the_executor_finds_the_largest() -> None:
    def loss(x: Any) -> Any:
        return centred(x).max(0).sum()

    bucketed = BucketedExec(loss, dynamic_axes="b, _", fallback=Fallback.ERROR).with_pow2()
    for n in (1, *SIZES):
        x = np.random.default_rng(n).standard_normal((n, WIDTH)).astype(np.float32)
        want = jax.grad(loss)(x)
        np.testing.assert_allclose(jax.grad(bucketed)(x), want, atol=1e-5)
        both = jnp.stack([x, -x])
        rows = jax.vmap(jax.grad(bucketed))(both)
        np.testing.assert_allclose(rows, jax.vmap(jax.grad(loss))(both), atol=1e-5)


def test_poison_does_not_reach_them() -> None:
    fn = CHOSEN["gradient of a maximum, numbered"]
    x = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)
    checked = BucketedExec(fn, dynamic_axes="b, _", fallback=Fallback.ERROR, check=Check.POISON)
    np.testing.assert_allclose(checked.with_pow2()(x), fn(x), atol=1e-5)


@pytest.mark.parametrize("name", ["gradient of a maximum, normalised", "at its position"])
def test_a_check_does_not_blame_a_bucket_for_what_jit_gets_wrong(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fn = CHOSEN[name]
    x = np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32)
    with jax.disable_jit():
        want = fn(jnp.asarray(x))
    wrong = not np.allclose(jax.jit(fn)(x), want, rtol=2e-3, atol=2e-3)
    for check in (Check.EXACT, Check.EXACT_ALWAYS):
        checked = BucketedExec(fn, dynamic_axes="b, _", fallback=Fallback.ERROR, check=check)
        caplog.clear()
        np.testing.assert_allclose(checked.with_pow2()(x), want, rtol=2e-3, atol=2e-3)
        assert any("one operation at a time" in r.getMessage() for r in caplog.records) == wrong


def test_nan_and_infinity_pass() -> None:
    def fn(x: Any) -> Any:
        y = centred(x)
        return jnp.where(y >= y.max(0), y, -1)

    bucketed = BucketedExec(fn, dynamic_axes="b, _", fallback=Fallback.ERROR).with_pow2()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32))
    x = x.at[2, 3].set(jnp.nan).at[4, 5].set(jnp.inf).at[0, 6].set(-jnp.inf)
    np.testing.assert_allclose(bucketed(x), fn(x), rtol=1e-5)
