"""What building a bucket costs, XLA's compile aside, by the size of the program.

    python -m benchmarks.building

Compares walking and lowering the traced program at padded sizes with ``jax.jit(fn).lower`` of the
same shapes. The ratio should stay flat.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring import in_turn, paired_ratio
from benchmarks.sections import Column, Options, Row, Section, print_sections
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.program import Leaf
from bucketjit._masking.interpreter import interpret
from bucketjit._masking.rules import default_rules
from bucketjit._tracing.symbolic import trace

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


def measure(equations: int, rounds: int) -> Row:
    """Seconds of lowering, and of masking and lowering."""
    fn = program_of(equations)
    x, w = np.ones((16, 8), np.float32), np.ones((8, 8), np.float32)
    _, tree = jax.tree_util.tree_flatten(((x, w), {}))
    leaves = [Leaf("x", ("b", 8), x.dtype), Leaf("w", (8, 8), w.dtype)]
    program = trace(fn, tree, leaves, {"b": 11})
    rules = default_rules()

    def plain() -> None:
        jax.jit(lambda *a: fn(*a)).lower(x, w)

    def ours() -> None:
        def masked(n: Any, *args: Any) -> Any:
            at = BucketSizes({"b": 16}, program.lower, {"b": n})
            return interpret(program.jaxpr, program.consts, args, at, rules)

        jax.jit(masked).lower(np.int32(11), x, w)

    calls = {"plain": plain, "ours": ours}
    in_turn(calls, [()])
    times = in_turn(calls, [()] * rounds)
    return {
        "equations": len(program.jaxpr.eqns),
        "plain_ms": median(times["plain"]) * 1e3,
        "ours_ms": median(times["ours"]) * 1e3,
        "ratio": paired_ratio(times, "ours", "plain"),
    }


def by_equations(options: Options) -> list[Row]:
    """A row for each size of program."""
    if options.quick:
        return [measure(equations, rounds=1) for equations in (100, 300)]
    return [measure(equations, rounds=5) for equations in (100, 300, 1000, 3000, 5000)]


SECTIONS = (
    Section(
        "building",
        "Building a bucket, by equations",
        "What comes before XLA's compile: masking the traced program and lowering it, in turn with "
        "`jax.jit(fn).lower` of the same shapes.",
        (
            Column("equations", "equations", ",d"),
            Column("plain_ms", "jit.lower, ms", ".0f"),
            Column("ours_ms", "mask and lower, ms", ".0f"),
            Column("ratio", "ratio", ".2f"),
        ),
        "benchmarks.building:by_equations",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
