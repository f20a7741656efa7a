"""A strategy of powers of two and steps between them, like the size classes of allocators."""

from __future__ import annotations

import dataclasses

from bucketjit.strategies.base import Ladder


@dataclasses.dataclass(frozen=True, repr=False)
class SizeClasses(Ladder):
    """Round up to a power of two or one of the equal steps between two: 2, 3, 4, 6, 8, 12, ...

    With 2 steps these are ``2**n`` and ``1.5 * 2**n``, with 4 the size classes of jemalloc. At
    most ``1 / (steps + 1)`` of a bucket is padding: a third for 2 steps, half for
    :class:`~bucketjit.strategies.Pow2`. There are ``steps`` times the buckets of ``Pow2``.

    Args:
        steps: Number of buckets from one power of two to the next; with 1 they are those of
            ``Pow2``.
        min: No bucket is smaller than this.
        max: The largest bucket, whether or not it is a rung; None for no limit.
        multiple_of: Round every bucket up to a multiple of this.

    Raises:
        TypeError: If a parameter is not an int.
        ValueError: If a parameter is below 1, ``max`` is below ``min``, or ``max`` is not a
            multiple of ``multiple_of``.

    Examples:
        >>> [SizeClasses().bucket(n) for n in (1, 5, 7, 9, 13, 100)]
        [1, 6, 8, 12, 16, 128]
        >>> sorted({SizeClasses(4, min=16).bucket(n) for n in range(65)})
        [16, 20, 24, 28, 32, 40, 48, 56, 64]
    """

    steps: int = 2

    def __post_init__(self) -> None:
        self._normalise("steps")
        super().__post_init__()

    def _rung_beyond(self, size: int) -> int:
        if not size:
            return 1
        power = 1 << (size.bit_length() - 1)
        # The step rounded up is beyond `size` just when the step itself is: so count whole ones.
        step = (size - power) * self.steps // power + 1
        return power + -(-power * step // self.steps)
