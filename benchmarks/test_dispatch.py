"""What a warm call costs, beside what an expert writes by hand for the same bucket.

Run with ``make bench``. Each group is one question; compare the rows of a group with each other,
not with another run: machines are noisy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec

SIZE, BUCKET, WIDTH = 5, 8, 512


def tiny(x: Any) -> Any:
    return jnp.sin(x) + 1


@jax.jit
def tiny_by_hand(n: Any, x: Any) -> Any:
    """The expert's masked function: zeros where there is padding."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, (BUCKET, 1), 0) < n, tiny(x), 0)


def by_hand(x: np.ndarray) -> jax.Array:
    padded = np.zeros((BUCKET, WIDTH), np.float32)
    padded[: len(x)] = x
    out = tiny_by_hand(np.int32(len(x)), padded)
    return jax.device_put(np.asarray(out)[: len(x)])


def _wait(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(fn(*args))


@pytest.mark.parametrize("way", ["by hand", "bucketjit"])
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_tiny_function(benchmark: Any, way: str, kind: str) -> None:
    benchmark.group = f"f(x: (b, {WIDTH})), {kind} in, size {SIZE} in a bucket of {BUCKET}"
    host = np.ones((SIZE, WIDTH), np.float32)
    x = host if kind == "numpy" else jnp.asarray(host)
    fn = by_hand if way == "by hand" else BucketedExec(tiny).with_pow2()
    result = benchmark(_wait(fn, x))
    np.testing.assert_allclose(result, np.sin(host) + 1, rtol=1e-5)


@pytest.mark.parametrize("way", ["jit", "bucketjit"])
def test_size_is_the_bucket(benchmark: Any, way: str) -> None:
    benchmark.group = "size == bucket"
    x = np.ones((BUCKET, WIDTH), np.float32)
    fn = jax.jit(tiny) if way == "jit" else BucketedExec(tiny).with_pow2()
    result = benchmark(_wait(fn, x))
    np.testing.assert_allclose(result, np.sin(x) + 1, rtol=1e-5)


@pytest.mark.parametrize("leaves", [100, 400])
@pytest.mark.parametrize("way", ["jit", "bucketjit"])
def test_parameter_leaves(benchmark: Any, way: str, leaves: int) -> None:
    benchmark.group = f"training step with {leaves} parameter leaves"

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p: p + 1e-6, params), x.sum()

    params = {f"p{i}": jnp.ones(4) for i in range(leaves)}
    size = BUCKET if way == "jit" else SIZE
    fn = jax.jit(step) if way == "jit" else BucketedExec(step).with_pow2()
    _, total = benchmark(_wait(fn, params, np.ones((size, WIDTH), np.float32)))
    assert float(total) == size * WIDTH
