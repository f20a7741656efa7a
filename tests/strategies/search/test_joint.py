import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketjit.strategies import Optimal
from bucketjit.strategies._search import grid, table
from bucketjit.strategies._search.boxes import cheapest_boxes
from bucketjit.strategies._search.grid import cheapest_grid
from bucketjit.strategies._search.histogram import joint_histogram
from bucketjit.strategies._search.table import lay_out
from tests.strategies.search import brute

COSTS = [None, lambda b, s: b * s * s, lambda b, s: 30 + b * s, lambda b, s: 7]


def small_table(rows, cost=None):
    b, s = zip(*rows, strict=True)
    seen = joint_histogram({"b": b, "s": s})
    return lay_out(seen, cost, (1, 1), (max(b), max(s)))


tables = st.builds(
    small_table,
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([3, 5, 8, 20])), min_size=1, max_size=20),
    st.sampled_from(COSTS),
)


# Both are local searches, so no new instances at every run.
few = settings(max_examples=60, deadline=None, derandomize=True)


@few
@given(tables, st.integers(1, 6))
def test_the_grid_is_near_the_best(candidates, k):
    grid = cheapest_grid(candidates, k)
    assert brute.grid_cells(candidates, grid) <= k
    found, best = brute.grid_cost(candidates, grid), brute.best_grid_cost(candidates, k)
    assert best <= found * (1 + 1e-12)
    assert found <= 1.2 * best


@few
@given(tables, st.integers(1, 4))
def test_the_boxes_are_near_the_best(candidates, k):
    boxes = cheapest_boxes(candidates, k)
    assert len(boxes) <= k
    found, best = brute.boxes_cost(candidates, boxes), brute.best_boxes_cost(candidates, k)
    assert best <= found * (1 + 1e-12)
    assert found <= 1.2 * best


def test_most_small_instances_are_solved_exactly():
    rng = np.random.default_rng(0)
    grids = boxes = 0
    for i in range(40):
        rows = rng.integers(1, 5, (int(rng.integers(3, 20)), 2)) ** (1, 2)
        candidates, k = small_table(rows.tolist(), COSTS[i % 3]), int(rng.integers(2, 5))
        grid = brute.grid_cost(candidates, cheapest_grid(candidates, k))
        grids += grid <= brute.best_grid_cost(candidates, k) * (1 + 1e-12)
        box = brute.boxes_cost(candidates, cheapest_boxes(candidates, k))
        best = brute.best_boxes_cost(candidates, k)
        boxes += box <= best * (1 + 1e-12)
    assert grids >= 38
    assert boxes >= 38


def test_three_variables():
    rng = np.random.default_rng(1)
    sizes = {dim: rng.integers(1, 4, 12) ** 2 for dim in "bhw"}
    candidates = lay_out(joint_histogram(sizes), None, (1, 1, 1), (9, 9, 9))
    found = cheapest_grid(candidates, 6)
    assert brute.grid_cost(candidates, found) <= 1.05 * brute.best_grid_cost(candidates, 6)


def test_of_four_variables_some_numbers_of_boundaries_are_tried(monkeypatch):
    rng = np.random.default_rng(1)
    sizes = {dim: rng.integers(1, 4, 12) ** 2 for dim in "bchw"}
    candidates = lay_out(joint_histogram(sizes), None, (1,) * 4, (9,) * 4)
    best = brute.best_grid_cost(candidates, 6)
    for most, tried in ((27, [1, 2, 3]), (8, [1, 3]), (2, [1])):
        monkeypatch.setattr(grid, "_MOST_SHAPES", most)
        assert grid._numbers([3, 3, 3]) == [tried] * 3
        assert brute.grid_cost(candidates, cheapest_grid(candidates, 6)) <= 1.2 * best
    assert grid._numbers([8, 2, 1]) == [[1], [1], [1]]
    monkeypatch.setattr(grid, "_MOST_SHAPES", 8)
    assert grid._numbers([8, 2, 1]) == [[1, 2, 4, 8], [1, 2], [1]]


def test_of_many_variables_one_may_have_all_boundaries():
    rng = np.random.default_rng(3)
    sizes = {f"v{i}": rng.integers(1, 3, 60) for i in range(9)} | {"v0": rng.integers(1, 30, 60)}
    candidates = lay_out(joint_histogram(sizes), None, (1,) * 9, (29, *(2,) * 8))
    wide = tuple(range(len(axis) - 1, -1, -max(1, len(axis) // 8)) for axis in candidates.sizes)
    one = (tuple(sorted(wide[0]))[-8:], *((len(axis) - 1,) for axis in candidates.sizes[1:]))
    found = cheapest_grid(candidates, 8)
    assert brute.grid_cost(candidates, found) <= brute.grid_cost(candidates, one)


def test_joint_costs_have_a_sum():
    with pytest.raises(ValueError, match="must have a sum that a float can hold"):
        Optimal.fit_joint({"a": [1, 2, 3], "b": [1, 2, 3]}, k=2, cost=lambda **_: 1e308)


def test_many_sizes_become_few_candidates(monkeypatch):
    monkeypatch.setattr(table, "_MOST_PAIRS", 10_000)
    rng = np.random.default_rng(2)
    b, s = rng.integers(1, 100, 500), rng.integers(1, 3000, 500)
    candidates = lay_out(joint_histogram({"b": b, "s": s}), None, (1, 8), (99, 3000))
    assert candidates.weights.size * np.count_nonzero(candidates.weights) <= 10_000
    assert candidates.weights.sum() == 500, "no call is lost"
    assert [int(axis[-1]) for axis in candidates.sizes] == [99, 3000]


@pytest.mark.parametrize("axis, message", [(0, "b=4 than for b=2, s=3"), (1, "s=9 than for b=2")])
def test_a_cost_that_falls_is_refused(axis, message):
    def cost(b, s):
        return 100 - (b, s)[axis]

    with pytest.raises(
        ValueError, match=f"must not fall where a size grows, .* less for {message}"
    ):
        small_table([(2, 3), (4, 9)], cost)
