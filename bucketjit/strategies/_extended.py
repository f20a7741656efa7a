"""A strategy that extends another one beyond its largest bucket."""

from __future__ import annotations

import dataclasses

from bucketjit.errors import BucketOverflowError
from bucketjit.strategies.base import Ladder, Strategy, checked_strategy
from bucketjit.strategies.rounding import Exponential


@dataclasses.dataclass(frozen=True, repr=False)
class Extended:
    """Continue beyond the largest bucket of a strategy, by its own rule.

    A ladder with a ``max`` continues as if it had none: ``Pow2(max=48)`` has the buckets 32, 48,
    64, 128. `Boundaries` and a strategy of your own have no rule: then each bucket is twice the one
    before, so that few executables hold any size and at most half of one is padding. Sizes up to
    the largest bucket keep their buckets. ``Overflow.EXTEND`` uses this class.

    Args:
        inner: The strategy.

    Raises:
        StrategyContractError: If ``inner`` is no strategy.

    Examples:
        >>> from bucketjit.strategies import Boundaries, Pow2
        >>> [Extended(Pow2(max=48)).bucket(n) for n in (20, 40, 49, 100)]
        [32, 48, 64, 128]
        >>> [Extended(Boundaries([30, 60, 90])).bucket(n) for n in (20, 90, 91, 181)]
        [30, 90, 180, 360]
    """

    inner: Strategy

    def __post_init__(self) -> None:
        checked_strategy("inner", self.inner)

    def bucket(self, n: int, /) -> int:
        """Return the bucket of a logical size."""
        try:
            return self.inner.bucket(n)
        except BucketOverflowError as error:
            if isinstance(self.inner, Ladder):
                return dataclasses.replace(self.inner, max=None).bucket(n)
            # `inner` may be any strategy: its largest bucket is known only from its error.
            return Exponential(2, min=max(1, error.largest)).bucket(n)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"
