"""A strategy whose buckets are multiples of a step."""

from __future__ import annotations

import dataclasses

from bucketjit.strategies.base import Ladder


@dataclasses.dataclass(frozen=True, repr=False)
class Linear(Ladder):
    """Round up to a multiple of a step: ``step``, ``2 * step``, ``3 * step``, ...

    At most ``step - 1`` positions are padding, whatever the size; the number of buckets grows
    with the largest size.

    Args:
        step: The distance between two buckets.
        min: No bucket is smaller than this; the smallest bucket is the first multiple of
            ``step`` that is not.
        max: The largest bucket, whether or not it is a multiple of ``step``; None for no limit.
        multiple_of: Round every bucket up to a multiple of this.

    Raises:
        TypeError: If a parameter is not an int.
        ValueError: If a parameter is below 1, ``max`` is below ``min``, or ``max`` is not a
            multiple of ``multiple_of``.

    Examples:
        >>> [Linear(8).bucket(n) for n in (1, 8, 9, 17)]
        [8, 8, 16, 24]
        >>> [Linear(10, min=25, max=48).bucket(n) for n in (1, 31, 41)]
        [30, 40, 48]
        >>> [Linear(10, multiple_of=8).bucket(n) for n in (1, 17, 25)]
        [16, 24, 32]
    """

    step: int

    def __post_init__(self) -> None:
        self._normalise("step")
        super().__post_init__()

    def rung_beyond(self, size: int) -> int:
        """Return the smallest rung that is strictly larger than ``size``."""
        return (size // self.step + 1) * self.step
