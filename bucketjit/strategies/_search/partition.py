"""The cheapest way to cut an ordered histogram into at most k groups, exactly."""

from __future__ import annotations

import numpy as np

from bucketjit.strategies._search.histogram import Floats, Ints


def cheapest_boundaries(
    sizes: Ints, weights: Floats, costs: Floats, k: int, fixed: Floats | float = 0.0
) -> Ints:
    """Choose at most ``k`` of some sizes as boundaries, such that rounding up to them costs least.

    The result is exact for all costs, even if a larger bucket is cheaper than a smaller one. Each
    size is then charged the cost of the cheapest bucket that holds it, which does not fall when the
    size grows, and the boundaries are those cheapest buckets. (If ``fixed`` costs differ, the
    result is exact only if ``costs`` does not fall.)

    Args:
        sizes: The candidates in increasing order; the last one always becomes a boundary.
        weights: How often each size occurs.
        costs: What a call in a bucket of each size costs.
        k: The largest number of boundaries.
        fixed: What a boundary costs in addition: one number for all, or one for each.

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

    This is exact if no column of ``costs`` decreases. The cost of runs then fulfils the quadrangle
    inequality, so the best start of the last run moves to the right with its end (Yao 1980), and
    divide and conquer finds all starts of a layer in ``O(m log m)`` steps.

    Args:
        weights: How often each position occurs, of shape ``(m, c)``.
        costs: What one member of a run with that last position costs, of shape ``(m, c)``; no
            column decreases.
        k: The largest number of runs.
        fixed: What a run costs in addition: one number for all, or one for each last position.

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
    """Compute the cheapest cuts of each prefix into ``g`` runs from those into ``g - 1``.

    The prefixes are processed from coarse to fine: the best start for a prefix lies between the
    starts of the next shorter and longer prefix that are known. All prefixes of one fineness are
    processed at once, as one flat array.

    Args:
        best: The cost of the cheapest cut into ``g - 1`` runs, by length of the prefix.
        below: The sums of the weights before each position.
        costs: See `cheapest_groups`.
        fixed: See `cheapest_groups`.
        g: The number of runs.

    Returns:
        The cost by length of the prefix, and the start of its last run.
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
        run = np.einsum("nc,nc->n", costs[last - 1], below[last] - below[candidate])
        total = best[candidate] + run
        least = np.minimum.reduceat(total, first)
        hits = np.flatnonzero(total == np.repeat(least, width))
        found[number] = candidate[hits[np.searchsorted(hits, first)]]
        cost[end], start[end] = least + fixed[end - 1], found[number]
        step //= 2
    return cost, start
