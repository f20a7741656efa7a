"""Products with a side that is the same along one of its axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Fallback

Function = Callable[[Any], Any]

WIDTH = 256
ONES = np.ones((WIDTH, WIDTH), np.float32)
TWOS = jnp.full((WIDTH, WIDTH), 2.0)
WEIGHTS = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 16
COLUMN = np.linspace(-1, 1, WIDTH, dtype=np.float32)[:, None]


def columns() -> Any:
    return jnp.broadcast_to(jnp.asarray(COLUMN), (WIDTH, WIDTH))


def batched(x: Any) -> Any:
    y = x.reshape(-1, 4, WIDTH // 4)
    return jnp.einsum("bsd,sde->bse", y, jnp.ones((4, WIDTH // 4, WIDTH))).sum(-1)


def in_a_loop(x: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, y: y + (x @ jnp.ones((WIDTH, WIDTH))).sum(1), x[:, 0])


CONSTANT: dict[str, Function] = {
    "ones": lambda x: (x @ jnp.ones((WIDTH, WIDTH))).sum(1),
    "an array of ones": lambda x: (x @ ONES).sum(1),
    "an array of twos": lambda x: (x @ TWOS).max(1),
    "turned": lambda x: (x @ jnp.ones((WIDTH, WIDTH)).T).sum(),
    "on the other side": lambda x: (jnp.ones((WIDTH, WIDTH)) @ x.T).sum(0),
    "columns": lambda x: jnp.tanh(x @ columns()).sum(1),
    "of columns": lambda x: jnp.tanh(x @ jnp.exp(columns())).sum(1),
    "numbers of rows": lambda x: jnp.tanh(
        x @ (lax.broadcasted_iota(jnp.float32, (WIDTH, WIDTH), 0) / WIDTH)
    ).sum(1),
    "tiles": lambda x: (x @ jnp.tile(COLUMN, (1, WIDTH))).sum(1),
    "part of them": lambda x: (x[:, 3:9] @ jnp.ones((WIDTH, WIDTH))[3:9]).sum(1),
    "in a function": lambda x: jax.jit(lambda y, w: (y @ w).sum(1))(x, jnp.ones((WIDTH, WIDTH))),
    "of a function": lambda x: (x @ jax.jit(lambda: jnp.ones((WIDTH, WIDTH)))()).sum(1),
    "in a loop": in_a_loop,
    "batched": batched,
    "gradient": jax.grad(lambda x: jnp.sin(x @ jnp.ones((WIDTH, WIDTH))).sum()),
}

OTHERS: dict[str, Function] = {
    "weights": lambda x: jnp.tanh(x @ WEIGHTS).sum(1),
    "weights on the other side": lambda x: jnp.tanh(WEIGHTS @ x.T).sum(0),
    "rows": lambda x: jnp.tanh(x @ (WEIGHTS + jnp.ones((WIDTH, WIDTH)))).sum(1),
    "a vector of ones": lambda x: x @ jnp.ones(WIDTH),
    "a column of ones": lambda x: x @ jnp.ones((WIDTH, 1)),
    "itself": lambda x: jnp.tanh(x @ x.T).sum(1),
    "for all of a batch": lambda x: jnp.einsum(
        "bsd,bde->bse",
        x.reshape(-1, 4, WIDTH // 4),
        jnp.broadcast_to(WEIGHTS[:64], (x.shape[0], 64, WIDTH)),
    ).sum(-1),
    "a triangle": lambda x: (x @ jnp.tril(jnp.ones((WIDTH, WIDTH)))).sum(1) / WIDTH,
    "after a loop": lambda x: x @ lax.fori_loop(0, 2, lambda _, w: w * WEIGHTS, jnp.asarray(ONES)),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*CONSTANT, *OTHERS])
def test_results_are_those_without_padding(name: str) -> None:
    """In a bucket of 4,096 elements, where XLA's library is asked."""
    fn = CONSTANT.get(name) or OTHERS[name]
    bucketed = BucketedExec(fn, fallback=Fallback.ERROR).with_pow2(min=16)
    for n in (10, 1, 15):
        x = np.random.default_rng(n).standard_normal((n, WIDTH)).astype(np.float32)
        np.testing.assert_allclose(bucketed(x), jax.jit(fn)(x), rtol=1e-3, atol=2e-2)
