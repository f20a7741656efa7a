"""``jax.random.permutation`` and ``shuffle`` along an axis of symbolic size."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.patch import patch


@patch(names.module("random.core"), "_shuffle")
def _shuffle(original: Any, key: Any, x: Any, axis: int) -> Any:
    """The number of rounds is found by comparisons of sizes, which become guards.

    JAX shuffles in rounds, one more for each power of the size, and asks for a Python int to count
    them. Since random.core, 0.1. Until jax.random.permutation takes an axis of symbolic size.
    """
    if not is_symbolic_dim(x.size):
        return original(key, x, axis)
    rounds = 0
    # Each comparison is decided by the sizes of the call, and kept as a guard.
    while x.size > _largest_shuffled_in(rounds):
        rounds += 1
    for _ in range(rounds):
        key, subkey = jax.random.split(key)
        _, x = jax.lax.sort_key_val(jax.random.bits(subkey, x.shape, np.uint32), x, axis)
    return x


def _of_numbers(original: Any, key: Any, x: Any, *more: Any, **options: Any) -> Any:
    """A symbolic count becomes an array of numbers. Since random.core, 0.1. Until `_shuffle`."""
    return original(key, jax.numpy.arange(x) if is_symbolic_dim(x) else x, *more, **options)


@functools.lru_cache(maxsize=64)
def _largest_shuffled_in(rounds: int) -> int:
    """The largest size that JAX shuffles in at most this many rounds."""

    def needed(size: int) -> int:  # the formula of `jax.random.permutation`
        return int(np.ceil(3 * np.log(max(1, size)) / np.log(np.iinfo(np.uint32).max)))

    low, high = 1, 1 << 62
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= rounds else (low, middle)
    return low


SHUFFLES = (
    _shuffle,
    patch(jax.random, "permutation", everywhere=True)(_of_numbers),
    patch(jax.random, "choice", everywhere=True)(_of_numbers),
)
