"""The buckets of each strategy: what its rule says, and the contract of all."""

import math
import pickle
import re
import reprlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bucketjit.errors import BucketOverflowError, SpecError
from bucketjit.strategies import (
    Boundaries,
    Exact,
    Exponential,
    Linear,
    Pow2,
    buckets_of,
    checked_bucket,
)
from bucketjit.strategies.rounding import MOST_LISTED, extended
from tests.strategies.contract import (
    LARGEST,
    check_contract,
    check_ladder,
    ladder_parameters,
    sizes,
    small_sizes,
)

BASES = [1.1, 1.4, 1.5, Fraction(4, 3), math.sqrt(2), 2, math.e, 10]
LADDERS = st.one_of(
    st.just((Pow2,)),
    st.tuples(st.just(Linear), small_sizes),
    st.tuples(st.just(Exponential), st.sampled_from(BASES) | st.floats(1.01, 1000)),
)


@given(LADDERS, ladder_parameters(), sizes, sizes)
# The next power, rounded up, which is GoMLX's formula, gives 6 -> 8 and 8 -> 21.
@example((Exponential, 1.4), {"min": 1}, 5, 6)
@example((Exponential, 1.1), {"min": 1}, 2, 3)
@example((Exponential, math.e), {"min": 1}, 3, 8)
def test_ladders_keep_the_contract(ladder, parameters, n, m):
    make, *first = ladder
    strategy = make(*first, **parameters)
    check_contract(strategy, n, m)
    check_ladder(strategy, n)


@given(st.sets(st.integers(1, 2000), min_size=1), st.data())
def test_boundaries_keep_the_contract_and_take_the_smallest_that_fits(boundaries, data):
    strategy, fits = Boundaries(sorted(boundaries)), st.integers(0, max(boundaries))
    n = data.draw(fits)
    check_contract(strategy, n, data.draw(fits))
    assert strategy.bucket(n) == min(b for b in boundaries if b >= n)


# The buckets of all sizes from 1 to the last one.
BUCKETS = [
    (Pow2(), [1, 2, 4, 8, 16, 32]),
    (Pow2(max=100), [1, 2, 4, 8, 16, 32, 64, 100]),
    (Pow2(multiple_of=3), [3, 6, 9, 18, 33]),
    (Pow2(min=4), [4, 8]),
    (Pow2(min=5), [8, 16]),
    (Linear(10, min=25, max=48), [30, 40, 48]),
    (Linear(10, multiple_of=8), [16, 24, 32, 40, 56, 64]),
    (Exponential(1.4), [1, 2, 3, 4, 6, 8, 11, 15, 21, 29]),  # the powers, rounded up
    (Exponential(1.5, min=16, max=80), [16, 24, 36, 54, 80]),
]


@pytest.mark.parametrize(("strategy", "buckets"), BUCKETS, ids=repr)
def test_buckets(strategy, buckets):
    assert sorted({strategy.bucket(n) for n in range(1, buckets[-1] + 1)}) == buckets


def test_large_powers_of_two():
    assert (Pow2().bucket(2**40), Pow2().bucket(2**40 + 1)) == (2**40, 2**41)


@given(small_sizes, sizes)
def test_padding_is_less_than_a_step(step, n):
    bucket = Linear(step).bucket(n + 1)
    assert bucket % step == 0 and bucket - (n + 1) < step


# --- powers of any base ---


@pytest.mark.parametrize("base", BASES)
def test_no_drift_up_to_two_to_the_forty(base):
    strategy, exact, k = Exponential(base), Fraction(1), 0
    while exact < LARGEST:
        rung = math.ceil(exact)
        assert strategy.bucket(rung) == rung, f"base {base}, power {k}"
        exact *= Fraction(base)
        k += 1


@given(sizes)
def test_base_two_is_pow2(n):
    assert Exponential(2).bucket(n) == Exponential(2.0).bucket(n) == Pow2().bucket(n)


def test_what_was_climbed_is_no_part_of_the_value():
    strategy = Exponential(1.1)
    assert strategy.bucket(2000) == 2049 and strategy.bucket(7) == 7
    assert strategy == Exponential(1.1) and hash(strategy) == hash(Exponential(1.1))
    assert repr(strategy) == "Exponential(1.1)" and pickle.loads(pickle.dumps(strategy)) == strategy


def test_the_smallest_base():
    strategy = Exponential(1.001)
    assert strategy.bucket(1000) == 1000
    assert LARGEST <= strategy.bucket(LARGEST) < 1.001 * LARGEST


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        *((b, ValueError, "(at least 1.001|finite), not ") for b in (1, 0.5, -2, 1.0001)),
        *((b, ValueError, "finite, not ") for b in (math.inf, math.nan)),
        *((b, TypeError, r"a number of at least 1.001, not .*\(") for b in ("2", None, True, 2j)),
    ],
)
def test_wrong_bases_are_refused(wrong, error, message):
    with pytest.raises(error, match=f"^base must be {message}"):
        Exponential(wrong)


# --- boundaries ---


@pytest.mark.parametrize("form", [[30, 60], (30, 60), range(30, 61, 30), np.array([30, 60])])
def test_any_iterable_of_ints(form):
    strategy = Boundaries(form)
    assert strategy == Boundaries([30, 60]) and hash(strategy) == hash(Boundaries([30, 60]))
    assert repr(strategy) == "Boundaries([30, 60])" and strategy.boundaries == (30, 60)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ([], "one such as [16, 64]"),
        ([60, 30], "[30, 60]"),
        ([30, 30], "[30]"),
        ([0, 30, -5], "[30]"),
        ([30, 60.5, "90"], "[30, 61, 90]"),
        ([True, 30], "[1, 30]"),
        ([30, None, float("inf"), float("nan")], "[30]"),
        (30, "[30]"),
        (8.0, "[8]"),
        ("30", "[30]"),
        ({60, 30}, "[30, 60]"),
        ({30: 60}, "[30]"),
        (np.array([8.0, 16.0]), "[8, 16]"),
        (np.array(8), "[8]"),
        (np.array([[8, 16]]), "one such as [16, 64]"),
        (list(range(20, 0, -1)), "[1, 2, 3, 4, 5, 6, ...]"),
    ],
)
def test_wrong_boundaries_are_refused(wrong, right):
    """By one error, which shows the sizes in the form in which they are taken."""
    got = reprlib.repr(wrong)
    told = (
        f"boundaries must be a list of ints above 0 in increasing order, got {got}; write {right}"
    )
    with pytest.raises(SpecError, match=f"^{re.escape(told)}$"):
        Boundaries(wrong)


# --- beyond the largest bucket ---


class Capped:
    """A strategy of a user's own."""

    def bucket(self, n):
        if n > 50:
            raise BucketOverflowError(n, 50)
        return -(-n // 10) * 10

    def __repr__(self):
        return "Capped()"


class Extended:
    """A strategy, and beyond its largest bucket the one for these sizes, as calls ask them."""

    def __init__(self, inner):
        self.inner = inner

    def bucket(self, n):
        try:
            return self.inner.bucket(n)
        except BucketOverflowError as error:
            return extended(self.inner, error.largest).bucket(n)


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
def test_an_extended_strategy_goes_on_by_the_rule(strategy, sizes, buckets):
    assert [Extended(strategy).bucket(n) for n in sizes] == list(buckets)
    for n in range(400):
        assert checked_bucket(Extended(strategy), "b", n) == Extended(strategy).bucket(n)


WITH_AN_END = st.one_of(
    st.builds(lambda n: Pow2(max=n), st.integers(1, 300)),
    st.builds(lambda s, n: Linear(s, max=n), st.integers(1, 40), st.integers(1, 300)),
    st.builds(lambda b, n: Exponential(b, max=n), st.floats(1.01, 4), st.integers(1, 300)),
    st.builds(lambda s: Boundaries(sorted(s)), st.sets(st.integers(1, 300), min_size=1)),
)


@given(WITH_AN_END, st.integers(0, 2000), st.integers(0, 2000))
def test_an_extended_strategy_keeps_the_contract_and_what_was(strategy, n, m):
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


# --- all buckets of a strategy ---


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
    "strategy", [Pow2(), Linear(16), Exact(), Linear(1, max=MOST_LISTED + 1), Own()], ids=type
)
def test_no_list(strategy: Any) -> None:
    assert buckets_of(strategy) is None


def test_as_many_as_there_may_be() -> None:
    assert buckets_of(Linear(1, max=MOST_LISTED)) == tuple(range(1, MOST_LISTED + 1))
