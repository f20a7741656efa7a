import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketjit.errors import BucketOverflowError, StrategyContractError
from bucketjit.strategies import Boundaries, Joint, Linear, Optimal, Pow2, assess_joint

SIZES = {"b": [32, 32, 31, 4, 4, 3], "s": [10, 12, 11, 100, 90, 95]}
PLAN = Joint([{"b": 32, "s": 12}, {"b": 4, "s": 100}, {"b": 32, "s": 100}])

points = st.tuples(st.integers(0, 12), st.integers(0, 60))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.booleans(),
    points,
    points,
)
def test_contract(seen, k, extend, one, two):
    """Large enough, its own bucket, and no dearer than that of larger sizes."""
    beyond = {"b": Linear(5), "s": Pow2()} if extend else None
    plan = Joint.fit(dict(zip("bs", zip(*seen, strict=True), strict=True)), k, beyond=beyond)
    assert len(plan.buckets) <= k
    larger = tuple(map(max, one, two))
    if not extend:
        top = plan.buckets[-1]
        one, larger = tuple(map(min, one, top)), tuple(map(min, larger, top))
    small, large = (plan.bucket_of(dict(zip("bs", p, strict=True))) for p in (one, larger))
    assert tuple(small) == ("b", "s")
    assert small["b"] >= one[0] and small["s"] >= one[1]
    assert plan.bucket_of(small) == small
    assert small["b"] * small["s"] <= large["b"] * large["s"]


def test_places_buckets_where_calls_are():
    assert Joint.fit(SIZES, 3) == PLAN
    assert assess_joint(PLAN, SIZES).waste < 0.12


def test_never_needs_more_executables_than_k():
    rng = np.random.default_rng(0)
    seen = {"b": rng.integers(1, 33, 40), "s": rng.lognormal(4, 0.7, 40).astype(int) + 1}
    joint, grid = Joint.fit(seen, 6), Optimal.fit_joint(seen, 6)
    other = {dim: np.minimum(rng.permutation(column), column.max()) for dim, column in seen.items()}
    assert assess_joint(joint, other).executables <= 6 < assess_joint(grid, other).executables
    assert assess_joint(joint, seen).waste < assess_joint({"b": Pow2(), "s": Pow2()}, seen).waste


def test_every_combination_within_the_range_has_a_bucket():
    plan = Joint.fit(SIZES, 2)
    assert plan.bucket_of({"b": 32, "s": 100}) == {"b": 32, "s": 100}


def test_the_order_of_the_sizes_is_kept():
    assert list(PLAN.bucket_of({"s": 17, "b": 3}).items()) == [("s", 100), ("b", 4)]


def test_takes_options_by_variable():
    plan = Joint.fit(SIZES, 4, multiple_of={"s": 16}, max={"b": 64}, beyond={"s": Linear(10)})
    assert plan.buckets[-1] == (64, 112)
    assert all(s % 16 == 0 for _, s in plan.buckets)
    assert plan.bucket_of({"b": 3, "s": 113}) == {"b": 64, "s": 128}
    with pytest.raises(BucketOverflowError, match="dimension 'b' has size 65, .* bucket 64"):
        plan.bucket_of({"b": 65, "s": 1})


def test_counts_of_a_single_variable():
    assert Joint.fit({"b": {3: 90, 5: 1, 6: 5}}, 2) == Joint.fit({"b": [3] * 90 + [5] + [6] * 5}, 2)


def test_the_end_of_those_beyond_names_the_variable_and_the_largest_of_all():
    plan = Joint([{"b": 8, "s": 16}], beyond={"s": Boundaries([20, 40]), "b": Boundaries([4])})
    assert plan.bucket_of({"b": 3, "s": 17}) == {"b": 8, "s": 20}
    for dim, n, largest in (("s", 41, 40), ("b", 9, 8)):
        with pytest.raises(BucketOverflowError) as caught:
            plan.bucket_of({"b": 1, "s": 1, dim: n})
        error = caught.value
        assert (error.dim, error.size, error.largest) == (dim, n, largest)


def test_may_leave_all_calls_to_others():
    plan = Joint.fit(SIZES, 3, max={"s": 8}, beyond={"s": Pow2()})
    assert plan == Joint([{"b": 32, "s": 8}], beyond={"s": Pow2()})
    assert plan.bucket_of({"b": 3, "s": 9}) == {"b": 32, "s": 16}


def test_is_a_value():
    for plan in (PLAN, Joint([{"n": 8}], beyond={"n": Pow2()})):
        twin = eval(repr(plan))
        assert twin == plan and hash(twin) == hash(plan)
        assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.buckets = ()


@pytest.mark.parametrize(
    "buckets, beyond, error, message",
    [
        ({"b": 8}, None, TypeError, "buckets must be a sequence of mappings from variables"),
        ([8], None, TypeError, "buckets must be a sequence of mappings"),
        ([], None, ValueError, "buckets must hold at least one bucket of a variable"),
        ([{}], None, ValueError, "at least one bucket of a variable"),
        ([{"b": 8}, {"s": 8}], None, ValueError, r"buckets\[1\] must have the variables \['b'\]"),
        ([{"b": 0}], None, ValueError, r"buckets\[0\]\['b'\] must be a positive int, not 0"),
        ([{"b": 8}, {"b": 4}], None, ValueError, r"buckets\[1\] is never used: buckets\[0\] holds"),
        (
            [{"b": 8, "s": 1}, {"b": 4, "s": 9}],
            None,
            ValueError,
            r"the last of the buckets must hold all others, not buckets\[0\]",
        ),
        ([{"b": 8}], {"s": Pow2()}, TypeError, r"beyond must map variables of \['b'\]"),
        ([{"b": 8}], {"b": 16}, StrategyContractError, r"beyond\['b'\] must be an object"),
    ],
)
def test_wrong_buckets_are_refused(buckets, beyond, error, message):
    with pytest.raises(error, match=message):
        Joint(buckets, beyond=beyond)


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ({"b": 3}, ValueError, r"sizes must be of the variables \['b', 's'\], not \{'b': 3\}"),
        ({"b": 3, "s": -1}, ValueError, "a size must not be negative"),
        ({"b": 3, "s": 1.0}, TypeError, "a size must be an int"),
    ],
)
def test_wrong_sizes_are_refused(sizes, error, message):
    with pytest.raises(error, match=message):
        PLAN.bucket_of(sizes)
