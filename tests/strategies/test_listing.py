"""All buckets of a strategy are those that its sizes have."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketjit.strategies import (
    Boundaries,
    Exact,
    Exponential,
    Linear,
    Pow2,
    buckets_of,
)
from bucketjit.strategies.rounding import MOST_LISTED


@pytest.mark.parametrize(
    "strategy",
    [Linear(16, max=100, multiple_of=4), Exponential(1.3, max=90), Boundaries([30, 60, 90])],
    ids=repr,
)
def test_they_are_those_of_all_sizes(strategy: Any) -> None:
    buckets = buckets_of(strategy)
    assert buckets is not None
    assert buckets == tuple(sorted({strategy.bucket(n) for n in range(1, buckets[-1] + 1)}))
    with pytest.raises(ValueError, match="beyond"):
        strategy.bucket(buckets[-1] + 1)


@given(st.integers(1, 9), st.integers(1, 300), st.integers(1, 12))
def test_of_any_ladder(smallest: int, largest: int, multiple: int) -> None:
    largest = max(smallest, largest) * multiple
    strategy = Pow2(min=smallest, max=largest, multiple_of=multiple)
    of_all_sizes = {strategy.bucket(n) for n in range(1, largest + 1)}
    assert buckets_of(strategy) == tuple(sorted(of_all_sizes))


class Own:
    boundaries = (10, 20)  # whatever that means there

    def bucket(self, n: int) -> int:
        return -(-n // 10) * 10


@pytest.mark.parametrize(
    "strategy", [Pow2(), Linear(16), Exact(), Linear(1, max=MOST_LISTED + 1), Own()], ids=repr
)
def test_no_list(strategy: Any) -> None:
    assert buckets_of(strategy) is None


def test_as_many_as_there_may_be() -> None:
    assert buckets_of(Linear(1, max=MOST_LISTED)) == tuple(range(1, MOST_LISTED + 1))
