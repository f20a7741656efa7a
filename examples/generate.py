"""Generate tokens with caches that grow by one, in three ways.

    python examples/generate.py
    python examples/generate.py --tokens 200

A small transformer with random weights reads a prompt and then generates, a token a call. The keys
and values of all tokens so far are its caches.

* **jax.jit** joins a row to each cache, and compiles for each length.
* **bucketjit** runs the same function. It compiles once for each bucket, and with `out="padded"`
  each call takes the buffers of the call before as they are.
* **By hand**, the caches have their full length from the start. `dynamic_update_slice` writes a
  row, and a mask by position hides what is not written yet.

All three must generate the same tokens.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compile_counter import CompileCounter

import bucketjit

VOCABULARY, WIDTH, HEADS, LAYERS, BATCH, PROMPT = 300, 64, 4, 2, 4, 12

Caches = list[tuple[jax.Array, jax.Array]]


def draw_weights(rng: np.random.Generator, longest: int) -> dict[str, Any]:
    """Weights of the model, at random."""

    def dense(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((rows, columns)) / rows**0.5, jnp.float32)

    return {
        "tokens": dense(VOCABULARY, WIDTH) * VOCABULARY**0.5,
        "positions": dense(longest, WIDTH) * longest**0.5,
        "layers": [
            {"qkv": dense(WIDTH, 3 * WIDTH), "out": dense(WIDTH, WIDTH)} for _ in range(LAYERS)
        ],
    }


def decode(
    weights: Any, tokens: jax.Array, at: Any, caches: Caches, write: Callable[..., Any], real: Any
) -> tuple[jax.Array, Caches]:
    """The next tokens, and the caches with a row more."""
    x = weights["tokens"][tokens] + weights["positions"][at]
    grown = []
    for layer, (k, v) in zip(weights["layers"], caches, strict=True):
        q, new_k, new_v = jnp.split((x @ layer["qkv"]).reshape(len(x), 3 * HEADS, -1), 3, axis=1)
        k, v = write(k, new_k[:, None]), write(v, new_v[:, None])
        scores = jnp.einsum("bhd,bshd->bhs", q, k) / (WIDTH // HEADS) ** 0.5
        weighed = jax.nn.softmax(jnp.where(real, scores, -jnp.inf))
        mixed = jnp.einsum("bhs,bshd->bhd", weighed, v)
        x = x + jnp.tanh(mixed.reshape(x.shape) @ layer["out"])
        grown.append((k, v))
    return jnp.argmax(x @ weights["tokens"].T, -1).astype(jnp.int32), grown


def step(weights: Any, tokens: jax.Array, caches: Caches) -> tuple[jax.Array, Caches]:
    """A row is joined to each cache. Every position is real, and nothing is masked here."""
    at = caches[0][0].shape[1]
    return decode(
        weights, tokens, at, caches, lambda k, row: jnp.concatenate([k, row], axis=1), True
    )


def step_by_hand(weights: Any, tokens: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """The same with caches of the full length, of which ``at`` positions are real."""
    at, caches = state

    def write(cache: jax.Array, row: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(cache, row, at, axis=1)

    real = jnp.arange(caches[0][0].shape[1]) <= at
    tokens, caches = decode(weights, tokens, at, caches, write, real)
    return tokens, (at + 1, caches)


def main(argv: list[str] | None = None) -> int:
    """Generate in each way, and print what was compiled and how long the second time took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=40, help="tokens to generate (default: 40)")
    options = parser.parse_args(argv)
    rng, longest = np.random.default_rng(0), PROMPT + options.tokens
    weights = draw_weights(rng, longest)
    shape = (BATCH, PROMPT, HEADS, WIDTH // HEADS)
    prompt = [tuple(rng.standard_normal((2, *shape), np.float32)) for _ in range(LAYERS)]
    first = rng.integers(0, VOCABULARY, BATCH, np.int32)

    def whole() -> tuple[jax.Array, Any]:
        room = [(0, 0), (0, options.tokens), (0, 0), (0, 0)]
        return np.int32(PROMPT), jax.device_put(jax.tree.map(lambda x: np.pad(x, room), prompt))

    bucketed = bucketjit.jit(
        step,
        dynamic_axes=(None, None, "_, s, _, _"),
        buckets="pow2",
        out="padded",
        donate_argnums=2,
    )
    ways: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
        "jax.jit": (jax.jit(step), lambda: jax.device_put(prompt)),
        "bucketjit": (bucketed, lambda: jax.device_put(prompt)),
        "by hand": (jax.jit(step_by_hand, donate_argnums=2), whole),
    }
    counter = CompileCounter()
    generated: list[np.ndarray] = []
    print(f"{'way':<12}{'compiles':>8}{'first time':>12}{'second time':>13}")
    for name, (fn, begin) in ways.items():
        before, seconds = counter.compiles, []
        for _ in range(2):
            tokens, state, every = first, begin(), []
            started = time.perf_counter()
            for _ in range(options.tokens):
                tokens, state = fn(weights, tokens, state)
                every.append(tokens)
            generated.append(np.stack(jax.block_until_ready(every), axis=1))
            seconds.append(time.perf_counter() - started)
        compiles = counter.compiles - before
        print(f"{name:<12}{compiles:>8}{seconds[0]:>10.2f} s{seconds[1] * 1e3:>10.1f} ms")
    assert all(np.array_equal(generated[0], other) for other in generated)
    print(f"all ways generate the same tokens: {generated[0][0, :8].tolist()} ...")
    print(f"buckets: {sorted(bucket.sizes['s'] for bucket in bucketed.stats().buckets)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
