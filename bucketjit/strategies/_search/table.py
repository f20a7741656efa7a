"""Lays out candidate sizes of several variables, with weight and cost of each combination."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bucketjit.strategies._search.costs import JointCost, check_total, joint_costs_of
from bucketjit.strategies._search.histogram import Floats, Ints, JointHistogram, weigh
from bucketjit.strategies._search.partition import cheapest_groups

# The searches look at all combinations of candidates, and at all pairs of a combination and one
# that occurs. With these numbers they take about a second.
_MOST_COMBINATIONS = 20_000
_MOST_PAIRS = 2_000_000


class Table(NamedTuple):
    """Candidate sizes of ``d`` variables, and each combination's weight and cost.

    Attributes:
        sizes: The candidate sizes of each variable, in increasing order.
        weights: Number of calls whose smallest bucket each combination is, of shape
            ``(n1, .. nd)``.
        costs: What one call in that bucket costs, of the same shape; never less than for a
            combination of smaller sizes.
    """

    sizes: tuple[Ints, ...]
    weights: Floats
    costs: Floats


def lay_out(
    histogram: JointHistogram,
    cost: JointCost | None,
    multiples: Sequence[int],
    largest: Sequence[int],
) -> Table:
    """Lay out the candidates.

    Every size that occurs, rounded up, is a candidate. If the searches would take too long, only
    the best few of each variable are.

    Args:
        histogram: The sizes; combinations with a size beyond the largest bucket are left out.
        cost: What a call costs, called with the padded sizes by name; None for their product.
        multiples: By variable, a number of which every bucket is a multiple.
        largest: The largest bucket of each variable.

    Returns:
        The candidates.

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
            costs = _costs(histogram.dims, sizes, cost)
            check_total(costs, counts)
            return Table(sizes, weights, costs)
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
    """The cost of each combination, which must not fall when a size grows."""
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
