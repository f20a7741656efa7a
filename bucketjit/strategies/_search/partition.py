"""The cheapest way to cut an ordered histogram into at most k groups, exactly."""

from __future__ import annotations

import numpy as np

from bucketjit.strategies._search.histogram import Floats, Ints


def cheapest_boundaries(sizes: Ints, weights: Floats, costs: Floats, k: int) -> Ints:
    """Choose at most ``k`` of some sizes as boundaries, such that rounding up to them costs least.

    The result is exact for all costs, even if a larger bucket is cheaper than a smaller one. Each
    size is then charged the cost of the cheapest bucket that holds it, which does not fall when the
    size grows, and the boundaries are those cheapest buckets.

    Args:
        sizes: The candidates in increasing order; the last one always becomes a boundary.
        weights: How often each size occurs.
        costs: What a call in a bucket of each size costs.
        k: The largest number of boundaries.

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
    chosen = cheapest_groups(weights, least, k)
    return sizes[np.unique(ends[np.searchsorted(ends, chosen)])]


def cheapest_groups(weights: Floats, costs: Floats, k: int) -> Ints:
    """Cut positions ``0 .. m-1`` into at most ``k`` runs that cost least.

    A run from ``i`` to ``j`` costs ``costs[j] * weights[i:j+1].sum()``, as all its members are
    padded to the last one's size.

    This is exact if ``costs`` does not decrease. The cost of runs then fulfils the quadrangle
    inequality, so the best start of the last run moves to the right with its end (Yao 1980), and
    divide and conquer finds all starts of a layer in ``O(m log m)`` steps.

    Args:
        weights: How often each position occurs.
        costs: What one member of a run with that last position costs; must not decrease.
        k: The largest number of runs.

    Returns:
        The last position of each run, in increasing order; of equally cheap cuts one with the
        fewest runs.

    Examples:
        >>> cheapest_groups(np.ones(4), np.array([1.0, 2.0, 8.0, 9.0]), 2)
        array([1, 3])
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
        total = best[candidate] + costs[last - 1] * (below[last] - below[candidate])
        least = np.minimum.reduceat(total, first)
        hits = np.flatnonzero(total == np.repeat(least, width))
        found[number] = candidate[hits[np.searchsorted(hits, first)]]
        cost[end], start[end] = least, found[number]
        step //= 2
    return cost, start
