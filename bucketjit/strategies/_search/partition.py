"""The cheapest way to cut an ordered histogram into at most k groups, exactly."""

from __future__ import annotations

import numpy as np

from bucketjit.strategies._search.histogram import Floats, Ints


def cheapest_boundaries(
    sizes: Ints, weights: Floats, costs: Floats, k: int, fixed: Floats | float = 0.0
) -> Ints:
    """Choose at most ``k`` of some sizes as boundaries, such that rounding up to them costs least.

    Exact for all costs, also where a larger bucket is cheaper: then what a size costs is the cost
    of the cheapest bucket that holds it, which does not fall with the size, and the boundaries
    are those buckets. (With different ``fixed`` costs it is exact where ``costs`` does not fall.)

    Args:
        sizes: The candidates in increasing order, the last of which becomes a boundary.
        weights: How often each size occurs.
        costs: What a call in a bucket of each size costs.
        k: The most boundaries there may be.
        fixed: What a boundary costs besides, one for all or one for each.

    Returns:
        The boundaries, in increasing order.

    Examples:
        >>> sizes = np.array([1, 2, 8, 9])
        >>> cheapest_boundaries(sizes, np.ones(4), sizes.astype(float), 2)
        array([2, 9])
        >>> cheapest_boundaries(sizes, np.ones(4), np.array([5.0, 6.0, 2.0, 9.0]), 3)
        array([8, 9])
    """
    least = np.minimum.accumulate(costs[::-1])[::-1]
    # A run of equal `least` ends at the candidate that costs that little.
    ends = np.append(np.flatnonzero(np.diff(least)), len(least) - 1)
    cheapest = ends[np.searchsorted(ends, np.arange(len(least)))]
    fixed = np.broadcast_to(fixed, len(sizes))[cheapest]
    chosen = cheapest_groups(weights[:, None], least[:, None], k, fixed)
    return sizes[np.unique(cheapest[chosen])]


def cheapest_groups(weights: Floats, costs: Floats, k: int, fixed: Floats | float = 0.0) -> Ints:
    """Cut positions ``0 .. m-1`` into at most ``k`` runs that cost least.

    A run from ``i`` to ``j`` costs ``sum over c of costs[j, c] * weights[i:j+1, c].sum()``, as all
    its members are padded to the last one's size, plus ``fixed[j]``.

    Where no column of ``costs`` decreases this is exact: then the cost of runs fulfils the
    quadrangle inequality, so the best start of the last run moves to the right with its end
    (Yao 1980), and divide and conquer finds all starts of a layer in ``O(m log m)`` steps.

    Args:
        weights: How often, of shape ``(m, c)``.
        costs: What one member costs, of shape ``(m, c)``; no column decreases.
        k: The most runs there may be.
        fixed: What a run costs besides, one for all or by its last position.

    Returns:
        The last position of each run, in increasing order; of equally cheap cuts one with the
        fewest runs.

    Examples:
        >>> sizes = np.array([1.0, 2.0, 8.0, 9.0])[:, None]
        >>> cheapest_groups(np.ones((4, 1)), sizes, 2)
        array([1, 3])
        >>> cheapest_groups(np.ones((4, 1)), sizes, 2, fixed=100.0)
        array([3])
    """
    m = len(costs)
    below = np.concatenate([np.zeros((1, costs.shape[1])), np.cumsum(weights, axis=0)])
    best = np.concatenate([[0.0], np.full(m, np.inf)])
    layers, totals = [], []
    fixed = np.broadcast_to(fixed, m)
    for g in range(1, min(k, m) + 1):
        best, starts = _one_more_run(best, below, costs, fixed, g)
        layers.append(starts)
        totals.append(best[m])
    ends, end = [], m
    for starts in reversed(layers[: int(np.argmin(totals)) + 1]):
        ends.append(end - 1)
        end = int(starts[end])
    return np.array(ends[::-1], np.int64)


def _one_more_run(
    best: Floats, below: Floats, costs: Floats, fixed: Floats, g: int
) -> tuple[Floats, Ints]:
    """From the cheapest cuts of each prefix into ``g - 1`` runs to those into ``g``.

    Prefixes are worked off from coarse to fine: the best start for one between two that are known
    lies between theirs. All of one fineness are done at once.

    Returns:
        The cost by length of prefix, and where its last run starts.
    """
    m = len(costs)
    count = m - g + 1  # prefixes of length g .. m, number 1 .. count
    cost, start = np.full(m + 1, np.inf), np.zeros(m + 1, np.int64)
    # By number, between two that stand for "as far left, or right, as can be".
    found = np.full(count + 2, m - 1, np.int64)
    found[0] = g - 1
    step = 1 << (count.bit_length() - 1)
    while step:
        number = np.arange(step, count + 1, 2 * step)
        end = number + g - 1
        low = found[number - step]
        high = np.minimum(found[np.minimum(number + step, count + 1)], end - 1)
        # Every candidate of every prefix in one flat array, prefix after prefix.
        width = high - low + 1
        first = np.cumsum(width) - width
        candidate = np.arange(width.sum()) - np.repeat(first - low, width)
        last = np.repeat(end, width)
        run = np.einsum("nc,nc->n", costs[last - 1], below[last] - below[candidate])
        total = best[candidate] + run
        least = np.minimum.reduceat(total, first)
        hits = np.flatnonzero(total == np.repeat(least, width))
        found[number] = candidate[hits[np.searchsorted(hits, first)]]
        cost[end], start[end] = least + fixed[end - 1], found[number]
        step //= 2
    return cost, start
