import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketjit.strategies._search.partition import cheapest_boundaries, cheapest_groups
from tests.strategies.search.brute import boundary_choices


def runs_cost(ends, weights, costs, fixed):
    starts = [0, *(end + 1 for end in ends[:-1])]
    return sum(
        fixed[end] + costs[end] @ weights[start : end + 1].sum(axis=0)
        for start, end in zip(starts, ends, strict=True)
    )


@st.composite
def instances(draw):
    m, columns = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    small = st.integers(0, 6)
    matrix = st.lists(st.lists(small, min_size=columns, max_size=columns), min_size=m, max_size=m)
    weights = np.array(draw(matrix), float)
    costs = np.cumsum(np.array(draw(matrix), float), axis=0)
    fixed = np.array(draw(st.lists(st.sampled_from([0, 3, 40]), min_size=m, max_size=m)), float)
    return weights, costs, fixed, draw(st.integers(1, 8))


@settings(deadline=None)
@given(instances())
def test_no_other_groups_are_cheaper(instance):
    weights, costs, fixed, k = instance
    ends = cheapest_groups(weights, costs, k, fixed).tolist()
    assert ends == sorted(set(ends)) and len(ends) <= k and ends[-1] == len(costs) - 1
    least = min(runs_cost(c, weights, costs, fixed) for c in boundary_choices(range(len(costs)), k))
    assert runs_cost(ends, weights, costs, fixed) == least


@settings(deadline=None)
@given(instances())
def test_of_equally_cheap_cuts_the_one_with_fewest_runs(instance):
    weights, costs, fixed, k = instance
    ends = cheapest_groups(weights, costs, k, fixed).tolist()
    cost = runs_cost(ends, weights, costs, fixed)
    if len(ends) > 1:
        fewer = boundary_choices(range(len(costs)), len(ends) - 1)
        assert all(runs_cost(c, weights, costs, fixed) > cost for c in fewer)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(1, 7),
    st.sampled_from([0.0, 2.0]),
)
def test_boundaries_are_best_for_costs_that_fall_too(rows, k, fixed):
    weights, costs = np.array(rows, float).T
    sizes = np.arange(len(rows)) * 3 + 5

    def total(boundaries):
        """Each size goes to the cheapest boundary that holds it, were that allowed."""
        return fixed * len(boundaries) + sum(
            w * min(costs[b] for b in boundaries if b >= i) for i, w in enumerate(weights)
        )

    def contract(boundaries):
        """Each size goes to the smallest boundary that holds it, as a strategy does."""
        return fixed * len(boundaries) + sum(
            w * costs[min(b for b in boundaries if b >= i)] for i, w in enumerate(weights)
        )

    found = [int(n - 5) // 3 for n in cheapest_boundaries(sizes, weights, costs, k, fixed)]
    assert contract(found) == min(map(total, boundary_choices(range(len(rows)), k)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_large_instances_equal_the_plain_dynamic_program(seed, k):
    rng = np.random.default_rng(seed)
    m = int(rng.integers(50, 200))
    sizes = np.cumsum(rng.integers(1, 20, m)).astype(float)
    weights = rng.integers(0, 50, m).astype(float)
    below = np.concatenate([[0.0], np.cumsum(weights)])
    best = np.concatenate([[0.0], np.full(m, np.inf)])
    runs = np.concatenate([[0.0], sizes])[None] * np.maximum(below[None] - below[:, None], 0)
    runs[np.tril_indices(m + 1)] = np.inf
    for _ in range(k):
        best = np.minimum(best, (best[:, None] + runs).min(axis=0))
    ends = cheapest_groups(weights[:, None], sizes[:, None], k).tolist()
    assert runs_cost(ends, weights[:, None], sizes[:, None], np.zeros(m)) == best[m]


@pytest.mark.parametrize("k", [1, 2, 5, 6, 100])
def test_more_groups_than_positions_are_no_use(k):
    costs = np.arange(1.0, 6.0)[:, None]
    assert len(cheapest_groups(np.ones((5, 1)), costs, k)) == min(k, 5)


def test_the_work_grows_with_m_log_m(monkeypatch):
    """Counted, not timed: how many candidates the search looks at."""
    looked_at = itertools.count()
    add = np.einsum

    def counting(spec, costs, weights):
        for _ in costs:
            next(looked_at)
        return add(spec, costs, weights)

    monkeypatch.setattr(np, "einsum", counting)
    m, k = 2000, 4
    cheapest_groups(np.ones((m, 1)), np.arange(1.0, m + 1)[:, None], k)
    assert next(looked_at) < k * 2 * m * np.log2(m)
