import pytest

from bucketjit.errors import BucketOverflowError, StrategyContractError
from bucketjit.strategies import Boundaries, Exact, Pow2, assess, assess_joint


def test_counts_calls_not_sizes():
    assert assess(Pow2(), [5, 5, 5, 9, 0]) == assess(Pow2(), {5: 3, 9: 1}) == (2, 24.0, 40.0)
    assert assess(Pow2(), [5, 5, 5, 9]).waste == 16 / 40

    assert assess(Exact(), [3, 5, 5]) == (2, 13.0, 13.0)


def test_in_the_unit_of_the_cost():
    assert assess(Pow2(), [3, 3], cost=lambda n: n * n) == (1, 18.0, 32.0)
    assert assess(Exact(), [3], cost=lambda n: 0).waste == 0


def test_a_broken_strategy_is_not_believed():
    class Smaller:
        def bucket(self, n):
            return n - 1

    with pytest.raises(StrategyContractError):
        assess(Smaller(), [3])
    with pytest.raises(BucketOverflowError):
        assess(Boundaries([8]), [9])


def test_several_variables():
    sizes = {"b": [3, 3, 4], "s": [10, 10, 70]}
    strategies = {"s": Pow2(), "b": Pow2()}
    assert assess_joint(strategies, sizes) == (2, 340.0, 2 * 64 + 512)
    assert assess_joint(strategies, sizes, cost=lambda b, s: s) == (2, 90.0, 160.0)


@pytest.mark.parametrize("strategies", [{"b": Pow2()}, {"b": Pow2(), "t": Pow2()}])
def test_variables_must_be_the_same(strategies):
    with pytest.raises(ValueError, match=r"sizes must be of the variables \['b'.*not \['b', 's'\]"):
        assess_joint(strategies, {"b": [3], "s": [10]})


def test_what_is_no_strategy_is_refused():
    for wrong in (Pow2, "pow2", None):
        with pytest.raises(StrategyContractError, match="method bucket"):
            assess(wrong, [3])
        with pytest.raises(StrategyContractError, match="the strategy of 'b'"):
            assess_joint({"b": wrong}, {"b": [3]})
    with pytest.raises(StrategyContractError, match="a dict of a variable to its strategy"):
        assess_joint(Pow2(), {"b": [3]})
