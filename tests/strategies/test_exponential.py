import math
import pickle
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bucketjit.strategies import Exponential, Pow2
from tests.strategies.contract import (
    LARGEST,
    check_contract,
    check_ladder,
    ladder_parameters,
    sizes,
)

BASES = [1.1, 1.4, 1.5, Fraction(4, 3), math.sqrt(2), 2, math.e, 10]


@given(st.sampled_from(BASES) | st.floats(1.01, 1000), ladder_parameters(), sizes, sizes)
@example(1.4, {}, 5, 6)  # the next power, rounded up, which is GoMLX's formula, gives 6 -> 8
@example(1.1, {}, 2, 3)
@example(math.e, {}, 3, 8)  # and 8 -> 21
def test_contract(base, parameters, n, m):
    strategy = Exponential(base, **parameters)
    check_contract(strategy, n, m)
    check_ladder(strategy, n)


def test_the_rungs_are_the_powers_rounded_up():
    strategy = Exponential(1.4)
    rungs = sorted({strategy.bucket(n) for n in range(1, 30)})
    assert rungs == [1, 2, 3, 4, 6, 8, 11, 15, 21, 29]


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


def test_the_ladder_starts_at_min():
    strategy = Exponential(1.5, min=16, max=80)
    assert sorted({strategy.bucket(n) for n in range(1, 81)}) == [16, 24, 36, 54, 80]


def test_asking_in_any_order_gives_the_same_ladder():
    up, down = Exponential(1.1), Exponential(1.1)
    asked = list(range(1, 2000, 7))
    assert [up.bucket(n) for n in asked] == [down.bucket(n) for n in reversed(asked)][::-1]


def test_what_was_climbed_is_no_part_of_the_value():
    used = Exponential(1.4)
    used.bucket(1000)
    assert used == Exponential(1.4)
    assert hash(used) == hash(Exponential(1.4))
    assert repr(used) == "Exponential(1.4)"
    assert pickle.loads(pickle.dumps(used)) == used


def test_the_smallest_base():
    strategy = Exponential(1.001)
    assert strategy.bucket(1000) == 1000
    assert LARGEST <= strategy.bucket(LARGEST) < 1.001 * LARGEST


@pytest.mark.parametrize("base", [1, 1.0, 0.5, -2, 1.0001, math.inf, math.nan])
def test_a_base_too_small_is_refused(base):
    with pytest.raises(ValueError, match="^base must be (at least 1.001|finite), not "):
        Exponential(base)


@pytest.mark.parametrize("base", ["2", None, True, 2j])
def test_a_base_that_is_no_number_is_refused(base):
    with pytest.raises(TypeError, match=r"^base must be a number of at least 1.001, not .*\("):
        Exponential(base)
