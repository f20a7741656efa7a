"""``jax.random.permutation`` and ``shuffle`` along an axis of symbolic size."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Patch

_random = names.module("random.core")


def open_shuffles() -> list[Patch]:
    """Permutations of an axis of symbolic size.

    The number of rounds is found by comparisons of sizes, which become guards of the program. A
    symbolic count as an argument becomes an array of as many numbers. JAX asks for an int in both
    places (``random.core``, since 0.1).
    """
    shuffle, permutation, choice = _random._shuffle, jax.random.permutation, jax.random.choice

    @functools.wraps(shuffle)
    def open_shuffle(key: Any, x: Any, axis: int) -> Any:
        if not is_symbolic_dim(x.size):
            return shuffle(key, x, axis)
        rounds = 0
        # Each comparison is decided by the sizes of the call, and kept as a guard.
        while x.size > _largest_shuffled_in(rounds):
            rounds += 1
        for _ in range(rounds):
            key, subkey = jax.random.split(key)
            _, x = jax.lax.sort_key_val(jax.random.bits(subkey, x.shape, np.uint32), x, axis)
        return x

    @functools.wraps(permutation)
    def open_permutation(key: Any, x: Any, *more: Any, **options: Any) -> Any:
        return permutation(key, _numbers(x), *more, **options)

    @functools.wraps(choice)
    def open_choice(key: Any, a: Any, *more: Any, **options: Any) -> Any:
        return choice(key, _numbers(a), *more, **options)

    replaced = [
        (_random, "_shuffle", open_shuffle, False),
        (jax.random, "permutation", open_permutation, True),
        (jax.random, "choice", open_choice, True),
    ]
    return [
        Patch(
            owner,
            name,
            replacement,
            why="JAX shuffles in rounds, one more for each power of the size, and asks for a "
            "Python int to count them.",
            since="random.core, 0.1",
            delete_when="jax.random.permutation takes an axis of symbolic size",
            everywhere=everywhere,
        )
        for owner, name, replacement, everywhere in replaced
    ]


def _numbers(count: Any) -> Any:
    return jax.numpy.arange(count) if is_symbolic_dim(count) else count


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
