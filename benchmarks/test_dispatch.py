"""Micro-costs of a warm call by pytest-benchmark: ``pytest benchmarks --benchmark-only``.

The page has the same in turn, as paired ratios (`benchmarks.dispatch`); here single calls can be
profiled and compared between two checkouts (``--benchmark-save``, ``--benchmark-compare``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from benchmarks.dispatch import WIDTH, Expert, tiny

SIZE = 5


def _measure(benchmark: Any, call: Any, *args: Any) -> None:
    jax.block_until_ready(call(*args))  # compiled before the first round is timed
    benchmark(lambda: jax.block_until_ready(call(*args)))


@pytest.mark.parametrize("out", ["numpy", "padded", "jax"])
@pytest.mark.parametrize("kind", ["numpy", "jax"])
@pytest.mark.parametrize("way", ["by hand", "bucketjit"])
def test_tiny_function(benchmark: Any, way: str, kind: str, out: str) -> None:
    benchmark.group = f"(b, {WIDTH}), {kind} in, {out} out"
    host = np.ones((SIZE, WIDTH), np.float32)
    expert = Expert()
    by_hand = {"numpy": expert.numpy, "padded": expert.padded, "jax": expert.jax_by_slice}
    call = by_hand[out] if way == "by hand" else bucketjit.jit(tiny, out=out, buckets="pow2")
    _measure(benchmark, call, host if kind == "numpy" else jnp.asarray(host))


@pytest.mark.parametrize("way", ["jit", "bucketjit"])
def test_size_is_the_bucket(benchmark: Any, way: str) -> None:
    benchmark.group = "size == bucket"
    call = jax.jit(tiny) if way == "jit" else bucketjit.jit(tiny, buckets="pow2")
    _measure(benchmark, call, jnp.ones((8, WIDTH)))
