"""Strategies that go on beyond their largest bucket."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketjit.errors import BucketOverflowError, StrategyContractError
from bucketjit.strategies import (
    Boundaries,
    Exact,
    Exponential,
    Linear,
    Pow2,
    Strategy,
    checked_bucket,
)
from bucketjit.strategies.rounding import Extended
from tests.strategies.contract import check_contract


class Capped:
    """A strategy of a user's own."""

    def bucket(self, n):
        if n > 50:
            raise BucketOverflowError(n, 50)
        return -(-n // 10) * 10

    def __repr__(self):
        return "Capped()"


@pytest.mark.parametrize(
    ("strategy", "sizes", "buckets"),
    [
        (Pow2(max=64), (60, 65, 100, 129), (64, 128, 128, 256)),
        (Pow2(max=48), (40, 48, 49), (48, 48, 64)),
        (Pow2(min=4, max=48, multiple_of=6), (1, 48, 49, 70), (6, 48, 66, 132)),
        (Linear(10, max=48), (41, 49, 51), (48, 50, 60)),
        (Exponential(1.5, min=16, max=36), (36, 37, 60), (36, 54, 81)),
        (Boundaries([30, 60, 90]), (61, 91, 180, 181), (90, 180, 180, 360)),
        (Capped(), (50, 51, 101), (50, 100, 200)),
        (Exact(), (7, 1000), (7, 1000)),
        (Pow2(), (*range(5), 1000), (1, 1, 2, 4, 4, 1024)),
    ],
    ids=repr,
)
def test_it_goes_on_by_the_rule(strategy, sizes, buckets):
    assert [Extended(strategy).bucket(n) for n in sizes] == list(buckets)
    for n in range(400):
        assert checked_bucket(Extended(strategy), "b", n) == Extended(strategy).bucket(n)


STRATEGIES = st.one_of(
    st.builds(lambda n: Pow2(max=n), st.integers(1, 300)),
    st.builds(lambda s, n: Linear(s, max=n), st.integers(1, 40), st.integers(1, 300)),
    st.builds(lambda b, n: Exponential(b, max=n), st.floats(1.01, 4), st.integers(1, 300)),
    st.builds(lambda s: Boundaries(sorted(s)), st.sets(st.integers(1, 300), min_size=1)),
)


@given(STRATEGIES, st.integers(0, 2000), st.integers(0, 2000))
def test_it_keeps_the_contract_and_what_was(strategy, n, m):
    longer = Extended(strategy)
    check_contract(longer, n, m)
    try:
        assert strategy.bucket(n) == longer.bucket(n)
    except BucketOverflowError as error:
        assert longer.bucket(n) > error.largest


def test_few_buckets_hold_any_size():
    """Boundaries close together must not become a compile for each size."""
    strategy = Extended(Boundaries([18, 19, 20]))
    assert len({strategy.bucket(n) for n in range(1, 100_000)}) < 20


def test_it_is_a_strategy_like_the_others():
    strategy = Extended(Boundaries([3, 5]))
    assert isinstance(strategy, Strategy)
    assert repr(strategy) == "Extended(Boundaries([3, 5]))"
    assert strategy == pickle.loads(pickle.dumps(strategy))
    assert hash(strategy) == hash(Extended(Boundaries([3, 5])))
    with pytest.raises(StrategyContractError, match="inner must be an object with a method bucket"):
        Extended(8)
    for wrong, error in ((-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error):
            strategy.bucket(wrong)
