"""Searches for the buckets that cost least, given a histogram of sizes.

This is plain arithmetic on NumPy arrays. `bucketjit.strategies` makes strategies of the results.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np

# --- histogram ------------------------------------------------------------------------------------
# Counts how often each size, or combination of sizes, occurred, and checks the sizes.

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

Sizes = Iterable[int] | Mapping[int, float]

_LARGEST = int(np.iinfo(np.int64).max)


def is_named(sizes: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether sizes are given by the names of variables, not as sizes or counts of one."""
    return isinstance(sizes, Mapping) and bool(sizes) and all(isinstance(k, str) for k in sizes)


def histogram(sizes: Sizes | Mapping[str, Sizes]) -> tuple[tuple[str, ...], Ints, Floats]:
    """Count combinations of sizes; a call with a size of 0 runs exact, and is left out.

    Returns the names of the variables, the distinct combinations in increasing order, each a row,
    and how often each occurred.
    """
    named = is_named(sizes)
    columns: Mapping[str, Any] = sizes if is_named(sizes) else {"size": sizes}
    arrays, counts = {}, None
    for dim, column in columns.items():
        name = f"sizes[{dim!r}]" if named else "sizes"
        if isinstance(column, Mapping):
            if len(columns) > 1:
                raise TypeError(
                    f"{name} must be the size of each call: counts do not say which sizes of "
                    "several variables belong together"
                )
            column = dict(column)
            counts = np.array([_count(n, c) for n, c in column.items()], np.float64)
        arrays[dim] = _integers(name, column)
    lengths = {dim: len(array) for dim, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"all variables must have as many sizes as there were calls, not {lengths}"
        )
    points = np.stack(list(arrays.values()), axis=1)
    counts = np.ones(len(points)) if counts is None else counts
    seen = (points > 0).all(axis=1) & (counts > 0)
    if not seen.any():
        raise ValueError("sizes must hold at least one size of 1 or more, not none")
    distinct, where = np.unique(points[seen], axis=0, return_inverse=True)
    counts = np.bincount(where.ravel(), counts[seen]).astype(np.float64)
    return tuple(columns), distinct, counts


def _integers(name: str, values: object) -> Ints:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be an iterable of ints, not {values!r}")
    if not isinstance(values, np.ndarray):
        values = list(values)
        if any(isinstance(n, bool | np.bool_) for n in values):
            raise TypeError(f"{name} must be a flat iterable of ints, not of bool")
        # NumPy makes floats of its own ints where some are signed and some are not.
        values = [int(n) if isinstance(n, np.integer) else n for n in values]
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different length
        raise TypeError(f"{name} must be a flat iterable of ints, not a nested one") from None
    if not array.size:
        return np.zeros(0, np.int64)
    # NumPy makes arrays of another type (uint64, float64 or object) for ints of 2**63 and more.
    if array.ndim == 1 and array.dtype.kind not in "ib":
        for n in values:
            if isinstance(n, int | np.integer) and n > _LARGEST:
                raise ValueError(f"{name} must be below 2**63, not {n}")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} must be a flat iterable of ints, not of {array.dtype} with shape {array.shape}"
        )
    if (smallest := array.min()) < 0:
        raise ValueError(f"{name} must not be negative, not {smallest}")
    return array.astype(np.int64)


def _count(size: int, count: object) -> float:
    if isinstance(count, bool) or not isinstance(count, numbers.Real):
        raise TypeError(f"the count of size {size} must be a number, not {count!r}")
    number = float(count)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"the count of size {size} must be finite and not negative, not {count}")
    return number


# --- costs ----------------------------------------------------------------------------------------
# Evaluates and checks the cost function of the user: what a call costs by its padded sizes.

Cost = Callable[..., float]


def costs_of(dims: tuple[str, ...], points: Ints, cost: Cost | None) -> Floats:
    """The cost of each combination of padded sizes, one a row; without ``cost`` their product."""
    if cost is None:
        return points.prod(axis=1, dtype=np.float64)
    if not callable(cost):
        raise TypeError(f"cost must be a function of the padded size, or None, not {cost!r}")
    if len(dims) == 1:
        return np.array([_checked(cost(n), f"size {n}") for n in points[:, 0].tolist()])
    try:
        inspect.signature(cost).bind(**dict.fromkeys(dims))
    except ValueError:
        pass  # Python knows no signature of some builtins
    except TypeError as error:
        raise TypeError(
            f"cost must take the padded sizes by name, {', '.join(dims)}: {error}"
        ) from None
    rows = (dict(zip(dims, row, strict=True)) for row in points.tolist())
    return np.array(
        [_checked(cost(**row), ", ".join(f"{d}={n}" for d, n in row.items())) for row in rows]
    )


def _checked(answer: Any, what: str) -> float:
    try:
        if isinstance(answer, str | bytes | bool | np.bool_):
            raise TypeError
        number = float(answer)
    except (TypeError, ValueError):
        raise TypeError(f"cost must return a number for {what}, not {answer!r}") from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"cost must be finite and not negative, not {number} for {what}")
    return number


# --- partition ------------------------------------------------------------------------------------
# The cheapest way to cut an ordered histogram into at most k groups, exactly.


def cheapest_boundaries(sizes: Ints, weights: Floats, costs: Floats, k: int) -> Ints:
    """Choose at most ``k`` of some sizes as boundaries, such that rounding up to them costs least.

    The result is exact for all costs, even if a larger bucket is cheaper than a smaller one. Each
    size is then charged the cost of the cheapest bucket that holds it, which does not fall when the
    size grows, and the boundaries are those cheapest buckets.
    """
    least = np.minimum.accumulate(costs[::-1])[::-1]
    # A run of equal `least` ends at the candidate that costs that little.
    ends = np.append(np.flatnonzero(np.diff(least)), len(least) - 1)
    chosen = cheapest_groups(weights, least, k)
    return sizes[np.unique(ends[np.searchsorted(ends, chosen)])]


def cheapest_groups(weights: Floats, costs: Floats, k: int) -> Ints:
    """Cut positions ``0 .. m-1`` into at most ``k`` runs that cost least.

    A run from ``i`` to ``j`` costs ``costs[j] * weights[i:j+1].sum()``, as all its members are
    padded to the last one's size.

    This is exact if ``costs`` does not decrease. The cost of runs then fulfils the quadrangle
    inequality, so the best start of the last run moves to the right with its end (Yao 1980), and
    divide and conquer finds all starts of a layer in ``O(m log m)`` steps.
    """
    m = len(costs)
    below = np.append(0.0, np.cumsum(weights))
    best = np.append(0.0, np.full(m, np.inf))
    layers, totals = [], []
    for g in range(1, min(k, m) + 1):
        best, starts = _one_more_run(best, below, costs, g)
        layers.append(starts)
        totals.append(best[m])
    ends, end = [], m
    for starts in reversed(layers[: int(np.argmin(totals)) + 1]):
        ends.append(end - 1)
        end = int(starts[end])
    return np.array(ends[::-1], np.int64)


def _one_more_run(best: Floats, below: Floats, costs: Floats, g: int) -> tuple[Floats, Ints]:
    """Compute the cheapest cuts of each prefix into ``g`` runs from those into ``g - 1``.

    The prefixes are processed from coarse to fine: the best start for a prefix lies between the
    starts of the next shorter and longer prefix that are known. All prefixes of one fineness are
    processed at once, as one flat array.
    """
    m = len(costs)
    count = m - g + 1  # prefixes of length g .. m, number 1 .. count
    cost, start = np.full(m + 1, np.inf), np.zeros(m + 1, np.int64)
    # Best starts by number of the prefix. The first and the last entry are sentinels: the smallest
    # and the largest start possible.
    best_start = np.full(count + 2, m - 1, np.int64)
    best_start[0] = g - 1
    step = 1 << (count.bit_length() - 1)
    while step:
        number = np.arange(step, count + 1, 2 * step)
        end = number + g - 1
        low = best_start[number - step]
        high = np.minimum(best_start[np.minimum(number + step, count + 1)], end - 1)
        # Every candidate of every prefix in one flat array, prefix after prefix.
        width = high - low + 1
        first = np.cumsum(width) - width
        candidate = np.arange(width.sum()) - np.repeat(first - low, width)
        last = np.repeat(end, width)
        total = best[candidate] + costs[last - 1] * (below[last] - below[candidate])
        least = np.minimum.reduceat(total, first)
        hits = np.flatnonzero(total == np.repeat(least, width))
        best_start[number] = candidate[hits[np.searchsorted(hits, first)]]
        cost[end], start[end] = least, best_start[number]
        step //= 2
    return cost, start


# --- grid -----------------------------------------------------------------------------------------
# Searches for the cheapest grid: boundaries for each of several variables.
#
# Finding it with certainty is a hard problem (rectangular partition), so this is a local search;
# `tests/strategies/search` compares it with all possible answers on small instances.

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
                results = (search.descend(start, second, most) for second in axes if second != axis)
                best = min(best, *results)
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
