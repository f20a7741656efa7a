"""What users of JAX do without bucketjit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders import Contender, padded, pow2_bucket
from benchmarks.contenders.jax_encoder import encode, encode_masked
from benchmarks.encoder import Sizes
from examples.compile_counter import CompileCounter

# About 450 executables of this encoder exhaust what a process may map, and XLA aborts it.
MOST_EXECUTABLES = 300


def _compiles() -> Any:
    counter = CompileCounter()
    return lambda: counter.compiles


def jit_per_shape(weights: Any, sizes: Sizes) -> Contender:
    """Plain ``jax.jit``; its caches are cleared before there are too many executables."""
    weights, compiled = jax.device_put(weights), jax.jit(encode)
    held: set[tuple[int, ...]] = set()
    clears = 0

    def run(tokens: np.ndarray) -> np.ndarray:
        nonlocal clears
        if tokens.shape not in held and len(held) == MOST_EXECUTABLES:
            jax.clear_caches()
            held.clear()
            clears += 1
        held.add(tokens.shape)
        return np.asarray(compiled(weights, tokens))

    def note() -> str:
        if not clears:
            return ""
        return f"caches cleared {clears} times, every {MOST_EXECUTABLES} shapes, or XLA aborts"

    return Contender(run, _compiles(), note)


def naive(weights: Any, sizes: Sizes) -> Contender:
    """Buckets as one writes them first: padded and cut by JAX, with the expert's mask."""
    weights, compiled = jax.device_put(weights), jax.jit(encode_masked)

    def run(tokens: np.ndarray) -> np.ndarray:
        b, s = tokens.shape
        bucket = pow2_bucket(b, s)
        x = jnp.pad(jnp.asarray(tokens), ((0, bucket[0] - b), (0, bucket[1] - s)))
        return np.asarray(compiled(weights, x, b, s)[:b, :s])

    return Contender(run, _compiles())


def pad_to_largest(weights: Any, sizes: Sizes) -> Contender:
    """One executable, for the largest batch and length of the stream."""
    largest = (max(b for b, _ in sizes), max(s for _, s in sizes))
    return _by_hand(weights, lambda b, s: largest)


def expert(weights: Any, sizes: Sizes) -> Contender:
    """Powers of two with everything by hand: the mask, NumPy's padding, a view of the result."""
    return _by_hand(weights, pow2_bucket)


def expert_without_floors(weights: Any, sizes: Sizes) -> Contender:
    """The same with every power of two from 1."""
    return _by_hand(weights, lambda b, s: (1 << (b - 1).bit_length(), 1 << (s - 1).bit_length()))


def _by_hand(weights: Any, bucket_of: Any) -> Contender:
    weights, compiled = jax.device_put(weights), jax.jit(encode_masked)

    def run(tokens: np.ndarray) -> np.ndarray:
        b, s = tokens.shape
        states = compiled(weights, padded(tokens, bucket_of(b, s)), np.int32(b), np.int32(s))
        return np.asarray(states)[:b, :s]

    return Contender(run, _compiles())
