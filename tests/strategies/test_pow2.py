import pytest
from hypothesis import given

from bucketjit.strategies import Pow2
from tests.strategies.contract import check_contract, check_ladder, ladder_parameters, sizes


@given(ladder_parameters(), sizes, sizes)
def test_contract(parameters, n, m):
    strategy = Pow2(**parameters)
    check_contract(strategy, n, m)
    check_ladder(strategy, n)


def test_buckets_are_powers_of_two():
    assert [Pow2().bucket(n) for n in range(1, 18)] == [1, 2, 4, 4] + [8] * 4 + [16] * 8 + [32]
    assert Pow2().bucket(2**40) == 2**40
    assert Pow2().bucket(2**40 + 1) == 2**41


@pytest.mark.parametrize("smallest, first", [(1, 1), (4, 4), (5, 8), (16, 16)])
def test_min_is_rounded_up_to_the_smallest_bucket(smallest, first):
    assert {Pow2(min=smallest).bucket(n) for n in range(first + 1)} == {first}


def test_max_need_not_be_a_power_of_two():
    assert [Pow2(max=100).bucket(n) for n in (33, 64, 65, 100)] == [64, 64, 100, 100]


def test_multiple_of_rounds_the_powers_up():
    strategy = Pow2(multiple_of=3)
    assert sorted({strategy.bucket(n) for n in range(1, 34)}) == [3, 6, 9, 18, 33]
    # The powers in between, 8 and 4 say, give the same multiple or the next one: 4 -> 6, 8 -> 9.
    assert strategy.bucket(4) == strategy.bucket(6) == 6
