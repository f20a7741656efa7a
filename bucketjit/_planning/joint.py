"""Buckets for several variables together: a grid of boundaries, or boxes placed freely.

Both searches work on a table of candidate sizes, with the cost and the weight of each combination.
Finding the best grid or the best boxes is a hard problem (rectangular partition), so both are
local searches; `tests/planning` compares them with all possible answers on small instances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bucketjit._planning.costs import JointCost, joint_costs_of
from bucketjit._planning.histogram import Floats, Ints, JointHistogram, weigh
from bucketjit._planning.partition import cheapest_groups

# How many (box, call) pairs one step of the search for boxes may look at: some 10 ms of work.
_MOST_PAIRS = 2_000_000
_MOST_COMBINATIONS = 20_000
_GRIDS_IMPROVED = 4

Flags = np.ndarray[Any, np.dtype[np.bool_]]
_Numbers = TypeVar("_Numbers", Floats, Ints)


class Table(NamedTuple):
    """Candidate sizes of ``d`` variables, and each combination's weight and cost.

    Attributes:
        sizes: The candidate sizes of each variable, in increasing order.
        weights: How many calls each combination is the least bucket of, of shape ``(n1, .. nd)``.
        costs: What one call in that bucket costs, of the same shape; never less than for a
            combination of smaller sizes.
    """

    sizes: tuple[Ints, ...]
    weights: Floats
    costs: Floats


def table(
    histogram: JointHistogram,
    cost: JointCost | None,
    multiples: Sequence[int],
    largest: Sequence[int],
) -> Table:
    """Lay out the candidates.

    Every size that occurs, rounded up, is a candidate; where the searches would take too long,
    the best few of each variable are.

    Args:
        histogram: What occurred; combinations with a size beyond the largest are left out.
        cost: What a call costs, asked with the padded sizes by name; None for their product.
        multiples: What to round sizes up to multiples of, by variable.
        largest: The largest bucket of each variable.

    Raises:
        TypeError: If ``cost`` cannot be called, or returns no number.
        ValueError: If a cost is negative or not finite, or a larger call costs less.
    """
    fits = (histogram.points <= np.array(largest)).all(axis=1)
    points, counts = histogram.points[fits], histogram.counts[fits]
    points = -(-points // np.array(multiples)) * np.array(multiples)
    most = _MOST_COMBINATIONS
    while True:
        each = max(2, int(most ** (1 / len(largest))))
        sizes = tuple(
            _candidates(points[:, axis], counts, top, each) for axis, top in enumerate(largest)
        )
        weights = np.zeros(tuple(map(len, sizes)))
        where = tuple(np.searchsorted(s, points[:, axis]) for axis, s in enumerate(sizes))
        np.add.at(weights, where, counts)
        if each == 2 or weights.size * np.count_nonzero(weights) <= _MOST_PAIRS:
            return Table(sizes, weights, _costs(histogram.dims, sizes, cost))
        most = min(most, weights.size) * 3 // 4


def _candidates(sizes: Ints, counts: Floats, largest: int, most: int) -> Ints:
    """The sizes worth a boundary of one variable: all of them, or the best few."""
    distinct, where = np.unique(np.append(sizes, largest), return_inverse=True)
    if len(distinct) <= most:
        return distinct
    weights = weigh(where, np.append(counts, 0.0))
    kept = cheapest_groups(weights[:, None], distinct[:, None].astype(np.float64), most)
    return distinct[kept]


def _costs(dims: tuple[str, ...], sizes: tuple[Ints, ...], cost: JointCost | None) -> Floats:
    """The cost of each combination; where a size grows it must not fall."""
    combinations = itertools.product(*(s.tolist() for s in sizes))
    costs = joint_costs_of(dims, combinations, cost).reshape(tuple(map(len, sizes)))
    for axis, dim in enumerate(dims):
        falls = np.argwhere(np.diff(costs, axis=axis) < 0)
        if len(falls):
            at = [int(s[i]) for s, i in zip(sizes, falls[0], strict=True)]
            larger = int(sizes[axis][falls[0][axis] + 1])
            where = ", ".join(f"{d}={n}" for d, n in zip(dims, at, strict=True))
            raise ValueError(
                f"cost must not fall where a size grows, but it is less for {dim}={larger} than "
                f"for {where}; smooth a cost that was measured"
            )
    return costs


# --- A grid: boundaries for each variable ----------------------------------------------------


Grid = tuple[tuple[int, ...], ...]


def cheapest_grid(candidates: Table, k: int) -> Grid:
    """Boundaries for each variable, of which at most ``k`` combinations occur.

    For so and so many boundaries of each variable, those of one are best given those of the
    others (`cheapest_groups` finds them exactly), in turn, until nothing improves. The best of
    these grids are then improved boundary by boundary.

    Returns:
        The boundaries of each variable, as positions in its candidates.
    """
    search = _Grids(candidates, k)
    starts = sorted(search.starts(), key=search.cost)[:_GRIDS_IMPROVED]
    return min(map(search.improve, starts), key=search.cost)


class _Grids:
    """The search for a grid."""

    def __init__(self, candidates: Table, k: int) -> None:
        self._costs, self._k = candidates.costs, k
        self._shape = candidates.weights.shape
        # Up to each combination: how many calls there are, and how many combinations with any.
        self._calls = candidates.weights
        self._points = (candidates.weights > 0).astype(np.int64)
        for axis in range(len(self._shape)):
            self._calls = np.cumsum(self._calls, axis=axis)
            self._points = np.cumsum(self._points, axis=axis)

    def cost(self, grid: Grid) -> float:
        """What all calls cost."""
        return float(np.sum(_cells(self._calls, grid) * self._costs[np.ix_(*grid)]))

    def count(self, grid: Grid) -> int:
        """How many combinations of its boundaries occur."""
        return int(np.count_nonzero(_cells(self._points, grid)))

    def starts(self) -> set[Grid]:
        """Grids of many shapes, from those with ``k`` combinations on while enough stay empty."""
        *some, last = self._shape
        found: set[Grid] = {tuple((n - 1,) for n in self._shape)}
        for numbers in itertools.product(*(range(1, min(self._k, n) + 1) for n in some)):
            fewest = max(1, min(self._k // math.prod(numbers), last))
            for number in range(fewest, min(self._k, last) + 1):
                grids = [g for g in self._fitted((*numbers, number)) if self.count(g) <= self._k]
                if not grids:
                    break
                found.update(grids)
        return found

    def _fitted(self, numbers: Sequence[int]) -> Iterator[Grid]:
        """Grids of so many boundaries that no change of one variable improves."""
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
        """The best boundaries of one variable, given those of the others."""
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
            # Less by more than rounding, so that this ends.
            if not (lower := self.cost(best)) < cost * (1 - 1e-12):
                return grid
            grid, cost = best, lower

    def _one_more(self, grid: Grid, axis: int) -> Grid:
        """The grid with the best boundary more of one variable that ``k`` leaves room for."""
        every = np.arange(self._shape[axis])
        full = _replaced(grid, axis, tuple(every.tolist()))
        calls, points, costs = (
            np.moveaxis(table, axis, 0).reshape(len(every), -1)
            for table in (
                _cells(self._calls, full),
                _cells(self._points, full),
                self._costs[np.ix_(*full)],
            )
        )
        # Each position cuts the run it is in: the part up to it becomes cheaper.
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


def _cells(below: _Numbers, grid: Grid) -> _Numbers:
    """What each combination of boundaries holds, of sums up to each combination of candidates."""
    cells = below[np.ix_(*grid)]
    for axis in range(cells.ndim):
        cells = np.diff(cells, axis=axis, prepend=0)
    return cells


def _replaced(grid: Grid, axis: int, ends: tuple[int, ...]) -> Grid:
    return (*grid[:axis], ends, *grid[axis + 1 :])


# --- Boxes: one bucket each, placed freely ----------------------------------------------------


def cheapest_boxes(candidates: Table, k: int) -> list[tuple[int, ...]]:
    """At most ``k`` buckets with a size for every variable; a call goes to the cheapest it fits.

    The largest candidate of all variables is always one of them, so that every call has one,
    whether or not it occurred. The others are added one by one, each where it saves most (that
    alone gets 1 - 1/e of the possible saving, as the saving is submodular), then moved one by one
    as long as that helps.

    Returns:
        The buckets as positions in the candidates, the cheapest first.
    """
    search = _Boxes(candidates)
    return search.used(search.improve(search.fill(k - 1)))


class _Boxes:
    """The search for boxes. A box is known by its number among all combinations of candidates."""

    def __init__(self, candidates: Table) -> None:
        self._shape = candidates.weights.shape
        points = np.argwhere(candidates.weights)
        self._weights = candidates.weights[candidates.weights > 0]
        self._costs = candidates.costs.ravel()
        boxes = np.indices(self._shape).reshape(len(self._shape), -1).T
        self._holds: Flags = np.all(points[None] <= boxes[:, None], axis=2)  # (boxes, points)

    def _call_costs(self, boxes: Sequence[int]) -> Floats:
        """What a call of each point costs in the cheapest box that holds it, or the largest."""
        largest = self._costs[-1]
        costs = np.where(self._holds[boxes], self._costs[boxes][:, None], largest)
        return costs.min(axis=0, initial=largest)

    def total(self, boxes: Sequence[int]) -> float:
        """What all calls cost."""
        return float(self._call_costs(boxes) @ self._weights)

    def _best_addition(self, boxes: Sequence[int]) -> int:
        """The box that saves most."""
        saved = np.maximum(self._call_costs(boxes) - self._costs[:, None], 0.0)
        return int(np.argmax((saved * self._holds) @ self._weights))

    def fill(self, k: int) -> list[int]:
        """Add up to ``k`` boxes, as long as they save anything."""
        boxes: list[int] = []
        while len(boxes) < k:
            more = [*boxes, self._best_addition(boxes)]
            if not self.total(more) < self.total(boxes):
                break
            boxes = more
        return boxes

    def improve(self, boxes: Sequence[int]) -> list[int]:
        """Move boxes one by one to where they save most, while the total falls."""
        boxes, total, unmoved = list(boxes), self.total(boxes), 0
        while unmoved < len(boxes):
            first, *rest = boxes
            moved = [*rest, self._best_addition(rest)]
            lower = self.total(moved)
            # Less by more than rounding, so that this ends.
            if lower < total * (1 - 1e-12):
                boxes, total, unmoved = moved, lower, 0
            else:
                boxes, unmoved = [*rest, first], unmoved + 1
        return boxes

    def used(self, boxes: Sequence[int]) -> list[tuple[int, ...]]:
        """The boxes that a point goes to, the cheapest first, and the largest of all."""
        every = sorted({*boxes, len(self._costs) - 1}, key=lambda box: (self._costs[box], box))
        first_to_hold = self._holds[every].argmax(axis=0)
        kept = sorted({*first_to_hold.tolist(), len(every) - 1})
        return [tuple(map(int, np.unravel_index(every[i], self._shape))) for i in kept]
