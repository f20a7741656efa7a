"""What counting costs: a warm call adds to tallies, a snapshot works out the rest.

Run with ``make bench``.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from bucketjit._compile.cache import Slot
from bucketjit._runtime.counters import CallCounter, Counters


def test_a_warm_call(benchmark: Any) -> None:
    """The lines of `Plan.__call__` that count."""
    benchmark.group = "counting one call"
    counters, slot = Counters(), Slot(object())
    line = CallCounter({"b": 3}, {"b": 4}, 3, 4)
    counters.open(line)

    def count() -> None:
        slot.last_used = time.monotonic()
        slot.uses.add()
        line.calls.add()

    benchmark(count)


def test_a_call_by_the_slow_path(benchmark: Any) -> None:
    benchmark.group = "counting one call"
    counters = Counters()
    benchmark(lambda: counters.call(CallCounter({"b": 3}, {"b": 4}, 3, 4)))


@pytest.mark.parametrize("shapes", [100, 16_384])
def test_a_snapshot(benchmark: Any, shapes: int) -> None:
    benchmark.group = "a snapshot"
    counters = Counters()
    lines = [CallCounter({"b": n}, {"b": 2 * shapes}, n, 2 * shapes) for n in range(shapes)]
    for line in lines:
        counters.open(line)
        line.calls.add()
    snapshot = benchmark(lambda: counters.snapshot(0, 0, 0, []))
    assert snapshot.calls == shapes
