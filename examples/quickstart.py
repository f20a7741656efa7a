"""Quick start: compile once per bucket instead of once per shape.

    python examples/quickstart.py

`jax.jit` compiles a function anew for every shape it meets. `bucketjit.jit` takes the same
function, rounds each size up to a bucket and compiles once per bucket. The function needs no
padding and no mask: `standardize` below takes a mean and a variance over the ragged axis, where
padding that leaked in would change every number. Each result is compared with the NumPy one.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bucketjit
from bucketjit import BucketedExec, strategies

FEATURES = 4


def standardize(x: jax.Array) -> jax.Array:
    """Shift and scale every column to mean 0 and variance 1 over the rows."""
    return (x - jnp.mean(x, axis=0)) / jnp.sqrt(jnp.var(x, axis=0) + 1e-5)


def expected(x: np.ndarray) -> np.ndarray:
    """What `standardize` must return, in NumPy and at the exact shape."""
    return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5)


def feed(executor: BucketedExec, sizes: list[int], rng: np.random.Generator) -> None:
    """Call the executor with one batch of each size and check every result."""
    for size in sizes:
        batch = rng.normal(size=(size, FEATURES)).astype(np.float32)
        result = executor(batch)
        assert result.shape == batch.shape
        np.testing.assert_allclose(result, expected(batch), rtol=1e-4, atol=1e-4)


def main(argv: list[str] | None = None) -> int:
    """Feed the same batches to several strategies and print how many executables each made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--largest", type=int, default=100, help="largest batch (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data (default: 0)")
    options = parser.parse_args(argv)

    every_size = list(range(1, options.largest + 1))
    span = f"1..{options.largest}"
    runs: list[tuple[str, Any, str, list[int]]] = [
        ('"pow2"', "pow2", "3, 5, 7", [3, 5, 7]),
        ('"pow2"', "pow2", span, every_size),
        ("Linear(8)", strategies.Linear(8), span, every_size),
        ('"exact"', "exact", span, every_size),
    ]

    print(f"{'buckets=':<16}{'batches':<10}{'executables':>11}{'compiling':>11}{'padding':>9}")
    for name, buckets, label, sizes in runs:
        executor = bucketjit.jit(standardize, buckets=buckets)
        feed(executor, sizes, np.random.default_rng(options.seed))
        stats = executor.stats()
        print(
            f"{name:<16}{label:<10}{executor.cache_size():>11}"
            f"{stats.compile_seconds:>9.2f} s{stats.padding_waste:>9.0%}"
        )
    print("every result equals NumPy's at the exact shape")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
