"""Searches for the cheapest grid: boundaries for each variable.

Finding it with certainty is a hard problem (rectangular partition), so this is a local search;
`tests/strategies/search` compares it with all possible answers on small instances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from bucketjit.strategies._search.histogram import Floats, Ints
from bucketjit.strategies._search.partition import cheapest_groups
from bucketjit.strategies._search.table import Table

_STARTS = 4  # grids that are improved boundary by boundary
# Shapes of grids to start from, not counting the numbers of boundaries of the last variable.
_MOST_SHAPES = 150

_Numbers = TypeVar("_Numbers", Floats, Ints)
Grid = tuple[tuple[int, ...], ...]


def cheapest_grid(candidates: Table, k: int) -> Grid:
    """Choose boundaries for each variable, of which at most ``k`` combinations occur.

    For given numbers of boundaries, the boundaries of one variable are fitted exactly
    (`cheapest_groups`) while those of the others are fixed, in turn, until nothing improves. The
    best of these grids are then improved boundary by boundary.

    Args:
        candidates: The candidates.
        k: The largest number of combinations of boundaries that occur.

    Returns:
        The boundaries of each variable, as positions in its candidates.
    """
    search = _Grids(candidates, k)
    starts = sorted(search.starts(), key=lambda grid: (search.cost(grid), grid))
    return min(map(search.improve, starts[:_STARTS]), key=search.cost)


class _Grids:
    """The search for a grid."""

    def __init__(self, candidates: Table, k: int) -> None:
        self._costs, self._k = candidates.costs, k
        self._shape = candidates.weights.shape
        # Cumulative sums over all axes: number of calls, and of combinations with any calls, up to
        # each combination. Differences of them give the sums over any cell of a grid.
        self._calls = candidates.weights
        self._points = (candidates.weights > 0).astype(np.int64)
        for axis in range(len(self._shape)):
            self._calls = np.cumsum(self._calls, axis=axis)
            self._points = np.cumsum(self._points, axis=axis)

    def cost(self, grid: Grid) -> float:
        """The cost of all calls."""
        return float(np.sum(_cells(self._calls, grid) * self._costs[np.ix_(*grid)]))

    def count(self, grid: Grid) -> int:
        """The number of combinations of its boundaries that occur."""
        return int(np.count_nonzero(_cells(self._points, grid)))

    def starts(self) -> set[Grid]:
        """Grids of many shapes, each with at most ``k`` combinations that occur.

        Shapes start with ``k`` combinations in all. The number of boundaries of the last variable
        is then raised as long as enough combinations stay empty. There may be too many shapes to
        try all; those with all boundaries in one variable are always tried.
        """
        *some, last = self._shape
        found: set[Grid] = {tuple((n - 1,) for n in self._shape)}
        tops = [min(self._k, n) for n in some]
        for others in itertools.product(*_numbers(tops)):
            fewest = max(1, min(self._k // math.prod(others), last))
            for number in range(fewest, min(self._k, last) + 1):
                grids = [g for g in self._fitted((*others, number)) if self.count(g) <= self._k]
                if not grids:
                    break
                found.update(grids)
        for axis, size in enumerate(self._shape):
            numbers = [1] * len(self._shape)
            numbers[axis] = min(self._k, size)
            found.update(g for g in self._fitted(numbers) if self.count(g) <= self._k)
        return found

    def _fitted(self, numbers: Sequence[int]) -> Iterator[Grid]:
        """Grids of given numbers of boundaries that no change of one variable improves."""
        axes = range(len(numbers))
        for first in axes:
            # The first variable is cut as if all others were not padded.
            grid: Grid = tuple(tuple(range(n)) for n in self._shape)
            cost = math.inf
            while True:
                for axis in (*axes[first:], *axes[:first]):
                    grid = _replaced(grid, axis, self._cut(grid, axis, numbers[axis]))
                if not (cut := self.cost(grid)) < cost:
                    break
                cost = cut
            yield grid

    def _cut(self, grid: Grid, axis: int, k: int) -> tuple[int, ...]:
        """The best ``k`` boundaries of one variable while those of the others are fixed."""
        every = _replaced(grid, axis, tuple(range(self._shape[axis])))
        weights, costs = _cells(self._calls, every), self._costs[np.ix_(*every)]
        rows = self._shape[axis]
        ends = cheapest_groups(
            np.moveaxis(weights, axis, 0).reshape(rows, -1),
            np.moveaxis(costs, axis, 0).reshape(rows, -1),
            k,
        )
        return tuple(ends.tolist())

    def improve(self, grid: Grid) -> Grid:
        """Add a boundary, or move one within its variable or to another, while that helps."""
        cost = self.cost(grid)
        while True:
            fewer = [
                _replaced(grid, axis, tuple(e for e in ends if e != end))
                for axis, ends in enumerate(grid)
                for end in ends[:-1]
            ]
            best = min(
                (
                    self._one_more(base, axis)
                    for base in (grid, *fewer)
                    for axis in range(len(grid))
                ),
                key=self.cost,
            )
            # By more than rounding errors; else the loop might not end.
            if not (lower := self.cost(best)) < cost * (1 - 1e-12):
                return grid
            grid, cost = best, lower

    def _one_more(self, grid: Grid, axis: int) -> Grid:
        """The grid with one more boundary of a variable: the best that ``k`` leaves room for."""
        every = np.arange(self._shape[axis])
        full = _replaced(grid, axis, tuple(every.tolist()))
        calls, points, costs = (
            np.moveaxis(part, axis, 0).reshape(len(every), -1)
            for part in (
                _cells(self._calls, full),
                _cells(self._points, full),
                self._costs[np.ix_(*full)],
            )
        )
        # A new boundary at a position cuts its run in two: the part up to it becomes cheaper.
        ends = np.array(grid[axis])
        run = np.searchsorted(ends, every)
        after, before = ends[run], np.concatenate([[-1], ends[:-1]])[run]
        calls, points = (
            np.concatenate([np.zeros_like(part[:1]), np.cumsum(part, axis=0)])
            for part in (calls, points)
        )
        change = np.sum(
            (calls[every + 1] - calls[before + 1]) * (costs[every] - costs[after]), axis=1
        )
        lower = points[every + 1] > points[before + 1]
        upper = points[after + 1] > points[every + 1]
        split = np.count_nonzero(lower & upper, axis=1)
        change[self.count(grid) + split > self._k] = np.inf
        return _replaced(grid, axis, tuple(sorted({*grid[axis], int(np.argmin(change))})))


def _numbers(tops: Sequence[int]) -> list[list[int]]:
    """Numbers of boundaries to try for each variable: all, or some in a geometric sequence."""
    every = [list(range(1, top + 1)) for top in tops]
    for count in range(max(tops, default=1), 0, -1):
        tried = [
            own if count >= len(own) else sorted({round(n) for n in np.geomspace(1, top, count)})
            for own, top in zip(every, tops, strict=True)
        ]
        if math.prod(map(len, tried)) <= _MOST_SHAPES:
            break
    return tried


def _cells(below: _Numbers, grid: Grid) -> _Numbers:
    """The sum over each cell of a grid, from cumulative sums over the candidates."""
    cells = below[np.ix_(*grid)]
    for axis in range(cells.ndim):
        cells = np.diff(cells, axis=axis, prepend=0)
    return cells


def _replaced(grid: Grid, axis: int, ends: tuple[int, ...]) -> Grid:
    return (*grid[:axis], ends, *grid[axis + 1 :])
