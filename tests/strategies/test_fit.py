"""Boundaries fitted to sizes, of one variable and of several."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketjit import BucketedExec
from bucketjit.errors import BucketOverflowError, StrategyContractError
from bucketjit.strategies import Boundaries, Exact, Pow2, assess, assess_joint, fit
from tests.strategies.search.brute import boundary_choices, plan_cost

histograms = st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=7)
SIZES = {"b": [32, 32, 31, 4, 4, 3], "s": [10, 12, 11, 100, 90, 95]}


def waves(n):
    """A cost that falls at every multiple of 8, as measured ones do."""
    return 10 * -(-n // 8) + (n % 8) * 3


@settings(deadline=None)
@given(
    histograms,
    st.integers(1, 5),
    st.sampled_from([lambda n: n, lambda n: n * n, waves]),
    st.sampled_from([1, 4, 7]),
)
def test_no_other_plan_is_cheaper(seen, k, cost, multiple_of):
    plan = fit(seen, k, cost=cost, multiple_of=multiple_of).boundaries
    assert len(plan) <= k and all(b % multiple_of == 0 for b in plan)
    candidates = [-(-n // multiple_of) * multiple_of for n in seen]
    assert plan_cost(plan, seen, cost) == min(
        plan_cost(other, seen, cost) for other in boundary_choices(candidates, k)
    )


@pytest.mark.parametrize(("mean", "spread"), [(4, 0.7), (5, 1.0), (6, 1.2)])
def test_at_most_half_the_padding_of_pow2(mean, spread):
    lengths = np.random.default_rng(0).lognormal(mean, spread, 5000).astype(int)
    pow2 = assess(Pow2(), lengths)
    fitted = assess(fit(lengths, pow2.executables), lengths)
    assert fitted.executables <= pow2.executables
    assert fitted.padded - fitted.exact <= 0.5 * (pow2.padded - pow2.exact)


def test_the_cost_is_asked_once_for_each_size():
    asked = Counter()

    def cost(n):
        asked[n] += 1
        return n

    fit([3, 5, 3, 9], 2, cost=cost)
    assert asked == {3: 1, 5: 1, 9: 1}


def test_an_executable_that_saves_nothing_is_left_out():
    assert fit([3, 5, 9], 3, cost=lambda n: 1) == Boundaries([9])
    plan = fit(SIZES, 2, cost=lambda b, s: s)
    assert len(plan["b"].boundaries) == 1 and len(plan["s"].boundaries) == 2


def test_max_makes_room_and_is_one_of_the_buckets():
    assert fit([3, 9], max=512) == Boundaries([3, 9, 512])
    assert fit([3, 5, 9], 2, max=12) == Boundaries([5, 12])
    with pytest.raises(BucketOverflowError):
        fit([3, 9]).bucket(10)


def test_one_named_variable_is_a_dict_of_one():
    assert fit({"n": [3, 5, 9]}, 2, cost=lambda n: n) == {"n": fit([3, 5, 9], 2)}
    assert fit({"n": {3: 90, 5: 1, 6: 5}}, 2) == fit({"n": [3] * 90 + [5] + [6] * 5}, 2)


def test_options_are_for_all_variables_or_by_variable():
    plan = fit(SIZES, 4, multiple_of={"s": 16}, max={"b": 64})
    assert plan["b"].boundaries[-1] == 64 and plan["s"].boundaries[-1] == 112
    assert all(n % 16 == 0 for n in plan["s"].boundaries)
    assert any(n % 16 for n in plan["b"].boundaries)
    plan = fit(SIZES, 4, multiple_of=8, max=128)
    assert all(s.boundaries[-1] == 128 for s in plan.values())
    assert all(n % 8 == 0 for s in plan.values() for n in s.boundaries)


@pytest.mark.parametrize(
    ("sizes", "options", "error", "message"),
    [
        ([3, 9], {"buckets": 0}, ValueError, "buckets must be a positive int, not 0"),
        ([3, 9], {"buckets": 2.0}, TypeError, "buckets must be a positive int, not 2.0"),
        ([3, 9], {"multiple_of": 0}, ValueError, "multiple_of must be a positive int"),
        ([3, 9], {"max": 50, "multiple_of": 8}, ValueError, r"a multiple of multiple_of \(8\)"),
        ([3, 700], {"max": 9}, ValueError, r"must not be beyond max \(9\), not 700; leave"),
        ([3, 9], {"multiple_of": 2**70}, ValueError, "must be below 2\\*\\*63, not 11805916"),
        ([3, 9], {"max": 2**63}, ValueError, "must be below 2\\*\\*63, not 9223372"),
        ([3, 9], {"cost": 3}, TypeError, "cost must be a function of the padded size"),
        ([3, 9], {"cost": lambda n: "3"}, TypeError, "must return a number for size 3, not '3'"),
        ([3, 9], {"cost": lambda n: n > 5}, TypeError, "a number for size 3, not False"),
        ([3, 9], {"cost": lambda n: -n}, ValueError, "must be finite and not negative, not -3.0"),
        ([3, 9], {"cost": lambda n: 1e308}, ValueError, "must have a sum that a float can hold"),
        (SIZES, {"cost": lambda b, s: 1e308}, ValueError, "must have a sum that a float can hold"),
        (SIZES, {"cost": lambda b, s: None}, TypeError, "must return a number for b=3, s=10"),
        (SIZES, {"cost": lambda b: b}, TypeError, "cost must take the padded sizes by name, b, s"),
        (SIZES, {"max": {"t": 8}}, TypeError, r"max must be a mapping .* \['b', 's'\], not"),
        (SIZES, {"max": {"s": 50}}, ValueError, r"of 's' must not be beyond max \(50\), not 100"),
        (SIZES, {"max": {"s": 1.5}}, TypeError, r"max\['s'\] must be a positive int"),
        (SIZES, {"multiple_of": {"s": 0}}, ValueError, r"multiple_of\['s'\] must be a positive"),
    ],
)
def test_wrong_options_are_refused(sizes, options, error, message):
    with pytest.raises(error, match=message):
        fit(sizes, **options)


def test_several_variables_keep_to_the_number_of_executables():
    rng = np.random.default_rng(0)
    sizes = {"b": rng.integers(1, 33, 300), "s": rng.lognormal(4, 0.7, 300).astype(int) + 1}
    found = [assess_joint(fit(sizes, k), sizes) for k in (1, 4, 12)]
    assert all(one.executables <= k for one, k in zip(found, (1, 4, 12), strict=True))
    waste = [one.waste for one in found]
    assert waste == sorted(waste, reverse=True)
    alone = {"b": fit(sizes["b"], 3), "s": fit(sizes["s"], 4)}
    assert found[-1].padded <= assess_joint(alone, sizes).padded


def test_combinations_that_do_not_occur_need_no_executable():
    lengths = np.random.default_rng(0).lognormal(4, 0.7, 200).astype(int) + 1
    sizes = {"b": np.maximum(1, 1024 // lengths), "s": lengths}
    plan = fit(sizes, 8)
    assert len(plan["b"].boundaries) * len(plan["s"].boundaries) > 20
    assert assess_joint(plan, sizes).executables <= 8
    pow2 = assess_joint({"b": Pow2(), "s": Pow2()}, sizes)
    assert pow2.executables > 8 and assess_joint(plan, sizes).waste < 0.8 * pow2.waste


def test_a_bucketed_function_compiles_what_was_foretold():
    plan = fit(SIZES, 3)
    executor = BucketedExec(lambda x: x.sum(axis=1), dynamic_axes="b, s", buckets=plan)
    for b, s in zip(*SIZES.values(), strict=True):
        np.testing.assert_array_equal(executor(np.ones((b, s), np.float32)), np.full(b, s))
    assert executor.cache_size() == assess_joint(plan, SIZES).executables <= 3


# --- what strategies cost ---


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
