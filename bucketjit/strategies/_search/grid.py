"""Searches for the cheapest grid: boundaries for each of several variables.

Finding it with certainty is a hard problem (rectangular partition), so this is a local search;
`tests/strategies/search` compares it with all possible answers on small instances.
"""

from __future__ import annotations

import numpy as np

from bucketjit.strategies._search.histogram import Floats

Grid = tuple[tuple[int, ...], ...]

_ENOUGH = 1 - 1e-12  # share of the cost that is an improvement, not a rounding error


def cheapest_grid(weights: Floats, costs: Floats, most: int) -> Grid:
    """Choose boundaries for each variable, of which at most ``most`` combinations occur.

    This is a coordinate descent: the boundaries of one variable are cut exactly while those of the
    others are fixed, in turn, until nothing improves. A variable that is cut first takes all
    combinations and leaves none to the others. So the descent is repeated from grids in which one
    variable has fewer of them, until no such grid leads to a cheaper one.
    """
    search = _Grids(weights, costs)
    axes, most = range(weights.ndim), min(most, int(np.count_nonzero(weights)))
    numbers = sorted({max(1, round(most / 1.12**i)) for i in range(64)} & {*range(most + 1)})
    grid: Grid = tuple((n - 1,) for n in weights.shape)
    best, tried = (search.cost(grid), grid), set[Grid]()
    while True:
        before, grid = best
        for axis in axes:
            cuts = {search.cut(grid, axis, number) for number in numbers}
            starts = {cut for cut in cuts if cut is not None} - tried
            tried |= starts
            for start in starts:
                found = (search.descend(start, other, most) for other in axes if other != axis)
                best = min(best, *found)
        if not best[0] < before * _ENOUGH:
            return grid


class _Grids:
    """Grids over candidates of given weights and costs."""

    def __init__(self, weights: Floats, costs: Floats) -> None:
        # The number of calls up to each combination. Differences give those in a cell of a grid.
        self._below, self._costs = weights, costs
        for axis in range(weights.ndim):
            self._below = np.cumsum(self._below, axis=axis)

    def _cells(self, grid: Grid) -> tuple[Floats, Floats]:
        """The number of calls in each cell of a grid, and what one of them costs."""
        calls = self._below[np.ix_(*grid)]
        for axis in range(calls.ndim):
            calls = np.diff(calls, axis=axis, prepend=0)
        return calls, self._costs[np.ix_(*grid)]

    def cost(self, grid: Grid) -> float:
        """The cost of all calls."""
        calls, costs = self._cells(grid)
        return float(np.sum(calls * costs))

    def descend(self, grid: Grid, first: int, most: int) -> tuple[float, Grid]:
        """Cut one variable after the other, from the ``first`` on, until nothing improves."""
        cost = np.inf
        while True:
            for axis in range(first, first + len(grid)):
                grid = self.cut(grid, axis % len(grid), most) or grid
            if not (lower := self.cost(grid)) < cost * _ENOUGH:
                return lower, grid
            cost = lower

    def cut(self, grid: Grid, axis: int, most: int) -> Grid | None:
        """The best boundaries of one variable while those of the others are fixed.

        A dynamic program finds them: the cheapest cut of each prefix of the candidates into runs,
        by the number of combinations that occur in it. It is exact for all costs.
        """
        m = self._below.shape[axis]
        every = (*grid[:axis], tuple(range(m)), *grid[axis + 1 :])
        calls, costs = (np.moveaxis(part, axis, 0).reshape(m, -1) for part in self._cells(every))
        occurs = calls.any(axis=0)
        calls, costs = calls[:, occurs], costs[:, occurs]
        below = np.concatenate([np.zeros((1, calls.shape[1])), np.cumsum(calls, axis=0)])
        # By start and end of a run: its cost, and the number of combinations that occur in it.
        run = np.sum(costs * below[1:], axis=1) - below[:-1] @ costs.T
        used = np.zeros((m, m), np.int64)
        for column in below.T:
            used += column[1:] > column[:-1, None]
        run += used * ((1 - _ENOUGH) * run.max())  # a bucket that saves nothing is left out
        # By length of a prefix and number of combinations; infinite for negative numbers. The view
        # `less` has these costs for all numbers, each less by that of a last run.
        best = np.full((m + 1, 2 * (most + 1)), np.inf)
        less = np.lib.stride_tricks.sliding_window_view(best, most + 1, axis=1)
        best[0, most + 1 :] = 0
        starts = np.zeros((m + 1, most + 1), np.int64)
        shifts = np.maximum(most + 1 - used, 0)
        for end in range(1, m + 1):
            total = less[np.arange(end), shifts[:end, end - 1]] + run[:end, end - 1, None]
            starts[end] = total.argmin(axis=0)
            best[end, most + 1 :] = total.min(axis=0)
        if best[m, -1] == np.inf:
            return None
        ends, end = [], m
        while end:
            ends.append(end - 1)
            end = int(starts[end, most])
            most -= int(used[end, ends[-1]])
        return (*grid[:axis], tuple(ends[::-1]), *grid[axis + 1 :])
