import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketjit.strategies import BoundedWaste
from tests.strategies.contract import check_contract, check_ladder, ladder_parameters, sizes

WASTES = [0.01, 0.1, 0.2, Fraction(1, 3), 0.5, 0.9]


@given(st.sampled_from(WASTES) | st.floats(0.001, 0.99), ladder_parameters(), sizes, sizes)
def test_contract(waste, parameters, n, m):
    strategy = BoundedWaste(waste, **parameters)
    check_contract(strategy, n, m)
    check_ladder(strategy, n)


@given(st.sampled_from(WASTES), st.integers(1, 100), sizes)
def test_the_bound_is_kept_exactly(waste, smallest, n):
    strategy = BoundedWaste(waste, min=smallest)
    n = max(n, smallest)
    bucket = strategy.bucket(n)
    assert Fraction(bucket - n, bucket) <= Fraction(str(waste))


@pytest.mark.parametrize("waste", WASTES)
def test_no_bucket_could_be_larger(waste):
    strategy = BoundedWaste(waste, min=8)
    rungs = sorted({strategy.bucket(n) for n in range(1, 2000)})
    for before, bucket in zip(rungs, rungs[1:], strict=False):
        assert Fraction(bucket + 1 - (before + 1), bucket + 1) > Fraction(str(waste))


def test_a_float_is_the_number_it_is_written_as():
    # 7 / (1 - 0.3) is 10; in binary, 0.3 is a little less, and the bucket would be 9.
    assert Fraction(0.3) < Fraction(3, 10)
    assert BoundedWaste(0.3, min=6).bucket(7) == 10
    assert BoundedWaste(Fraction(3, 10), min=6).bucket(7) == 10


def test_what_was_climbed_is_no_part_of_the_value():
    used = BoundedWaste(0.25, max=4000)
    used.bucket(1000)
    assert used == BoundedWaste(0.25, max=4000)
    assert hash(used) == hash(BoundedWaste(0.25, max=4000))
    assert repr(used) == "BoundedWaste(0.25, max=4000)"
    assert pickle.loads(pickle.dumps(used)) == used
    assert repr(BoundedWaste(np.float64(0.25))) == "BoundedWaste(0.25)"


@pytest.mark.parametrize("waste", [0, 0.0, 1, 1.5, -0.1, 0.0001, math.inf, math.nan])
def test_a_waste_out_of_range_is_refused(waste):
    with pytest.raises(ValueError, match="^waste must be from 0.001 to below 1, not "):
        BoundedWaste(waste)


@pytest.mark.parametrize("waste", ["0.2", None, True, 2j])
def test_a_waste_that_is_no_number_is_refused(waste):
    with pytest.raises(TypeError, match=r"^waste must be a number .*\("):
        BoundedWaste(waste)
