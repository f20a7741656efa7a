"""A strategy that rounds the buckets of another one up to multiples."""

from __future__ import annotations

import dataclasses

from bucketjit.errors import BucketOverflowError
from bucketjit.strategies.base import Strategy, checked_strategy, logical_size, positive_int


@dataclasses.dataclass(frozen=True, repr=False)
class MultipleOf:
    """Round every bucket of another strategy up to a multiple: of a mesh axis, or of a tile.

    The bucket of a size is the smallest rounded bucket that holds it. (Rounding the bucket of each
    size is not enough: with ``Pow2`` and multiples of 3, size 4 would get bucket 6, but size 6
    would get 8, rounded up to 9, so 6 would not be its own bucket.) Strategies with a parameter
    ``multiple_of`` do the same by themselves.

    Args:
        inner: The strategy whose buckets are rounded.
        multiple: What every bucket is a multiple of.

    Raises:
        StrategyContractError: If ``inner`` is no strategy.
        TypeError: If ``multiple`` is not an int.
        ValueError: If ``multiple`` is below 1.

    Examples:
        >>> from bucketjit.strategies import Boundaries
        >>> strategy = MultipleOf(Boundaries([10, 20, 35]), 8)
        >>> [strategy.bucket(n) for n in (1, 16, 17, 25, 40)]
        [16, 16, 24, 40, 40]
        >>> strategy.bucket(41)
        Traceback (most recent call last):
            ...
        bucketjit.errors.BucketOverflowError: a dimension has size 41, beyond ... bucket 40; ...
    """

    inner: Strategy
    multiple: int

    def __post_init__(self) -> None:
        checked_strategy("inner", self.inner)
        object.__setattr__(self, "multiple", positive_int("multiple", self.multiple))

    def bucket(self, n: int, /) -> int:
        """Return the bucket of a logical size.

        Args:
            n: The logical size, 0 or more.

        Returns:
            The smallest rounded bucket of ``inner`` that is at least ``n``.

        Raises:
            BucketOverflowError: If ``n`` is larger than the largest bucket, rounded up.
            TypeError: If ``n`` is not an int.
            ValueError: If ``n`` is negative.
        """
        size, multiple = logical_size(n), self.multiple
        # A bucket rounded up reaches `size` just when it is beyond the multiple below `size`.
        beyond = (size - 1) // multiple * multiple + 1 if size else 0
        try:
            bucket = self.inner.bucket(beyond)
        except BucketOverflowError as error:
            raise BucketOverflowError(
                size, -(-error.largest // multiple) * multiple, error.dim
            ) from None
        return -(-bucket // multiple) * multiple

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.multiple})"
