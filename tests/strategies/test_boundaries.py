import re
import reprlib

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
    "wrong, right",
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
    with pytest.raises(errors.SpecError, match=f"^{re.escape(told)}$"):
        Boundaries(wrong)
