import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketjit import errors
from bucketjit.strategies import Boundaries
from tests.strategies.contract import check_contract


@given(st.sets(st.integers(1, 2000), min_size=1), st.data())
def test_contract(boundaries, data):
    strategy = Boundaries(sorted(boundaries))
    fits = st.integers(0, max(boundaries))
    check_contract(strategy, data.draw(fits), data.draw(fits))


@given(st.sets(st.integers(1, 2000), min_size=1), st.integers(0, 2000))
def test_takes_the_smallest_that_fits(boundaries, n):
    fitting = [b for b in boundaries if b >= n]
    if fitting:
        assert Boundaries(sorted(boundaries)).bucket(n) == min(fitting)


def test_beyond_the_last_is_an_overflow():
    with pytest.raises(errors.BucketOverflowError) as caught:
        Boundaries([30, 60, 90]).bucket(91)
    assert (caught.value.size, caught.value.largest, caught.value.dim) == (91, 90, None)


@pytest.mark.parametrize(
    "given_boundaries", [[30, 60], (30, 60), range(30, 61, 30), np.array([30, 60])]
)
def test_any_iterable_of_ints(given_boundaries):
    strategy = Boundaries(given_boundaries)
    assert strategy == Boundaries([30, 60])
    assert hash(strategy) == hash(Boundaries([30, 60]))
    assert repr(strategy) == "Boundaries([30, 60])"
    assert strategy.boundaries == (30, 60)


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ([], ValueError, "boundaries must hold at least one bucket, not none"),
        ([60, 30], ValueError, r"strictly increasing, not 60 followed by 30 \(boundaries\[1\]\)"),
        ([30, 30], ValueError, "strictly increasing, not 30 followed by 30"),
        ([0, 30], ValueError, r"boundaries\[0\] must be a positive int, not 0"),
        ([30, 60.0], TypeError, r"boundaries\[1\] must be a positive int, not 60.0 \(float\)"),
        ([True, 30], TypeError, r"boundaries\[0\] must be a positive int, not True \(bool\)"),
        (30, TypeError, r"boundaries must be an iterable of positive ints, not 30 \(int\)"),
        ("30", TypeError, r"boundaries must be an iterable of positive ints, not '30' \(str\)"),
    ],
)
def test_wrong_boundaries_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        Boundaries(wrong)
