import copy
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketjit.errors import BucketOverflowError, StrategyContractError
from bucketjit.strategies import (
    Adaptive,
    Linear,
    MultipleOf,
    Optimal,
    Pow2,
    Replan,
    Strategy,
    assess,
    checked_bucket,
)
from tests.strategies.contract import check_contract
from tests.strategies.sentences import sentence_lengths


def watched(sizes, **options):
    strategy = Adaptive(Pow2(), **{"patience": 1, "compile_cost": 0, **options})
    for n in sizes:
        strategy.observe(n)
    return strategy


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.integers(1, 5),
    st.sampled_from([1, 4]),
    st.sampled_from([0, 10, 100]),
    st.integers(0, 200),
    st.integers(0, 200),
)
def test_contract_before_and_after(sizes, k, multiple_of, compile_cost, n, m):
    strategy = watched(sizes, k=k, multiple_of=multiple_of, compile_cost=compile_cost)
    for _ in range(2):
        check_contract(strategy, n, m)
        assert strategy.bucket(n) % multiple_of == 0
        strategy.replan()


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 5))
def test_where_compiles_are_free_it_is_optimal(sizes, k):
    strategy = watched(sizes, k=k)
    strategy.replan()
    best = assess(Optimal.fit(sizes, k), sizes).padded
    assert assess(strategy, sizes).padded == min(best, assess(Pow2(), sizes).padded)


def test_starts_with_any_strategy():
    strategy = Adaptive(Linear(10))
    assert isinstance(strategy, Strategy)
    assert strategy.plan == Linear(10)
    assert [strategy.bucket(n) for n in (1, 11)] == [10, 20]
    assert Adaptive(Linear(10), multiple_of=8).plan == MultipleOf(Linear(10), 8)


def test_waits_until_it_has_seen_enough():
    strategy = watched([17] * 99, patience=100)
    assert strategy.replan() is None
    strategy.observe(17)
    assert strategy.replan().plan == Optimal([17, 32], beyond=Pow2())
    assert strategy.replan() is None, "and starts counting again"


class TestASavingMustPay:
    # In the bucket 32, each call of 17 wastes 15.
    def test_for_the_compiles_within_as_many_calls_as_were_seen(self):
        for calls, pays in ((66, False), (67, True)):
            strategy = watched([17] * calls, compile_cost=1000, margin=1)
            assert (strategy.propose() is not None) == pays

    def test_by_a_margin(self):
        for calls, pays in ((133, False), (134, True)):
            strategy = watched([17] * calls, compile_cost=1000, margin=2)
            assert (strategy.propose() is not None) == pays

    def test_by_default_a_compile_costs_a_hundred_calls(self):
        for calls, pays in ((213, False), (214, True)):  # 214 * 15 > 100 * 32
            strategy = watched([17] * calls, compile_cost=None, margin=1)
            assert (strategy.propose() is not None) == pays

    def test_in_the_unit_of_the_cost(self):
        cheap = watched([17] * 67, compile_cost=1000, margin=1, cost=lambda n: n / 10)
        assert cheap.propose() is None

    def test_what_is_compiled_already_is_free(self):
        strategy = watched([17] * 67 + [10], compile_cost=1000, margin=1)
        proposal = strategy.propose()
        assert proposal.plan.boundaries == (16, 17, 32), "16 is there already; 10 would not pay"
        assert proposal.new_buckets == (17,)
        assert strategy.propose(made=[17]).new_buckets == ()
        assert strategy.propose(made=[10, 17]).plan.boundaries == (10, 17)

    def test_the_executable_beyond_the_largest_size_may_stay(self):
        strategy = watched([17] * 67 + [60], compile_cost=500, margin=1)
        assert strategy.replan().plan.boundaries == (17, 64)

    def test_the_saving_is_told(self):
        assert watched([24] * 10).propose().saving == 0.25


def test_churn_is_bounded():
    """Sizes that change all the time cause no more than k compiles per patience."""
    rng = np.random.default_rng(0)
    strategy = Adaptive(Pow2(), k=4, patience=200, compile_cost=50.0, memory=200)
    compiled = swaps = 0
    for _ in range(20):
        for n in rng.integers(1, 500, 3) + rng.integers(0, 3, (100, 3)):
            for size in n.tolist():
                strategy.observe(size)
                if proposal := strategy.replan():
                    swaps += 1
                    compiled += len(proposal.new_buckets)
                    assert len(proposal.new_buckets) <= 4
    assert 2 <= swaps <= 20 * 300 / 200
    assert compiled <= 4 * swaps


def test_a_steady_stream_settles():
    rng = np.random.default_rng(1)
    strategy = Adaptive(Pow2(), k=8, patience=256)
    swaps = []
    for i, n in enumerate(rng.lognormal(4, 0.7, 20_000).astype(int).tolist()):
        strategy.observe(n)
        if i % 256 == 255 and strategy.replan():
            swaps.append(i)
    assert 1 <= len(swaps) <= 12
    sample = np.random.default_rng(2).lognormal(4, 0.7, 20_000).astype(int)
    assert assess(strategy, sample).waste < 0.75 * assess(Pow2(), sample).waste


def test_follows_a_shift_and_forgets():
    strategy = watched([17] * 300, memory=100)
    strategy.replan()
    for n in [40] * 1000:
        strategy.observe(n)
    assert 40 in strategy.replan().plan.boundaries
    assert set(strategy.histogram()) == {40}
    assert sum(strategy.histogram().values()) <= 200


def test_real_sentences():
    lengths = sentence_lengths(1000) * 3
    strategy = watched(lengths, k=8, compile_cost=None, patience=256)
    assert strategy.replan()
    assert assess(strategy, lengths).waste < 0.85 * assess(Pow2(), lengths).waste


def test_sizes_beyond_the_plan_go_by_the_start():
    strategy = Adaptive(Pow2(max=100), patience=1, compile_cost=0)
    strategy.observe(17)
    strategy.replan()
    assert [strategy.bucket(n) for n in (17, 18, 65)] == [17, 32, 100]
    for ask in (strategy.bucket, strategy.observe):
        with pytest.raises(BucketOverflowError, match="size 101, beyond the largest bucket 100"):
            ask(101)


def test_a_proposal_that_came_too_late_is_not_adopted():
    strategy = watched([17] * 10)
    late = strategy.propose()
    assert strategy.adopt(strategy.propose())
    assert not strategy.adopt(late)


def test_size_0_does_not_count():
    strategy = Adaptive(Pow2())
    strategy.observe(0)
    assert strategy.histogram() == {}


def test_a_swap_between_two_questions_looks_like_no_broken_contract():
    class SwapsWhenAsked:
        def bucket(self, n):
            strategy.adopt(Replan(Optimal([25]), (25,), 0.1, replaces=self))
            return 20

    strategy = Adaptive(SwapsWhenAsked())
    assert checked_bucket(strategy, "n", 17) == 20
    assert checked_bucket(strategy, "n", 17) == 25


def test_no_call_is_lost_among_threads():
    strategy = Adaptive(Pow2())
    threads = [
        threading.Thread(target=lambda: [strategy.observe(n) for n in range(1, 501)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert strategy.histogram() == dict.fromkeys(range(1, 501), 8.0)


def test_is_an_object_of_its_own_that_can_be_copied():
    strategy = watched([17] * 10)
    strategy.replan()
    assert repr(strategy) == "Adaptive(Pow2(), 8, plan=Optimal([17, 32], beyond=Pow2()))"
    assert repr(Adaptive(Pow2(), 4)) == "Adaptive(Pow2(), 4)"
    assert strategy == strategy != watched([17] * 10)
    for twin in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert twin.plan == strategy.plan
        twin.observe(30)
        assert 30 in twin.histogram() and 30 not in strategy.histogram()


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"start": Pow2}, StrategyContractError, "^start must be an object with a method bucket"),
        ({"start": Adaptive(Pow2())}, TypeError, "start must be a strategy that does not change"),
        ({"k": 0}, ValueError, "k must be a positive int"),
        ({"cost": 3}, TypeError, "cost must be a function"),
        ({"compile_cost": -1}, ValueError, "compile_cost must be a finite number of at least 0"),
        ({"multiple_of": 0}, ValueError, "multiple_of must be a positive int"),
        ({"margin": 0.5}, ValueError, "margin must be a finite number of at least 1, not 0.5"),
        ({"patience": 0}, ValueError, "patience must be a positive int"),
        ({"memory": 0}, ValueError, "memory must be a positive int"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Adaptive(**{"start": Pow2(), **options})
