"""Assesses strategies: how many executables they need for some sizes, and how much they pad."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from bucketjit.errors import StrategyContractError
from bucketjit.strategies._search import Cost, Sizes, costs_of, histogram
from bucketjit.strategies.base import Strategy, checked_bucket, checked_strategy


class Assessment(NamedTuple):
    """What calls of some sizes cost under a strategy.

    Attributes:
        executables: Number of buckets used, each of which is a compile.
        exact: The cost of all calls unpadded, in the unit of the cost function.
        padded: The cost of all calls in their buckets.
    """

    executables: int
    exact: float
    padded: float

    @property
    def waste(self) -> float:
        """The share of the padded cost that is padding, 0 to 1."""
        return (self.padded - self.exact) / self.padded if self.padded else 0.0


def assess(
    strategy: Strategy, sizes: Sizes, *, cost: Callable[[int], float] | None = None
) -> Assessment:
    """Return how many executables a strategy needs for some sizes, and how much it pads.

    Args:
        strategy: The strategy.
        sizes: The sizes seen, in any iterable or array; or a mapping of size to count. Size 0
            does not count.
        cost: What a call in a bucket of a given size costs; by default the size.

    Returns:
        The number of executables, and the cost with and without padding.

    Raises:
        BucketOverflowError: If a size is beyond the strategy's largest bucket.
        StrategyContractError: If the strategy breaks its contract.
        TypeError: If the sizes are no ints, or ``cost`` returns no number.
        ValueError: If there is no size, or a size or a cost is negative.

    Examples:
        >>> from bucketjit.strategies import Pow2, fit
        >>> sizes = [17, 18, 18, 20, 33, 40]
        >>> assess(Pow2(), sizes)
        Assessment(executables=2, exact=146.0, padded=256.0)
        >>> assess(fit(sizes, buckets=2), sizes).waste < assess(Pow2(), sizes).waste / 2
        True
    """
    return _assess({"size": checked_strategy("strategy", strategy)}, sizes, cost)


def assess_joint(
    strategies: Mapping[str, Strategy],
    sizes: Mapping[str, Sizes],
    *,
    cost: Callable[..., float] | None = None,
) -> Assessment:
    """Return what strategies of several variables need and pad; see `assess`.

    Args:
        strategies: The strategy of each variable, by its name.
        sizes: The sizes seen of each variable, by its name; the i-th of all belong to one call.
        cost: What a call in a bucket costs, a function of the padded sizes by name; by default
            their product.

    Returns:
        The number of executables, and the cost with and without padding.

    Raises:
        BucketOverflowError: If a size is beyond the largest bucket.
        StrategyContractError: If a strategy breaks its contract.
        TypeError: If the sizes are no ints, or ``cost`` returns no number.
        ValueError: If there are no sizes, the variables are not the strategies', or a size or a
            cost is negative.

    Examples:
        >>> from bucketjit.strategies import Pow2
        >>> assess_joint({"b": Pow2(), "s": Pow2()}, {"b": [3, 4], "s": [10, 70]})
        Assessment(executables=2, exact=310.0, padded=576.0)
    """
    if not isinstance(strategies, Mapping):
        raise StrategyContractError(
            f"strategies must be a dict of a variable to its strategy, got {strategies!r}"
        )
    for dim, strategy in strategies.items():
        checked_strategy(f"the strategy of {dim!r}", strategy)
    return _assess(strategies, sizes, cost)


def _assess(
    strategies: Mapping[str, Strategy], sizes: Sizes | Mapping[str, Sizes], cost: Cost | None
) -> Assessment:
    dims, points, counts = histogram(sizes)
    if set(dims) != set(strategies):
        raise ValueError(f"sizes must be of the variables {list(strategies)}, not {list(dims)}")
    padded = np.empty_like(points)
    for axis, dim in enumerate(dims):
        own, where = np.unique(points[:, axis], return_inverse=True)
        buckets = [checked_bucket(strategies[dim], dim, n) for n in own.tolist()]
        padded[:, axis] = np.array(buckets)[where]
    # The cost function is called once for each bucket that is used, and not for each size.
    used, where = np.unique(padded, axis=0, return_inverse=True)
    exact = float(costs_of(dims, points, cost) @ counts)
    return Assessment(len(used), exact, float(costs_of(dims, used, cost)[where.ravel()] @ counts))
