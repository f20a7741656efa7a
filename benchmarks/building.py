"""What building a bucket costs, XLA's compile aside, by the size of the program.

Run with ``python benchmarks/building.py``. Compares walking and lowering the traced program at
padded sizes with ``jax.jit(fn).lower`` of the same shapes. The ratio should stay flat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._dims import BucketSizes
from bucketjit._interpret import interpret
from bucketjit._trace import Leaf, trace
from bucketjit.rules import default_rules

EQUATIONS_PER_STEP = 10


def program_of(equations: int) -> Callable[[Any, Any], Any]:
    """A function of about this many equations: matmuls, softmaxes, elementwise work."""

    def fn(x: Any, w: Any) -> Any:
        for _ in range(equations // EQUATIONS_PER_STEP):
            h = jnp.tanh(x @ w)
            h = h - jax.lax.reduce_max(h, (0,))
            h = jnp.exp(h)
            x = x + h / jax.lax.reduce_sum(h, (0,))
        return x

    return fn


def measure(equations: int, rounds: int) -> tuple[int, float, float]:
    """Number of equations, and the best seconds of lowering and of masking plus lowering."""
    fn = program_of(equations)
    x, w = np.ones((16, 8), np.float32), np.ones((8, 8), np.float32)
    _, tree = jax.tree_util.tree_flatten(((x, w), {}))
    leaves = [Leaf("x", ("b", 8), x.dtype), Leaf("w", (8, 8), w.dtype)]
    program = trace(fn, tree, leaves, {"b": 11})
    rules = default_rules()
    plain, ours = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.jit(lambda *a: fn(*a)).lower(x, w)
        plain.append(time.perf_counter() - began)

        def masked(n: Any, *args: Any) -> Any:
            at = BucketSizes({"b": 16}, program.lower, {"b": n})
            return interpret(program.jaxpr, program.consts, args, at, rules)

        began = time.perf_counter()
        jax.jit(masked).lower(np.int32(11), x, w)
        ours.append(time.perf_counter() - began)
    return len(program.jaxpr.eqns), min(plain), min(ours)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"jax {jax.__version__}, best of {rounds}")
    print(f"{'equations':>10} {'jit.lower':>12} {'mask + lower':>13} {'ratio':>6}")
    for equations in (100, 300, 1000, 3000, 5000):
        count, plain, ours = measure(equations, rounds)
        print(f"{count:10} {plain * 1e3:10.1f}ms {ours * 1e3:11.1f}ms {ours / plain:6.2f}")


if __name__ == "__main__":
    main()
