"""Buckets for several variables together: a grid of boundaries, or boxes placed freely.

Both searches work on a table of candidate sizes, with the cost and the weight of each combination.
Finding the best grid or the best boxes is a hard problem (rectangular partition), so both are
local searches; `tests/planning` compares them with all possible answers on small instances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bucketjit._planning.costs import JointCost, joint_costs_of
from bucketjit._planning.histogram import Floats, Ints, JointHistogram, weigh
from bucketjit._planning.partition import cheapest_groups

# How many (box, call) pairs one step of the search for boxes may look at: some 10 ms of work.
_MOST_PAIRS = 2_000_000
_MOST_COMBINATIONS = 20_000

Flags = np.ndarray[Any, np.dtype[np.bool_]]


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


def cheapest_grid(candidates: Table, k: int) -> list[Ints]:
    """Boundaries for each variable, with at most ``k`` combinations of them.

    For each way to divide ``k`` among the variables: boundaries of one variable are best given
    those of the others (`cheapest_groups` finds them exactly), in turn, until nothing improves.

    Returns:
        The boundaries of each variable, as positions in its candidates.
    """
    shape = candidates.weights.shape
    every = [np.arange(n) for n in shape]
    best, least = [np.array([n - 1]) for n in shape], math.inf
    for numbers in _divisions(k, shape):
        for first in range(len(shape)):
            # The first variable is cut as if all others were not padded.
            grid, cost = list(every), math.inf
            order = [*range(first, len(shape)), *range(first)]
            while True:
                for axis in order:
                    grid[axis] = _cut_axis(candidates, grid, axis, numbers[axis])
                improved = _grid_cost(candidates, grid)
                if not improved < cost:
                    break
                cost = improved
            if cost < least:
                best, least = grid, cost
    return best


def _divisions(k: int, shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of boundaries whose product is at most ``k``; none of them could be larger."""
    *some, last = shape
    for numbers in itertools.product(*(range(1, min(k, n) + 1) for n in some)):
        rest = k // math.prod(numbers)
        division = (*numbers, min(rest, last))
        product = math.prod(division)
        larger = (
            n < size and product // n * (n + 1) <= k for n, size in zip(numbers, some, strict=True)
        )
        if rest and not any(larger):
            yield division


def _cut_axis(candidates: Table, grid: Sequence[Ints], axis: int, k: int) -> Ints:
    """The best boundaries of one variable, given those of the others."""
    others = [i for i in range(len(grid)) if i != axis]
    weights, costs = candidates.weights, candidates.costs
    for i in others:
        weights = _sum_groups(weights, grid[i], i)
        costs = np.take(costs, grid[i], axis=i)
    rows = weights.shape[axis]
    return cheapest_groups(
        np.moveaxis(weights, axis, 0).reshape(rows, -1),
        np.moveaxis(costs, axis, 0).reshape(rows, -1),
        k,
    )


def _grid_cost(candidates: Table, grid: Sequence[Ints]) -> float:
    weights = candidates.weights
    for axis, ends in enumerate(grid):
        weights = _sum_groups(weights, ends, axis)
    return float(np.sum(weights * candidates.costs[np.ix_(*grid)]))


def _sum_groups(weights: Floats, ends: Ints, axis: int) -> Floats:
    """Sum the groups that end at these positions, the last of which is the last of all."""
    return np.add.reduceat(weights, np.concatenate([[0], ends[:-1] + 1]), axis=axis)


# --- Boxes: one bucket each, placed freely ----------------------------------------------------


def cheapest_boxes(candidates: Table, k: int) -> Ints:
    """At most ``k`` buckets, each a size for every variable; a call goes to the cheapest it fits.

    The largest candidate of all variables is always one of them. Others are added one by one, each
    where it saves most (that alone gets 1 - 1/e of the possible saving, as the saving is
    submodular), then moved one by one as long as that helps. The best grid is a second start.

    Returns:
        The buckets as positions in the candidates, the cheapest first; of shape ``(k, d)``.
    """
    search = _Boxes(candidates)
    corners = np.array(list(itertools.product(*cheapest_grid(candidates, k))))
    starts = (search.fill([], k), search.fill(search.numbers(corners), k))
    chosen = min((search.improve(boxes) for boxes in starts), key=search.total)
    used = search.used(chosen)
    return np.array(sorted(used, key=lambda box: (candidates.costs[box], box)))


class _Boxes:
    """The search for boxes. A box is known by its number among all combinations of candidates."""

    def __init__(self, candidates: Table) -> None:
        shape = candidates.weights.shape
        self._shape = shape
        self._corner = candidates.weights.size - 1
        points = np.argwhere(candidates.weights)
        self._weights = candidates.weights[candidates.weights > 0]
        self._costs = candidates.costs.ravel()
        boxes = np.indices(shape).reshape(len(shape), -1).T
        self._holds: Flags = np.all(points[None] <= boxes[:, None], axis=2)  # (boxes, points)

    def numbers(self, positions: Ints) -> list[int]:
        """The numbers of boxes given by positions in the candidates."""
        return np.ravel_multi_index(tuple(positions.T), self._shape).tolist()

    def point_costs(self, boxes: Sequence[int]) -> Floats:
        """What each point costs in the cheapest box that holds it."""
        every = [*boxes, self._corner]
        costs = np.where(self._holds[every], self._costs[every][:, None], np.inf)
        return costs.min(axis=0)

    def total(self, boxes: Sequence[int]) -> float:
        """What all calls cost."""
        return float(self.point_costs(boxes) @ self._weights)

    def best_addition(self, boxes: Sequence[int]) -> tuple[int, float]:
        """The box that saves most, and how much that is."""
        saved = np.maximum(self.point_costs(boxes) - self._costs[:, None], 0.0)
        saving = (saved * self._holds) @ self._weights
        best = int(np.argmax(saving))
        return best, float(saving[best])

    def fill(self, boxes: Sequence[int], k: int) -> list[int]:
        """Add boxes until there are ``k`` with the corner, or no other saves anything."""
        filled = [box for box in boxes if box != self._corner]
        while len(filled) < k - 1:
            box, saving = self.best_addition(filled)
            if saving <= 0:
                break
            filled.append(box)
        return filled

    def improve(self, boxes: Sequence[int]) -> list[int]:
        """Move boxes one by one to where they save most, while the total falls."""
        moved, unmoved = list(boxes), 0
        total = self.total(moved)
        while unmoved < len(moved):
            rest = moved[1:]
            box, saving = self.best_addition(rest)
            lower = self.total(rest) - saving
            # Less by more than rounding, so that this ends.
            unmoved = 0 if lower < total * (1 - 1e-12) else unmoved + 1
            total = min(total, lower)
            moved = [*rest, box if unmoved == 0 else moved[0]]
        return moved

    def used(self, boxes: Sequence[int]) -> list[tuple[int, ...]]:
        """The corner and the boxes that some point is cheapest in, as positions."""
        every = sorted({*boxes}, key=lambda box: (self._costs[box], box))
        costs = np.where(self._holds[every], self._costs[every][:, None], np.inf)
        cheapest = set(costs.argmin(axis=0).tolist()) if every else set()
        kept = {self._corner, *(box for i, box in enumerate(every) if i in cheapest)}
        return [tuple(int(i) for i in np.unravel_index(box, self._shape)) for box in kept]
