"""How much padding a strategy makes, and how many buckets: ``python -m benchmarks.waste``."""

from __future__ import annotations

import numpy as np

from benchmarks import encoder
from benchmarks.sections import Column, Options, Row, Section, print_sections
from bucketjit import strategies

STRATEGIES = (
    strategies.Exact(),
    strategies.Pow2(),
    strategies.Pow2(min=16),
    strategies.Linear(16),
    strategies.Linear(64),
    strategies.Exponential(1.2, min=16),
    strategies.Exponential(1.4, min=16),
)


def _sizes(calls: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(0)
    return {
        "lognormal lengths, as in the stream": [s for _, s in encoder.draw_sizes(calls)],
        "batches of 1 to 256, all equally often": rng.integers(1, 257, calls).tolist(),
        "batches of 64 and a last one of 5": ([64] * 22 + [5]) * (calls // 23),
    }


def by_strategy(options: Options) -> list[Row]:
    """Buckets and padding of each strategy on each kind of sizes."""
    found: list[Row] = []
    for what, sizes in _sizes(1000).items():
        for strategy in STRATEGIES:
            buckets = [strategy.bucket(n) for n in sizes]
            found.append(
                {
                    "what": what,
                    "strategy": repr(strategy),
                    "buckets": len(set(buckets)),
                    "padding": 1 - sum(sizes) / sum(buckets),
                }
            )
    return found


SECTIONS = (
    Section(
        "waste",
        "Padding by strategy",
        "The buckets that 1,000 sizes need, and how much of all that is computed is padding, "
        "along one axis.",
        (
            Column("strategy", "strategy"),
            Column("buckets", "buckets", "d"),
            Column("padding", "padding", ".0%"),
        ),
        "benchmarks.waste:by_strategy",
        group="what",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
