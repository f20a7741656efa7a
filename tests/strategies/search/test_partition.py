import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketjit.strategies._search import cheapest_boundaries, cheapest_groups
from tests.strategies.search.brute import boundary_choices


def runs_cost(ends, weights, costs):
    starts = [0, *(end + 1 for end in ends[:-1])]
    return sum(
        costs[end] * weights[start : end + 1].sum() for start, end in zip(starts, ends, strict=True)
    )


rows = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=7)
instances = st.builds(
    lambda rows, k: (np.array(rows, float)[:, 0], np.cumsum(np.array(rows, float)[:, 1]), k),
    rows,
    st.integers(1, 8),
)


@settings(deadline=None)
@given(instances)
def test_no_other_groups_are_cheaper_and_none_so_cheap_are_fewer(instance):
    weights, costs, k = instance
    ends = cheapest_groups(weights, costs, k).tolist()
    assert ends == sorted(set(ends)) and len(ends) <= k and ends[-1] == len(costs) - 1
    least = min(runs_cost(c, weights, costs) for c in boundary_choices(range(len(costs)), k))
    assert runs_cost(ends, weights, costs) == least
    if len(ends) > 1:  # of equally cheap cuts it is the one with the fewest runs
        fewer = boundary_choices(range(len(costs)), len(ends) - 1)
        assert all(runs_cost(c, weights, costs) > least for c in fewer)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(1, 7),
)
def test_boundaries_are_best_for_costs_that_fall_too(rows, k):
    weights, costs = np.array(rows, float).T
    sizes = np.arange(len(rows)) * 3 + 5

    def total(boundaries):
        """Each size goes to the cheapest boundary that holds it, were that allowed."""
        return sum(w * min(costs[b] for b in boundaries if b >= i) for i, w in enumerate(weights))

    def contract(boundaries):
        """Each size goes to the smallest boundary that holds it, as a strategy does."""
        return sum(w * costs[min(b for b in boundaries if b >= i)] for i, w in enumerate(weights))

    found = [int(n - 5) // 3 for n in cheapest_boundaries(sizes, weights, costs, k)]
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
    ends = cheapest_groups(weights, sizes, k).tolist()
    assert runs_cost(ends, weights, sizes) == best[m]


def test_the_work_grows_with_m_log_m(monkeypatch):
    """Counted, not timed: how many candidates the search looks at."""
    looked_at = 0
    find = np.flatnonzero

    def counting(candidates):
        nonlocal looked_at
        looked_at += len(candidates)
        return find(candidates)

    monkeypatch.setattr(np, "flatnonzero", counting)
    m, k = 2000, 4
    cheapest_groups(np.ones(m), np.arange(1.0, m + 1), k)
    assert k * m < looked_at < k * 2 * m * np.log2(m)
