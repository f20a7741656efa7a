"""What holds for all strategies alike, and checked_bucket."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given

import bucketjit
from bucketjit import errors
from bucketjit.strategies import (
    Auto,
    Boundaries,
    Exact,
    Exponential,
    Linear,
    Pow2,
    Strategy,
    checked_bucket,
    fit,
)
from tests.strategies.contract import check_contract, sizes

STRATEGIES = [
    Pow2(max=100),
    Linear(8, max=100),
    Exponential(1.5, max=100),
    Boundaries([10, 100]),
    fit([10, 40, 100], buckets=3),
    Exact(),
]
LADDERS = [Pow2, lambda **kw: Linear(8, **kw), lambda **kw: Exponential(1.5, **kw)]


@given(sizes, sizes)
def test_exact_keeps_the_contract(n, m):
    check_contract(Exact(), n, m)
    assert Exact().bucket(n) == n


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
class TestEveryStrategy:
    def test_is_a_frozen_value(self, strategy):
        assert isinstance(strategy, Strategy)
        copies = eval(repr(strategy)), copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))
        assert all(twin == strategy and hash(twin) == hash(strategy) for twin in copies)
        assert sum(strategy == other for other in STRATEGIES) == 1
        for field in dataclasses.fields(strategy):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(strategy, field.name, 1)

    def test_takes_ints_above_minus_1_and_gives_ints(self, strategy):
        bucket = strategy.bucket(np.int32(9))
        assert type(bucket) is int and bucket == strategy.bucket(9)
        for wrong in (2.0, "2", None, True, np.float32(2), np.bool_(True)):
            with pytest.raises(TypeError, match="a size must be an int, not "):
                strategy.bucket(wrong)
        with pytest.raises(ValueError, match="a size must not be negative, not -1"):
            strategy.bucket(-1)
        assert strategy.bucket(0) == (0 if strategy == Exact() else strategy.bucket(1))

    def test_overflow_names_what_it_knows(self, strategy):
        if strategy == Exact():
            assert strategy.bucket(101) == 101
            return
        assert strategy.bucket(100) == 100
        with pytest.raises(errors.BucketOverflowError) as caught:
            strategy.bucket(101)
        error = caught.value
        assert (error.size, error.largest, error.dim) == (101, 100, None)
        with pytest.raises(errors.BucketOverflowError, match="dimension 'seq' has size 101"):
            checked_bucket(strategy, "seq", 101)


@pytest.mark.parametrize("make", LADDERS, ids=["pow2", "linear", "exponential"])
def test_parameters_of_ladders(make):
    for name in ("min", "max", "multiple_of"):
        for wrong in (0, -3, 2.0, "2", True):
            error = ValueError if type(wrong) is int else TypeError
            message = f"^{name} must be a positive int, not {wrong!r}"
            with pytest.raises(error, match=message):
                make(**{name: wrong})
    with pytest.raises(ValueError, match=r"max must be at least min \(8\), not 7"):
        make(min=8, max=7)
    with pytest.raises(ValueError, match=r"max must be a multiple of multiple_of \(8\), not 100"):
        make(max=100, multiple_of=8)
    strategy = make(min=np.int64(8), max=np.int32(64), multiple_of=np.int8(4))
    assert strategy == make(min=8, max=64, multiple_of=4)
    assert "np" not in repr(strategy)


@pytest.mark.parametrize("n, error", [(0, ValueError), (1.5, TypeError), (False, TypeError)])
def test_a_wrong_step_or_number_of_buckets_is_refused(n, error):
    with pytest.raises(error, match="^step must be a positive int, not "):
        Linear(n)
    with pytest.raises(error, match="buckets must be a positive int"):
        Auto(n)


def test_repr_shows_what_was_given():
    strategies = Pow2(), Pow2(min=4, multiple_of=2), Exponential(1.5, min=16), Exact()
    shown = "(Pow2(), Pow2(min=4, multiple_of=2), Exponential(1.5, min=16), Exact())"
    assert repr(strategies) == shown


def test_a_name_that_is_none_names_the_choices():
    with pytest.raises(AttributeError, match="no 'SizeClasses'; choose from .*Exponential.* fit"):
        bucketjit.strategies.SizeClasses  # noqa: B018


class Answering:
    """A strategy with one answer, or one error."""

    def __init__(self, answer):
        self.answer = answer

    def bucket(self, n):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [8, np.int64(8), np.uint8(8)])
def test_checked_buckets_are_ints(answer):
    bucket = checked_bucket(Answering(answer), "batch", 5)
    assert type(bucket) is int and bucket == 8


@pytest.mark.parametrize("largest", [None, 1.5, True, "8", 0, 9, 1000])
def test_what_overflows_has_a_smaller_largest_bucket(largest):
    with pytest.raises(errors.StrategyContractError, match="that is an int below the size"):
        checked_bucket(Answering(errors.BucketOverflowError(9, largest)), "b", 9)


def test_overflow_of_a_strategy_of_ones_own():
    with pytest.raises(errors.BucketOverflowError, match="largest bucket 8"):
        checked_bucket(Answering(errors.BucketOverflowError(9, np.int64(8))), "b", 9)
    with pytest.raises(errors.BucketOverflowError, match="dimension 'tokens'"):
        checked_bucket(Answering(errors.BucketOverflowError(11, 10, "tokens")), "batch", 11)
