"""How long plans take: the least that a user waits who has logged 100,000 calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bucketjit.strategies import fit

CALLS, DISTINCT = 100_000, 10_000


def sizes() -> np.ndarray[Any, Any]:
    """Each of the distinct sizes at least once, small ones more often."""
    rng = np.random.default_rng(0)
    often = np.minimum(rng.lognormal(7, 1, CALLS - DISTINCT).astype(int) + 1, DISTINCT)
    return np.concatenate([often, np.arange(1, DISTINCT + 1)])


@pytest.mark.parametrize("k", [8, 32])
@pytest.mark.parametrize("cost", ["size", "function"])
def test_one_variable(benchmark: Any, k: int, cost: str) -> None:
    benchmark.group = f"{CALLS} calls of {DISTINCT} sizes"
    function = None if cost == "size" else lambda n: 100 + n * n
    plan = benchmark.pedantic(fit, (sizes(), k), {"cost": function}, rounds=3)
    assert len(plan.boundaries) == k


@pytest.mark.parametrize("k", [8, 32])
def test_two_variables(benchmark: Any, k: int) -> None:
    benchmark.group = "batch and length, 10,000 calls"
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 10_000).astype(int) + 1
    seen = {"b": np.maximum(1, 8192 // lengths), "s": lengths}
    benchmark.pedantic(fit, (seen, k), rounds=3)
