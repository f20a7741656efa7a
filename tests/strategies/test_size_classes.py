import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketjit.strategies import Pow2, SizeClasses
from tests.strategies.contract import check_contract, check_ladder, ladder_parameters, sizes


@given(st.integers(1, 9), ladder_parameters(), sizes, sizes)
def test_contract(steps, parameters, n, m):
    strategy = SizeClasses(steps, **parameters)
    check_contract(strategy, n, m)
    check_ladder(strategy, n)


def test_two_steps_are_powers_of_two_and_one_and_a_half_times_those():
    rungs = sorted({SizeClasses().bucket(n) for n in range(1, 193)})
    assert rungs == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192]


def test_four_steps_are_the_size_classes_of_jemalloc():
    rungs = sorted({SizeClasses(4, min=16, multiple_of=16).bucket(n) for n in range(1, 1025)})
    small = [16, 32, 48, 64, 80, 96, 112, 128]
    assert rungs == [*small, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_the_share_of_padding_is_bounded(steps):
    strategy = SizeClasses(steps)
    for n in range(1, 5000):
        bucket = strategy.bucket(n)
        assert (bucket - n) * (steps + 1) < bucket


@given(sizes)
def test_one_step_is_pow2(n):
    assert SizeClasses(1).bucket(n) == Pow2().bucket(n)


def test_more_steps_never_pad_more_where_they_divide():
    for n, (few, many) in itertools.product(range(1, 3000), [(1, 2), (2, 4), (3, 6)]):
        assert SizeClasses(many).bucket(n) <= SizeClasses(few).bucket(n)


@pytest.mark.parametrize("steps, error", [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_wrong_steps_are_refused(steps, error):
    with pytest.raises(error, match="^steps must be a positive int, not "):
        SizeClasses(steps)
