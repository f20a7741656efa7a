from hypothesis import given

from bucketjit.strategies import Linear
from tests.strategies.contract import (
    check_contract,
    check_ladder,
    ladder_parameters,
    sizes,
    small_sizes,
)


@given(small_sizes, ladder_parameters(), sizes, sizes)
def test_contract(step, parameters, n, m):
    strategy = Linear(step, **parameters)
    check_contract(strategy, n, m)
    check_ladder(strategy, n)


@given(small_sizes, sizes)
def test_padding_is_less_than_a_step(step, n):
    bucket = Linear(step).bucket(n + 1)
    assert bucket % step == 0
    assert bucket - (n + 1) < step


def test_min_and_max():
    strategy = Linear(10, min=25, max=48)
    assert [strategy.bucket(n) for n in (1, 30, 31, 41, 48)] == [30, 30, 40, 48, 48]


def test_multiple_of_rounds_the_steps_up():
    strategy = Linear(10, multiple_of=8)
    assert sorted({strategy.bucket(n) for n in range(1, 60)}) == [16, 24, 32, 40, 56, 64]
