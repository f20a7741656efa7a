"""Fits boundaries to the sizes that occur, and assesses strategies by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, overload

import numpy as np

from bucketjit.errors import StrategyContractError
from bucketjit.strategies._search import (
    Cost,
    Floats,
    Ints,
    Sizes,
    cheapest_boundaries,
    cheapest_grid,
    costs_of,
    histogram,
    is_named,
)
from bucketjit.strategies.base import Strategy, checked_bucket, checked_strategy, positive_int
from bucketjit.strategies.rounding import Boundaries

# The search for several variables looks at all combinations of candidates.
_MOST_COMBINATIONS = 10_000


@overload
def fit(
    sizes: Mapping[str, Sizes],
    buckets: int = 8,
    *,
    cost: Cost | None = None,
    multiple_of: int | Mapping[str, int] = 1,
    max: int | Mapping[str, int] | None = None,
) -> dict[str, Boundaries]: ...


@overload
def fit(
    sizes: Sizes,
    buckets: int = 8,
    *,
    cost: Callable[[int], float] | None = None,
    multiple_of: int = 1,
    max: int | None = None,
) -> Boundaries: ...


def fit(
    sizes: Sizes | Mapping[str, Sizes],
    buckets: int = 8,
    *,
    cost: Cost | None = None,
    multiple_of: int | Mapping[str, int] = 1,
    max: int | Mapping[str, int] | None = None,
) -> Boundaries | dict[str, Boundaries]:
    """Find the boundaries that cost least for sizes like those seen.

    With as many executables they pad far less than a ladder: buckets are close where sizes are
    frequent and far apart where they are rare. The cost of a plan is the sum over all calls of the
    cost of their buckets.

    Of one variable, no other choice of at most ``buckets`` of the sizes seen, rounded up to
    ``multiple_of``, is cheaper. That holds for every cost, also for a measured one that is lower
    for a larger bucket.

    Of several variables, each gets its own boundaries, and there is one executable for each
    combination of them that occurs: at most ``buckets`` for the calls seen. If batches are made of
    a fixed number of tokens, say, most combinations do not occur, and the boundaries can be close.
    A combination that was not seen is one more executable when it comes. The boundaries of one
    variable are fitted exactly while those of the others are fixed, in turn; that finds the
    cheapest plan nearly always, but not with certainty. If a variable has very many sizes, the best
    of them are candidates: 100 each for two variables, fewer for more.

    Args:
        sizes: The sizes seen, in any iterable or array; or a mapping of size to count, such as a
            ``Counter``. Of several variables, a mapping of the name of each to its sizes; the i-th
            of all belong to one call. A call with a size of 0 does not count: it runs exact.
        buckets: The largest number of executables that these calls may need.
        cost: What a call in a bucket costs: FLOPs, or seconds measured. A function of the padded
            size, or of the padded sizes of several variables by name (``lambda b, s: b * s * s``).
            By default their product.
        multiple_of: Every bucket is a multiple of this. Of named variables, one number for all or a
            mapping from some of them.
        max: The largest bucket, in the same form; by default the largest size seen, rounded up.
            Set it if larger sizes than those seen may come.

    Returns:
        The strategy; for named variables a dict of the strategy of each, for
        ``with_strategy(plan[dim], dim)`` or ``jit(buckets=plan)``.

    Raises:
        TypeError: If a parameter is of the wrong type, or ``cost`` returns no number.
        ValueError: If there is no size, one is negative or beyond ``max``; or a parameter or a cost
            is out of its range.

    Examples:
        >>> fit([17, 18, 18, 20, 64, 200], buckets=3)
        Boundaries([20, 64, 200])
        >>> fit({17: 800, 18: 700, 33: 300, 40: 90, 512: 1}, 3, multiple_of=8, max=1024)
        Boundaries([24, 40, 1024])
        >>> batch, seq = [32, 32, 31, 4, 4, 3], [10, 12, 11, 100, 90, 95]
        >>> fit({"b": batch, "s": seq}, buckets=2)
        {'b': Boundaries([4, 32]), 's': Boundaries([12, 100])}
    """
    most = positive_int("buckets", buckets)
    dims, points, counts = histogram(sizes)
    tops = []
    for axis, dim in enumerate(dims):
        multiple = _option("multiple_of", multiple_of, dim, dims) or 1
        limit = _option("max", max, dim, dims)
        tops.append(_largest(dim, int(points[:, axis].max()), multiple, limit))
        points[:, axis] = -(-points[:, axis] // multiple) * multiple
    plan = [Boundaries(b) for b in _fitted(dims, points, counts, tops, most, cost)]
    return dict(zip(dims, plan, strict=True)) if is_named(sizes) else plan[0]


def _option(name: str, option: object, dim: str, dims: tuple[str, ...]) -> int | None:
    if isinstance(option, Mapping):
        if not option.keys() <= set(dims):
            raise TypeError(
                f"{name} must be a mapping from some of the variables {list(dims)}, not {option!r}"
            )
        name, option = f"{name}[{dim!r}]", option.get(dim)
    return None if option is None else positive_int(name, option)


def _largest(dim: str, seen: int, multiple: int, limit: int | None) -> int:
    """The largest bucket of a variable: the limit of the user, or else the largest size seen."""
    if limit is not None and limit % multiple:
        raise ValueError(f"max must be a multiple of multiple_of ({multiple}), not {limit}")
    if limit is not None and seen > limit:
        raise ValueError(
            f"sizes of {dim!r} must not be beyond max ({limit}), not {seen}; leave them out or "
            "raise max"
        )
    bucket = -(-seen // multiple) * multiple if limit is None else limit
    if bucket >= 2**63:
        raise ValueError(f"the largest bucket must be below 2**63, not {bucket}")
    return bucket


def _fitted(
    dims: tuple[str, ...],
    points: Ints,
    counts: Floats,
    tops: list[int],
    most: int,
    cost: Cost | None,
) -> list[list[int]]:
    sizes, where = [], []
    for column, top in zip(points.T, tops, strict=True):
        candidates = np.unique(np.append(column, top))
        if len(dims) > 1 and len(candidates) > (each := int(_MOST_COMBINATIONS ** (1 / len(dims)))):
            others = points.prod(axis=1, dtype=np.float64) / column
            place = np.searchsorted(candidates, column)
            total = np.bincount(place, counts * others, len(candidates)).astype(np.float64)
            costs = candidates.astype(np.float64)
            candidates = cheapest_boundaries(candidates, total, costs, each)
        sizes.append(candidates)
        where.append(np.searchsorted(candidates, column))
    shape = tuple(map(len, sizes))
    weights = np.zeros(shape)
    np.add.at(weights, tuple(where), counts)
    combinations = np.stack(np.meshgrid(*sizes, indexing="ij"), axis=-1)
    costs = costs_of(dims, combinations.reshape(-1, len(dims)), cost).reshape(shape)
    if not math.isfinite(float(costs.max()) * float(counts.sum())):
        raise ValueError(
            "the costs of all sizes must have a sum that a float can hold; count in a larger unit"
        )
    if len(dims) == 1:
        return [cheapest_boundaries(sizes[0], weights, costs, most).tolist()]
    grid = cheapest_grid(weights, costs, most)
    return [candidates[list(ends)].tolist() for candidates, ends in zip(sizes, grid, strict=True)]


# --- assessment ---


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
        distinct, where = np.unique(points[:, axis], return_inverse=True)
        buckets = [checked_bucket(strategies[dim], dim, n) for n in distinct.tolist()]
        padded[:, axis] = np.array(buckets)[where]
    # The cost function is called once for each bucket that is used, and not for each size.
    used, where = np.unique(padded, axis=0, return_inverse=True)
    exact = float(costs_of(dims, points, cost) @ counts)
    return Assessment(len(used), exact, float(costs_of(dims, used, cost)[where.ravel()] @ counts))
