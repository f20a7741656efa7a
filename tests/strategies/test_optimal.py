from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketjit import BucketedExec
from bucketjit.errors import BucketOverflowError, StrategyContractError
from bucketjit.strategies import Boundaries, Linear, MultipleOf, Optimal, Pow2, assess, assess_joint
from tests.strategies.contract import check_contract
from tests.strategies.search.brute import boundary_choices, plan_cost
from tests.strategies.sentences import sentence_lengths

histograms = st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=7)


def waves(n):
    """A cost that falls at every multiple of 8, as measured ones do."""
    return 10 * -(-n // 8) + (n % 8) * 3


@settings(deadline=None)
@given(
    histograms,
    st.integers(1, 5),
    st.sampled_from([lambda n: n, lambda n: n * n, waves]),
    st.sampled_from([1, 4, 7]),
    st.sampled_from([0, 5, 60]),
)
def test_no_other_plan_is_cheaper(seen, k, cost, multiple_of, compile_cost):
    plan = Optimal.fit(
        seen, k, cost=cost, multiple_of=multiple_of, compile_cost=compile_cost
    ).boundaries
    assert len(plan) <= k and all(b % multiple_of == 0 for b in plan)
    candidates = [-(-n // multiple_of) * multiple_of for n in seen]
    assert plan_cost(plan, seen, cost) + compile_cost * len(plan) == min(
        plan_cost(other, seen, cost) + compile_cost * len(other)
        for other in boundary_choices(candidates, k)
    )


@settings(deadline=None)
@given(histograms, st.integers(1, 8), st.sampled_from([1, 8]), st.booleans(), st.data())
def test_contract(seen, k, multiple_of, extend, data):
    plan = Optimal.fit(
        seen, k, multiple_of=multiple_of, beyond=Linear(10, multiple_of=3) if extend else None
    )
    fits = st.integers(0, 200 if extend else max(seen))
    n, m = data.draw(fits), data.draw(fits)
    check_contract(plan, n, m)
    assert plan.bucket(n) % multiple_of == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mean, spread", [(4, 0.7), (5, 1.0), (6, 1.2)])
def test_at_most_half_the_padding_of_pow2_on_lognormal_lengths(mean, spread, seed):
    lengths = np.random.default_rng(seed).lognormal(mean, spread, 5000).astype(int)
    pow2 = assess(Pow2(), lengths)
    optimal = assess(Optimal.fit(lengths, pow2.executables), lengths)
    assert optimal.executables <= pow2.executables
    assert optimal.padded - optimal.exact <= 0.5 * (pow2.padded - pow2.exact)


def test_at_most_half_the_padding_of_pow2_on_real_sentences():
    lengths = sentence_lengths(1000)
    assert len(set(lengths)) > 50
    pow2 = assess(Pow2(), lengths)
    optimal = assess(Optimal.fit(lengths, pow2.executables), lengths)
    assert optimal.executables <= pow2.executables
    assert optimal.padded - optimal.exact <= 0.5 * (pow2.padded - pow2.exact)


def test_the_cost_is_asked_once_for_each_size():
    asked = Counter()

    def cost(n):
        asked[n] += 1
        return n

    Optimal.fit([3, 5, 3, 9], 2, cost=cost)
    assert asked == {3: 1, 5: 1, 9: 1}


def test_flat_costs_need_one_executable():
    assert Optimal.fit([3, 5, 9], 3, cost=lambda n: 1) == Optimal([9])


def test_a_compile_that_does_not_pay_is_not_made():
    seen = {10: 1000, 20: 1000, 19: 1}
    assert Optimal.fit(seen, 3).boundaries == (10, 19, 20)
    assert Optimal.fit(seen, 3, compile_cost=5).boundaries == (10, 20)
    assert Optimal.fit(seen, 3, compile_cost=100_000).boundaries == (20,)


class TestBeyond:
    def test_is_refused_by_default(self):
        with pytest.raises(BucketOverflowError) as caught:
            Optimal.fit([3, 9]).bucket(10)
        assert (caught.value.size, caught.value.largest) == (10, 9)

    def test_max_makes_room(self):
        plan = Optimal.fit([3, 9], max=512)
        assert [plan.bucket(n) for n in (3, 9, 10, 512)] == [3, 9, 512, 512]

    def test_max_is_one_of_the_k(self):
        assert Optimal.fit([3, 5, 9], 2, max=12).boundaries == (5, 12)

    def test_goes_by_another_strategy(self):
        plan = Optimal.fit([3, 9, 700], 2, max=9, beyond=Pow2(max=1024))
        assert plan == Optimal([3, 9], beyond=Pow2(max=1024))
        assert [plan.bucket(n) for n in (9, 10, 700)] == [9, 16, 1024]
        with pytest.raises(BucketOverflowError, match="beyond the largest bucket 1024"):
            plan.bucket(1025)

    def test_that_ends_before_the_plan_does(self):
        plan = Optimal([4, 16], beyond=Boundaries([10]))
        assert plan.bucket(5) == 16
        with pytest.raises(BucketOverflowError) as caught:
            plan.bucket(17)
        assert (caught.value.size, caught.value.largest) == (17, 16)

    def test_is_rounded_too(self):
        plan = Optimal.fit([3, 9], multiple_of=6, beyond=Pow2())
        assert plan.beyond == MultipleOf(Pow2(), 6)
        assert plan.bucket(13) == 18

    def test_sizes_beyond_max_need_a_strategy(self):
        with pytest.raises(ValueError, match=r"sizes must not be beyond max \(9\), not 700; leave"):
            Optimal.fit([3, 700], max=9)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"k": 0}, ValueError, "k must be a positive int, not 0"),
        ({"k": 2.0}, TypeError, "k must be a positive int, not 2.0"),
        ({"multiple_of": 0}, ValueError, "multiple_of must be a positive int"),
        ({"max": 50, "multiple_of": 8}, ValueError, r"max must be a multiple of multiple_of \(8\)"),
        ({"compile_cost": -1}, ValueError, "compile_cost must be a finite number of at least 0"),
        ({"compile_cost": "1"}, TypeError, r"compile_cost must be a number, not '1' \(str\)"),
        ({"cost": 3}, TypeError, "cost must be a function of the padded size, or None, not 3"),
        ({"cost": lambda n: "x"}, TypeError, "cost must return a number for size 3, not 'x'"),
        ({"cost": lambda n: "3"}, TypeError, "cost must return a number for size 3, not '3'"),
        ({"cost": lambda n: b"3"}, TypeError, "cost must return a number for size 3, not b'3'"),
        ({"cost": lambda n: n > 5}, TypeError, "cost must return a number for size 3, not False"),
        ({"cost": lambda n: -n}, ValueError, "cost must be finite and not negative, not -3.0"),
        ({"cost": lambda n: 1e308}, ValueError, "must have a sum that a float can hold"),
        ({"beyond": Pow2}, StrategyContractError, "beyond must be an object with a method bucket"),
        ({"beyond": Pow2, "multiple_of": 8}, StrategyContractError, "^beyond must be an object"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Optimal.fit([3, 9], **options)


def test_is_a_value_of_its_own():
    plan = Optimal([3, 9], beyond=Pow2())
    assert repr(plan) == "Optimal([3, 9], beyond=Pow2())"
    assert plan == Optimal(np.array([3, 9]), beyond=Pow2())
    assert len({plan, Optimal([3, 9]), Optimal([3, 9]), Boundaries([3, 9])}) == 3


class TestFitJoint:
    SIZES = {"b": [32, 32, 31, 4, 4, 3], "s": [10, 12, 11, 100, 90, 95]}

    def test_keeps_to_k_executables(self):
        rng = np.random.default_rng(0)
        sizes = {"b": rng.integers(1, 33, 300), "s": rng.lognormal(4, 0.7, 300).astype(int) + 1}
        waste = []
        for k in (1, 4, 12):
            plan = assess_joint(Optimal.fit_joint(sizes, k), sizes)
            assert plan.executables <= k
            waste.append(plan.waste)
        assert waste == sorted(waste, reverse=True)

    def test_is_no_worse_than_a_plan_for_each_alone(self):
        alone = {
            dim: Optimal.fit(column, k)
            for k, (dim, column) in zip((2, 3), self.SIZES.items(), strict=True)
        }
        joint = Optimal.fit_joint(self.SIZES, 6)
        assert assess_joint(joint, self.SIZES).padded <= assess_joint(alone, self.SIZES).padded

    def test_combinations_that_do_not_occur_need_no_executable(self):
        lengths = np.random.default_rng(0).lognormal(4, 0.7, 200).astype(int) + 1
        sizes = {"b": np.maximum(1, 1024 // lengths), "s": lengths}
        plan = Optimal.fit_joint(sizes, 8)
        assert len(plan["b"].boundaries) * len(plan["s"].boundaries) > 20
        assert assess_joint(plan, sizes).executables <= 8
        pow2 = assess_joint({"b": Pow2(), "s": Pow2()}, sizes)
        assert pow2.executables > 8 and assess_joint(plan, sizes).waste < 0.8 * pow2.waste

    def test_an_executor_compiles_what_was_foretold(self):
        plan = Optimal.fit_joint(self.SIZES, 3)
        executor = BucketedExec(lambda x: x.sum(axis=1), dynamic_axes="b, s")
        for dim, strategy in plan.items():
            executor = executor.with_strategy(strategy, dim)
        for b, s in zip(*self.SIZES.values(), strict=True):
            np.testing.assert_array_equal(executor(np.ones((b, s), np.float32)), np.full(b, s))
        assert executor.cache_size() == assess_joint(plan, self.SIZES).executables <= 3

    def test_may_leave_all_calls_to_others(self):
        plan = Optimal.fit_joint(self.SIZES, 3, max={"s": 8}, beyond={"s": Pow2()})
        assert plan == {"b": Optimal([32]), "s": Optimal([8], beyond=Pow2())}

    def test_follows_the_cost(self):
        plan = Optimal.fit_joint(self.SIZES, 2, cost=lambda b, s: s)
        assert len(plan["b"].boundaries) == 1 and len(plan["s"].boundaries) == 2

    def test_takes_options_by_variable(self):
        plan = Optimal.fit_joint(
            self.SIZES, 4, multiple_of={"s": 16}, max={"b": 64}, beyond={"s": Pow2()}
        )
        assert plan["b"].boundaries[-1] == 64
        assert all(n % 16 == 0 for n in plan["s"].boundaries)
        assert plan["s"].bucket(1000) == 1024
        with pytest.raises(BucketOverflowError):
            plan["b"].bucket(65)

    @pytest.mark.parametrize(
        "options, error, message",
        [
            ({"k": 0}, ValueError, "k must be a positive int"),
            (
                {"max": {"t": 8}},
                TypeError,
                r"max must be a mapping .* \['b', 's'\], not \{'t': 8\}",
            ),
            ({"max": 8}, TypeError, "max must be a mapping"),
            (
                {"max": {"s": 50}},
                ValueError,
                r"sizes\['s'\] must not be beyond max \(50\), not 100",
            ),
            ({"max": {"s": 1.5}}, TypeError, r"max\['s'\] must be a positive int"),
            ({"multiple_of": {"s": 0}}, ValueError, r"multiple_of\['s'\] must be a positive int"),
            ({"beyond": {"s": 8}}, StrategyContractError, r"beyond\['s'\] must be an object"),
            ({"cost": lambda b, s: None}, TypeError, "must return a number for b=3, s=10"),
        ],
    )
    def test_wrong_options_are_refused(self, options, error, message):
        with pytest.raises(error, match=message):
            Optimal.fit_joint(self.SIZES, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"multiple_of": 2**70},
            "must be below 2\\*\\*63, not 1180591620717411303424: multiple_of is",
        ),
        ({"max": 2**63}, "must be below 2\\*\\*63, not 9223372036854775808: max is given as such"),
    ],
)
def test_a_bucket_fits_a_shape(options, message):
    with pytest.raises(ValueError, match=message):
        Optimal.fit([3, 5, 9], k=2, **options)
