import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketjit.errors import BucketOverflowError, StrategyContractError
from bucketjit.strategies import (
    Boundaries,
    BoundedWaste,
    Exact,
    Exponential,
    Linear,
    MultipleOf,
    Optimal,
    Pow2,
    SizeClasses,
    checked_bucket,
)
from tests.strategies.contract import check_contract, sizes

LADDERS = [
    lambda **kw: Pow2(**kw),
    lambda **kw: Linear(10, **kw),
    lambda **kw: Exponential(1.4, **kw),
    lambda **kw: SizeClasses(3, **kw),
    lambda **kw: BoundedWaste(0.15, **kw),
]
multiples = st.sampled_from([1, 2, 3, 7, 8, 128])


@given(st.sampled_from(LADDERS), multiples, sizes, sizes)
def test_is_the_ladders_own_multiple_of(make, multiple, n, m):
    strategy = MultipleOf(make(), multiple)
    check_contract(strategy, n, m)
    assert strategy.bucket(n) == make(multiple_of=multiple).bucket(n)


@given(st.sampled_from(LADDERS), st.integers(1, 300), multiples, sizes, sizes)
def test_of_a_ladder_from_somewhere(make, smallest, multiple, n, m):
    strategy = MultipleOf(make(min=smallest, max=10_000), multiple)
    n, m = n % 10_001, m % 10_001
    check_contract(strategy, n, m)
    assert strategy.bucket(n) % multiple == 0


@given(st.sets(st.integers(1, 500), min_size=1), multiples, st.data())
def test_of_boundaries(boundaries, multiple, data):
    strategy = MultipleOf(Boundaries(sorted(boundaries)), multiple)
    rounded = sorted({-(-b // multiple) * multiple for b in boundaries})
    n, m = (data.draw(st.integers(0, rounded[-1])) for _ in "nm")
    check_contract(strategy, n, m)
    assert strategy.bucket(n) == min(b for b in rounded if b >= n)
    with pytest.raises(BucketOverflowError) as caught:
        strategy.bucket(rounded[-1] + 1)
    assert (caught.value.size, caught.value.largest) == (rounded[-1] + 1, rounded[-1])


@given(multiples, multiples, sizes, sizes)
def test_of_another_one_and_of_exact(one, two, n, m):
    check_contract(MultipleOf(MultipleOf(Pow2(), one), two), n, m)
    check_contract(MultipleOf(Exact(), one), n, m)
    assert MultipleOf(Exact(), one).bucket(n) == -(-n // one) * one


def test_naive_rounding_would_not_be_idempotent():
    assert -(-Pow2().bucket(4) // 3) * 3 == 6
    assert -(-Pow2().bucket(6) // 3) * 3 == 9
    assert MultipleOf(Pow2(), 3).bucket(4) == MultipleOf(Pow2(), 3).bucket(6) == 6


def test_is_a_value():
    strategy = MultipleOf(Optimal([10, 20]), np.int64(8))
    assert repr(strategy) == "MultipleOf(Optimal([10, 20]), 8)"
    assert strategy == MultipleOf(Optimal([10, 20]), 8) != MultipleOf(Optimal([10, 20]), 4)
    assert checked_bucket(strategy, "batch", 17) == 24


@pytest.mark.parametrize("inner", [Pow2, None, 8])
def test_what_is_no_strategy_is_refused(inner):
    with pytest.raises(
        StrategyContractError, match="^inner must be an object with a method bucket"
    ):
        MultipleOf(inner, 8)


@pytest.mark.parametrize("multiple, error", [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_wrong_multiples_are_refused(multiple, error):
    with pytest.raises(error, match="^multiple must be a positive int, not "):
        MultipleOf(Pow2(), multiple)
