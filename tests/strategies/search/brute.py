"""All possible answers, for instances small enough to try them."""

import itertools

import numpy as np


def plan_cost(boundaries, seen, cost):
    """What sizes (a mapping of size to count) cost, each in the smallest boundary that holds it."""
    return sum(count * cost(min(b for b in boundaries if b >= n)) for n, count in seen.items())


def boundary_choices(candidates, k):
    """All choices of at most k of the candidates that hold the largest one."""
    *some, last = sorted(set(candidates))
    for number in range(min(k, len(some) + 1)):
        for chosen in itertools.combinations(some, number):
            yield (*chosen, last)


def grid_cost(weights, costs, grid):
    """What all calls cost on a grid of boundaries, given as positions."""
    total = 0.0
    for at in np.argwhere(weights):
        ends = tuple(min(e for e in axis if e >= i) for axis, i in zip(grid, at, strict=True))
        total += weights[tuple(at)] * costs[ends]
    return total


def grid_cells(weights, grid):
    """How many combinations of boundaries occur."""
    return len(
        {
            tuple(min(e for e in axis if e >= i) for axis, i in zip(grid, at, strict=True))
            for at in np.argwhere(weights)
        }
    )


def best_grid_cost(weights, costs, k):
    axes = [list(boundary_choices(range(n), k)) for n in weights.shape]
    return min(
        grid_cost(weights, costs, grid)
        for grid in itertools.product(*axes)
        if grid_cells(weights, grid) <= k
    )
