"""A strategy whose buckets are powers of two."""

from __future__ import annotations

import dataclasses

from bucketjit.strategies.base import Ladder


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Pow2(Ladder):
    """Round up to a power of two: 1, 2, 4, 8, ...

    Few buckets, and up to half of a bucket is padding. Give ``min`` whenever small sizes are
    possible: buckets 1, 2 and 4 cost a compile each and save next to nothing.

    Args:
        min: No bucket is smaller than this; the smallest bucket is the first power of two that
            is not.
        max: The largest bucket, whether or not it is a power of two; None for no limit.
        multiple_of: Round every bucket up to a multiple of this.

    Raises:
        TypeError: If a parameter is not an int.
        ValueError: If a parameter is below 1, ``max`` is below ``min``, or ``max`` is not a
            multiple of ``multiple_of``.

    Examples:
        >>> [Pow2().bucket(n) for n in (1, 3, 8, 9)]
        [1, 4, 8, 16]
        >>> [Pow2(min=4, max=12).bucket(n) for n in (1, 5, 9)]
        [4, 8, 12]
        >>> [Pow2(multiple_of=6).bucket(n) for n in (1, 7, 13, 25)]
        [6, 12, 18, 36]
    """

    def rung_beyond(self, size: int) -> int:
        """Return the smallest rung that is strictly larger than ``size``."""
        return 1 << size.bit_length()
