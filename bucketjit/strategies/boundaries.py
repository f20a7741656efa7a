"""Explicit buckets, and the list of all buckets of a strategy that has a largest one."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from bucketjit.errors import BucketOverflowError
from bucketjit.strategies.base import Ladder, checked_sizes, logical_size

MOST_LISTED = 65_536  # buckets of a strategy that are listed at most


@dataclasses.dataclass(frozen=True, repr=False)
class Boundaries:
    """Round up to the next of the given sizes.

    The best choice where the sizes are known: take quantiles of their distribution.

    Args:
        boundaries: The buckets: a list, an array or a range of ints above 0 in increasing order.

    Raises:
        SpecError: If ``boundaries`` are not ints above 0 in increasing order, or none.

    Examples:
        >>> strategy = Boundaries([30, 60, 90])
        >>> [strategy.bucket(n) for n in (1, 30, 31)]
        [30, 30, 60]
        >>> strategy.bucket(91)
        Traceback (most recent call last):
            ...
        bucketjit.errors.BucketOverflowError: a dimension has size 91, beyond ...
    """

    boundaries: tuple[int, ...]

    # Written out because the constructor takes any iterable and the attribute is a tuple.
    def __init__(self, boundaries: Iterable[int]) -> None:
        object.__setattr__(self, "boundaries", checked_sizes("boundaries", boundaries))

    def bucket(self, n: int, /) -> int:
        """Return the bucket of a logical size.

        Args:
            n: The logical size, 0 or more.

        Returns:
            The smallest boundary that is at least ``n``.

        Raises:
            BucketOverflowError: If ``n`` is larger than the last boundary.
            TypeError: If ``n`` is not an int.
            ValueError: If ``n`` is negative.
        """
        size = logical_size(n)
        boundaries = self.boundaries
        if size > boundaries[-1]:
            raise BucketOverflowError(size, boundaries[-1])
        return boundaries[bisect.bisect_left(boundaries, size)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.boundaries)})"


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
