"""The coordinate descent, beside all possible grids and on logs like those that people have."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketjit.strategies import assess_joint, fit
from bucketjit.strategies._search import cheapest_grid
from tests.strategies.search import brute

COSTS = [lambda b, s: b * s, lambda b, s: b * s * s, lambda b, s: 30 + b * s, lambda b, s: 7 - b]


def small(rows, cost):
    """Weights and costs of calls, with each size that occurs as a candidate."""
    axes, where = zip(*(np.unique(c, return_inverse=True) for c in np.transpose(rows)), strict=True)
    weights = np.zeros(tuple(map(len, axes)))
    np.add.at(weights, where, 1.0)
    return weights, np.asarray(cost(*np.meshgrid(*axes, indexing="ij")), float)


# It is a local search, so no new instances at every run.
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([3, 5, 8, 20])), min_size=1, max_size=20),
    st.sampled_from(COSTS),
    st.integers(1, 6),
)
def test_it_is_near_the_best(rows, cost, k):
    weights, costs = small(rows, cost)
    grid = cheapest_grid(weights, costs, k)
    assert brute.grid_cells(weights, grid) <= k
    found, best = brute.grid_cost(weights, costs, grid), brute.best_grid_cost(weights, costs, k)
    assert best * (1 - 1e-12) <= found <= 1.2 * best


@pytest.mark.parametrize(("count", "within"), [(3, 1.05), (4, 1.2)])
def test_more_variables(count, within):
    rows = np.random.default_rng(1).integers(1, 4, (12, count)) ** 2
    weights, costs = small(rows, lambda *sizes: np.prod(sizes, axis=0))
    grid = cheapest_grid(weights, costs, 6)
    assert brute.grid_cells(weights, grid) <= 6
    best = brute.best_grid_cost(weights, costs, 6)
    assert brute.grid_cost(weights, costs, grid) <= within * best


def logs():
    """Sizes of calls, and how much the grid of 12 executables may pad over what is real."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 0.8, 10_000).astype(int) + 1
    pixels = np.array([64, 96, 128, 160, 224])
    batches, few = rng.integers(1, 33, 1000), np.where(rng.random(2000) < 0.02, 7, 32)
    images = {"b": rng.integers(1, 9, 900), **{d: rng.choice(pixels, 900) for d in "hw"}}
    return {
        "independent": ({"b": batches, "s": lengths[:1000]}, 2.1),
        "token budget": ({"b": np.maximum(1, 8192 // lengths), "s": lengths}, 1.7),
        "last batches": ({"b": few, "s": lengths[:2000]}, 1.3),
        "images": (images, 1.9),
    }


@pytest.mark.parametrize("name", logs())
def test_logs(name):
    sizes, most = logs()[name]
    began = time.process_time()
    plan = assess_joint(fit(sizes, 12), sizes)
    assert time.process_time() - began < 15  # 1 s where nothing else runs
    assert plan.executables <= 12 and plan.padded < most * plan.exact


def test_many_sizes_become_few_candidates():
    rng = np.random.default_rng(2)
    sizes = {"b": rng.integers(1, 1000, 5000), "s": rng.integers(1, 30_000, 5000)}
    asked = []
    plan = fit(sizes, 4, multiple_of={"s": 8}, cost=lambda b, s: asked.append(0) or b * s)
    assert 1000 < len(asked) <= 10_000
    assert plan["b"].boundaries[-1] == max(sizes["b"])
    assert plan["s"].boundaries[-1] == -(-max(sizes["s"]) // 8) * 8
    assert assess_joint(plan, sizes).executables <= 4
