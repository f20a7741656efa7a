"""A strategy that extends another one beyond its largest bucket."""

from __future__ import annotations

import dataclasses

from bucketjit.errors import BucketOverflowError
from bucketjit.strategies.base import Changing, Ladder, Strategy, checked_strategy
from bucketjit.strategies.exponential import Exponential
from bucketjit.strategies.multiple_of import MultipleOf
from bucketjit.strategies.optimal import Optimal


@dataclasses.dataclass(frozen=True, repr=False)
class Extended:
    """Continue beyond the largest bucket of a strategy, by its own rule.

    A ladder with a ``max`` continues as if it had none: ``Pow2(max=48)`` has the buckets 32, 48,
    64, 128. `Boundaries`, an `Optimal` without ``beyond`` and a strategy of your own have no rule:
    then each bucket is twice the one before, so that few executables hold any size and at most half
    of one is padding. Sizes up to the largest bucket keep their buckets. ``Overflow.EXTEND`` uses
    this class.

    Args:
        inner: The strategy; not one that changes while it is in use (`Adaptive`), but its ``plan``.

    Raises:
        StrategyContractError: If ``inner`` is no strategy.
        TypeError: If ``inner`` is one that changes.

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
        if isinstance(self.inner, Changing):
            raise TypeError(f"inner must be a strategy that does not change, not {self.inner!r}")

    def bucket(self, n: int, /) -> int:
        """Return the bucket of a logical size.

        Args:
            n: The logical size, 0 or more.

        Returns:
            The bucket of ``inner``, or one beyond its largest.

        Raises:
            TypeError: If ``n`` is not an int.
            ValueError: If ``n`` is negative.
        """
        try:
            return self.inner.bucket(n)
        except BucketOverflowError as error:
            # `inner` may be any strategy: its largest bucket is known only from its error.
            return _beyond(self.inner, error.largest).bucket(n)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def extended(strategy: Strategy) -> Extended:
    """The present plan of a strategy, extended beyond its largest bucket.

    Args:
        strategy: The strategy.

    Returns:
        The extended strategy.

    Raises:
        StrategyContractError: If ``strategy`` is no strategy.
    """
    return Extended(strategy.plan if isinstance(strategy, Changing) else strategy)


def _beyond(strategy: Strategy, largest: int) -> Strategy:
    """The rule for sizes that are larger than the largest bucket."""
    if isinstance(strategy, Ladder):
        return dataclasses.replace(strategy, max=None)
    if isinstance(strategy, MultipleOf):
        return MultipleOf(extended(strategy.inner), strategy.multiple)
    if isinstance(strategy, Optimal) and strategy.beyond is not None:
        return extended(strategy.beyond)
    return Exponential(2, min=max(1, largest))
