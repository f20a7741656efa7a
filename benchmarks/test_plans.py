"""How long plans take: the least that a user waits who has logged 100,000 calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bucketjit.strategies import Adaptive, Joint, Optimal, Pow2

CALLS, DISTINCT = 100_000, 10_000


def sizes() -> np.ndarray[Any, Any]:
    """Each of the distinct sizes at least once, small ones more often."""
    rng = np.random.default_rng(0)
    often = np.minimum(rng.lognormal(7, 1, CALLS - DISTINCT).astype(int) + 1, DISTINCT)
    return np.concatenate([often, np.arange(1, DISTINCT + 1)])


@pytest.mark.parametrize("k", [8, 32])
@pytest.mark.parametrize("cost", ["size", "function"])
def test_optimal(benchmark: Any, k: int, cost: str) -> None:
    benchmark.group = f"Optimal.fit, {CALLS} calls of {DISTINCT} sizes"
    function = None if cost == "size" else lambda n: 100 + n * n
    plan = benchmark.pedantic(Optimal.fit, (sizes(), k), {"cost": function}, rounds=3)
    assert len(plan.boundaries) == k


@pytest.mark.parametrize("fit", [Optimal.fit_joint, Joint.fit], ids=["grid", "joint"])
def test_two_variables(benchmark: Any, fit: Any) -> None:
    benchmark.group = "batch and length, 1000 calls, 12 executables"
    rng = np.random.default_rng(0)
    seen = {"b": rng.integers(1, 33, 1000), "s": rng.lognormal(4, 0.7, 1000).astype(int) + 1}
    benchmark.pedantic(fit, (seen, 12), rounds=3)


def test_observing_a_call(benchmark: Any) -> None:
    benchmark.group = "Adaptive"
    strategy = Adaptive(Pow2())
    benchmark(strategy.observe, 17)


def test_replanning(benchmark: Any) -> None:
    benchmark.group = "Adaptive"
    strategy = Adaptive(Pow2(), compile_cost=0)
    for n in (np.random.default_rng(0).lognormal(4, 0.7, 10_000).astype(int) + 1).tolist():
        strategy.observe(n)
    assert benchmark(strategy.propose) is not None
