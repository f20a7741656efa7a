"""A strategy with an explicit list of buckets."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from bucketjit.errors import BucketOverflowError
from bucketjit.strategies.base import logical_size, positive_int


@dataclasses.dataclass(frozen=True, repr=False)
class Boundaries:
    """Round up to the next of the given sizes.

    The best choice where the sizes are known: take quantiles of their distribution.

    Args:
        boundaries: The buckets: positive ints in increasing order.

    Raises:
        TypeError: If ``boundaries`` is not an iterable of ints.
        ValueError: If it is empty, or not positive and strictly increasing.

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
        if isinstance(boundaries, (str, bytes)) or not isinstance(boundaries, Iterable):
            raise TypeError(
                f"boundaries must be an iterable of positive ints, not {boundaries!r} "
                f"({type(boundaries).__name__})"
            )
        checked = tuple(
            positive_int(f"boundaries[{i}]", boundary) for i, boundary in enumerate(boundaries)
        )
        if not checked:
            raise ValueError("boundaries must hold at least one bucket, not none")
        for i in range(1, len(checked)):
            if checked[i - 1] >= checked[i]:
                raise ValueError(
                    f"boundaries must be strictly increasing, not {checked[i - 1]} followed by "
                    f"{checked[i]} (boundaries[{i}])"
                )
        object.__setattr__(self, "boundaries", checked)

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
