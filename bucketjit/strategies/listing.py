"""Lists all buckets of a strategy that has a largest one."""

from __future__ import annotations

from bucketjit.strategies.base import Ladder
from bucketjit.strategies.boundaries import Boundaries

MOST_LISTED = 65_536  # buckets of a strategy that are listed at most


def buckets_of(strategy: object) -> tuple[int, ...] | None:
    """List the buckets of a strategy, to compile them before calls need them.

    Args:
        strategy: A strategy.

    Returns:
        The buckets of the sizes from 1 on, in increasing order. None if there is no largest one
        (``Pow2()``, `Exact`), if it is not known (a strategy of your own), or if there are more
        than 65,536.

    Examples:
        >>> from bucketjit.strategies import Boundaries, Linear, Pow2
        >>> buckets_of(Pow2(min=8, max=48))
        (8, 16, 32, 48)
        >>> buckets_of(Boundaries([10, 20, 35]))
        (10, 20, 35)
        >>> buckets_of(Linear(16)) is None
        True
    """
    if isinstance(strategy, Boundaries):
        return strategy.boundaries
    if not isinstance(strategy, Ladder) or strategy.max is None:
        return None
    found: list[int] = []
    while not found or found[-1] < strategy.max:
        if len(found) == MOST_LISTED:
            return None
        found.append(strategy.bucket(found[-1] + 1 if found else 1))
    return tuple(found)
