"""Generation, a token a call, with caches that grow by one: ``python -m benchmarks.generation``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bucketjit
from benchmarks.encoder import HEADS, WIDTH, draw_weights
from benchmarks.sections import Column, Options, Row, Section, print_sections

LAYERS, LARGEST = 1, 512
# From which length to which: the first passes the edges of two buckets, the second that of one.
SPANS, QUICK_SPANS = ((16, 48), (112, 144), (480, 504)), ((6, 10),)
ROUNDS, QUICK_ROUNDS = 15, 1

JIT, BY_HAND = "jax.jit, each length compiled", "by hand: a cache of 512, masked"
PADDED, DONATED = "bucketjit, out=padded", "bucketjit, out=padded, donated"
JAX, NUMPY, JIT_NUMPY = "bucketjit, out=jax", "bucketjit, out=numpy", "jax.jit, NumPy"

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def _norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def _decode(
    weights: Any, tokens: Any, at: Any, caches: Any, write: Callable[[Any, Any], Any], real: Any
) -> tuple[Any, Any]:
    """The next tokens, and the caches that ``write`` makes of the old ones and of a new row."""
    x = weights["tokens"][tokens] + weights["positions"][at]
    grown = []
    for layer, (k, v) in zip(weights["layers"], caches, strict=True):
        qkv = (_norm(x) @ layer["qkv"]).reshape(len(x), 3, HEADS, WIDTH // HEADS)
        k, v = write(k, qkv[:, None, 1]), write(v, qkv[:, None, 2])
        scores = jnp.einsum("bhd,bshd->bhs", qkv[:, 0], k) / (WIDTH // HEADS) ** 0.5
        if real is not None:
            scores = jnp.where(real, scores, -jnp.inf)
        mixed = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(len(x), WIDTH) @ layer["out"]
        x = x + jax.nn.gelu(_norm(x) @ layer["up"]) @ layer["down"]
        grown.append((k, v))
    return jnp.argmax(_norm(x) @ weights["tokens"].T, -1).astype(jnp.int32), grown


def step(weights: Any, tokens: Any, caches: Any) -> tuple[Any, Any]:
    """A call of the model as people write it first: a row is joined to each cache."""

    def write(cache: Any, row: Any) -> Any:
        return jnp.concatenate([cache, row], axis=1)

    return _decode(weights, tokens, caches[0][0].shape[1], caches, write, None)


def step_by_hand(weights: Any, tokens: Any, state: Any) -> tuple[Any, Any]:
    """The same with caches of the largest length, and a mask by position."""
    at, caches = state

    def write(cache: Any, row: Any) -> Any:
        return jax.lax.dynamic_update_slice_in_dim(cache, row, at, axis=1)

    real = jnp.arange(caches[0][0].shape[1]) <= at
    tokens, caches = _decode(weights, tokens, at, caches, write, real)
    return tokens, (at + 1, caches)


def _bucketed(out: str, **options: Any) -> Step:
    axes = (None, None, "_, s, ...")
    return bucketjit.jit(step, dynamic_axes=axes, buckets="pow2", out=out, **options)


def _generation(name: str, fn: Step, weights: Any, batch: int, span: Sequence[int]) -> Any:
    """A function that generates from the first length to the last, and returns the tokens."""
    first, last = span
    rng = np.random.default_rng(0)
    shape = (batch, first, HEADS, WIDTH // HEADS)
    caches = [
        tuple(rng.standard_normal(shape).astype(np.float32) for _ in "kv") for _ in range(LAYERS)
    ]
    tokens = np.arange(batch, dtype=np.int32)

    def generate() -> np.ndarray:
        state: Any = caches
        if name == BY_HAND:
            room = [(0, 0), (0, LARGEST - first), (0, 0), (0, 0)]
            state = np.int32(first), jax.tree.map(lambda x: jnp.asarray(np.pad(x, room)), caches)
        elif name not in (NUMPY, JIT_NUMPY):
            state = jax.tree.map(jnp.asarray, caches)
        found: Any = tokens
        every = []
        for _ in range(first, last):
            found, state = fn(weights, found, state)
            if name == JIT_NUMPY:
                found, state = jax.tree.map(np.asarray, (found, state))
            every.append(found)
        return np.stack(jax.block_until_ready(every), 1)

    return generate


def generations(options: Options) -> list[Row]:
    """Warm generations of some lengths, those of a round one after the other."""
    weights = jax.tree.map(jnp.asarray, draw_weights(LAYERS))
    given = {"donate_argnums": 2}
    exact = jax.jit(step)
    ways: dict[str, Step] = {
        JIT: exact,
        PADDED: _bucketed("padded"),
        DONATED: _bucketed("padded", **given),
        JAX: _bucketed("jax"),
        JIT_NUMPY: exact,
        NUMPY: _bucketed("numpy"),
        BY_HAND: jax.jit(step_by_hand, **given),
    }
    found: list[Row] = []
    spans = QUICK_SPANS if options.quick else SPANS
    for batch in (1,) if options.quick else (1, 8):
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        times = {name: np.zeros(rounds) for name in ways}
        for span in spans:
            calls = {n: _generation(n, fn, weights, batch, span) for n, fn in ways.items()}
            tokens = [call() for call in calls.values()]
            assert all(np.array_equal(tokens[0], other) for other in tokens)
            for call in calls.values():
                call()
            for i in range(rounds):
                for name in calls if i % 2 else reversed(list(calls)):
                    began = time.perf_counter()
                    calls[name]()
                    times[name][i] += time.perf_counter() - began
        for name, each in times.items():
            to = JIT_NUMPY if name in (JIT_NUMPY, NUMPY) else JIT
            calls_made = sum(last - first for first, last in spans)
            us, ratio = median(each) / calls_made * 1e6, median(each / times[to])
            found.append({"batch": f"Batch {batch}", "way": name, "us": us, "ratio": ratio})
    return found


SECTIONS = (
    Section(
        "generation",
        "Generation",
        f"A token a call, by a transformer of a layer of {WIDTH}, whose caches grow by "
        "one: lengths 16 to 48, 112 to 144 and 480 to 504. All is compiled before. *Ratio* is the "
        "median of the paired ratios to `jax.jit` at exact shapes; where results are NumPy arrays, "
        "to `jax.jit` with such results.",
        (
            Column("way", "way"),
            Column("us", "p50 of a call, us", ".0f"),
            Column("ratio", "ratio", ".3f"),
        ),
        "benchmarks.generation:generations",
        group="batch",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
