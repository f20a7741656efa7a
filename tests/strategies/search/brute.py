"""All possible answers, for instances small enough to try them."""

import itertools

import numpy as np

from bucketjit.strategies._search.table import Table


def plan_cost(boundaries, seen, cost):
    """What sizes (a mapping of size to count) cost, each in the smallest boundary that holds it."""
    return sum(count * cost(min(b for b in boundaries if b >= n)) for n, count in seen.items())


def boundary_choices(candidates, k):
    """All choices of at most k of the candidates that hold the largest one."""
    *some, last = sorted(set(candidates))
    for number in range(min(k, len(some) + 1)):
        for chosen in itertools.combinations(some, number):
            yield (*chosen, last)


def grid_cost(table: Table, grid):
    """What all calls cost on a grid of boundaries, given as positions."""
    total = 0.0
    for at in np.argwhere(table.weights):
        ends = tuple(min(e for e in axis if e >= i) for axis, i in zip(grid, at, strict=True))
        total += table.weights[tuple(at)] * table.costs[ends]
    return total


def grid_cells(table: Table, grid):
    """How many combinations of boundaries occur."""
    return len(
        {
            tuple(min(e for e in axis if e >= i) for axis, i in zip(grid, at, strict=True))
            for at in np.argwhere(table.weights)
        }
    )


def best_grid_cost(table: Table, k):
    axes = [list(boundary_choices(range(n), k)) for n in table.weights.shape]
    return min(
        grid_cost(table, grid) for grid in itertools.product(*axes) if grid_cells(table, grid) <= k
    )


def boxes_cost(table: Table, boxes):
    """What all calls cost, each in the cheapest box that holds it."""
    return sum(
        table.weights[tuple(at)]
        * min(table.costs[tuple(b)] for b in boxes if np.all(np.asarray(b) >= at))
        for at in np.argwhere(table.weights)
    )


def best_boxes_cost(table: Table, k):
    """With one box that holds all, as the search has it."""
    every = list(itertools.product(*map(range, table.weights.shape)))
    number = min(k, len(every)) - 1
    return min(
        boxes_cost(table, [*some, every[-1]]) for some in itertools.combinations(every[:-1], number)
    )
