"""A strategy with as few buckets as a bound on padding allows."""

from __future__ import annotations

import bisect
import dataclasses
import numbers
from fractions import Fraction

from bucketjit.strategies.base import Ladder

_SMALLEST_WASTE = Fraction(1, 1000)


@dataclasses.dataclass(frozen=True, repr=False)
class BoundedWaste(Ladder):
    """Keep the padding of every bucket within a share of it, with as few buckets as that takes.

    Each bucket is the largest that still wastes at most ``waste`` on the smallest size it holds,
    which is one more than the bucket before. The bound is exact from ``min`` on at every scale,
    where :class:`~bucketjit.strategies.Exponential` of base ``1 / (1 - waste)`` keeps it only
    roughly for small sizes. Rounding to ``multiple_of`` may add up to ``multiple_of - 1`` positions
    of padding to that.

    Args:
        waste: The largest share of a bucket that may be padding, from 0.001 to below 1; a
            float means the decimal number it is written as.
        min: The smallest bucket (before ``multiple_of``); sizes below it waste more.
        max: The largest bucket, whether or not it is a rung; None for no limit.
        multiple_of: Round every bucket up to a multiple of this.

    Raises:
        TypeError: If ``waste`` is not a number, or another parameter is not an int.
        ValueError: If ``waste`` is not in its range, another parameter is below 1, ``max`` is
            below ``min``, or ``max`` is not a multiple of ``multiple_of``.

    Examples:
        >>> strategy = BoundedWaste(0.2, min=8)
        >>> sorted({strategy.bucket(n) for n in range(1, 50)})
        [8, 11, 15, 20, 26, 33, 42, 53]
        >>> (53 - 43) / 53 <= 0.2 < (54 - 43) / 54
        True
    """

    waste: float | Fraction
    _rungs: tuple[int, ...] = dataclasses.field(default=(), init=False, compare=False)

    def __post_init__(self) -> None:
        waste = self.waste
        if isinstance(waste, bool) or not isinstance(waste, numbers.Real):
            raise TypeError(
                f"waste must be a number from 0.001 to below 1, not {waste!r} "
                f"({type(waste).__name__})"
            )
        if not _SMALLEST_WASTE <= waste < 1:
            raise ValueError(
                f"waste must be from 0.001 to below 1, not {waste}; Exact() wastes nothing"
            )
        object.__setattr__(self, "waste", waste if isinstance(waste, Fraction) else float(waste))
        super().__post_init__()

    def _rung_beyond(self, size: int) -> int:
        rungs = self._rungs
        if not rungs or rungs[-1] <= size:
            rungs = self._climb(size)
            # One assignment of a complete ladder: threads that race here write equally good ones.
            object.__setattr__(self, "_rungs", rungs)
        return rungs[bisect.bisect_right(rungs, size)]

    def _climb(self, size: int) -> tuple[int, ...]:
        """Return the rungs up to a few beyond ``size``."""
        waste = self.waste if isinstance(self.waste, Fraction) else Fraction(repr(self.waste))
        real = 1 - waste
        rungs = [self.min]
        while rungs[-1] <= 2 * size:
            rungs.append((rungs[-1] + 1) * real.denominator // real.numerator)
        return tuple(rungs)
