"""Strategies: three ladders, every size, what calls teach, a list, and what is beyond."""

from __future__ import annotations

import bisect
import dataclasses
import math
import numbers
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from bucketjit.errors import BucketOverflowError
from bucketjit.strategies.base import (
    Ladder,
    Strategy,
    checked_sizes,
    logical_size,
    positive_int,
)

_SMALLEST_BASE = 1.001

# Rungs are computed as integers that count units of 2**-_FRACTION_BITS: floats would drift, and
# exact fractions grow by 50 bits with every rung.
_FRACTION_BITS = 128


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


@dataclasses.dataclass(frozen=True, repr=False)
class Exponential(Ladder):
    """Round up to ``min * base**k``, itself rounded up.

    The buckets of base 1.4 are 1, 2, 3, 4, 6, 8, 11 and so on.
    The share of padding is at most about ``1 - 1 / base`` at every scale, so ``base`` sets the
    trade: near 1 little padding and many buckets, at 2 those of
    :class:`~bucketjit.strategies.Pow2`.

    The rungs do not depend on the size, and the bucket of a size is the first rung that holds it.
    So a bucket is its own bucket for every base. The rounded formula ``base**ceil(log(n, base))``
    does not have that property: with base 1.4 it sends 5 to 6, and 6 to 8.

    Args:
        base: The ratio of two neighbouring buckets, at least 1.001: an int, a float or a
            ``Fraction``.
        min: The smallest bucket (before ``multiple_of``), and where the powers start.
        max: The largest bucket, whether or not it is on the ladder; None for no limit.
        multiple_of: Round every bucket up to a multiple of this.

    Raises:
        TypeError: If ``base`` is not a number, or another parameter is not an int.
        ValueError: If ``base`` is below 1.001 or not finite, another parameter is below 1,
            ``max`` is below ``min``, or ``max`` is not a multiple of ``multiple_of``.

    Examples:
        >>> strategy = Exponential(1.4)
        >>> [strategy.bucket(n) for n in (1, 5, 8, 9, 1000)]
        [1, 6, 8, 11, 1172]
        >>> [Exponential(1.5, min=16).bucket(n) for n in (1, 17, 25)]
        [16, 24, 36]
    """

    base: int | float | Fraction
    _rungs: tuple[int, ...] = dataclasses.field(default=(), init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", _as_base(self.base))
        super().__post_init__()

    def rung_beyond(self, size: int) -> int:
        """Return the smallest rung that is strictly larger than ``size``."""
        rungs = self._rungs
        if not rungs or rungs[-1] <= size:
            rungs = self._climb(size)
            # One assignment of a complete ladder: threads that race here write equally good ones.
            object.__setattr__(self, "_rungs", rungs)
        return rungs[bisect.bisect_right(rungs, size)]

    def _climb(self, size: int) -> tuple[int, ...]:
        numerator, denominator = Fraction(self.base).as_integer_ratio()
        rung = self.min
        exact = rung << _FRACTION_BITS
        rungs = [rung]
        while rung <= 2 * size:
            exact = exact * numerator // denominator
            above = -(-exact >> _FRACTION_BITS)
            if above > rung:
                rung = above
                rungs.append(rung)
        return tuple(rungs)


def _as_base(value: object) -> int | float | Fraction:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"base must be a number of at least {_SMALLEST_BASE}, not {value!r} "
            f"({type(value).__name__})"
        )
    kind: Any = int if isinstance(value, numbers.Integral) else float
    base: int | float | Fraction = value if isinstance(value, Fraction) else kind(value)
    if isinstance(base, float) and not math.isfinite(base):
        raise ValueError(f"base must be finite, not {base}")
    if base < _SMALLEST_BASE:
        raise ValueError(
            f"base must be at least {_SMALLEST_BASE}, not {base}; Exact() pads nothing at all"
        )
    return base


@dataclasses.dataclass(frozen=True)
class Exact:
    """Give every size its own bucket: no padding, and one compile per size.

    Examples:
        >>> Exact().bucket(7)
        7
    """

    def bucket(self, n: int, /) -> int:
        """Return the size itself.

        Args:
            n: The logical size, 0 or more.

        Returns:
            ``n``, as a Python int.

        Raises:
            TypeError: If ``n`` is not an int.
            ValueError: If ``n`` is negative.
        """
        return logical_size(n)


@dataclasses.dataclass(frozen=True)
class Auto:
    """Learn the buckets from the sizes that come, and from what compiling and running cost.

    A size that no bucket holds gets a power of two. A better bucket is compiled when the seconds
    that it would have saved reach what compiling it costs. Several variables are learnt together.
    A bucketed function with a directory for its executables (`BucketedExec.with_persistence`)
    starts with the buckets that are there.

    Where there are no calls to learn from (a saved function, a warm-up, several processes that
    agree on a bucket), it is `Pow2`.

    Args:
        buckets: The largest number of buckets that are learnt. Sizes that none of them holds get
            further ones.

    Raises:
        TypeError: If ``buckets`` is not an int.
        ValueError: If it is below 1.

    Examples:
        >>> import bucketjit, jax.numpy as jnp, numpy as np
        >>> total = bucketjit.jit(jnp.sum, buckets="auto")
        >>> for n in (100, 37, 200):
        ...     _ = total(np.ones(n, np.float32))
        >>> [(dict(bucket.sizes), bucket.why) for bucket in total.stats().learnt]
        [({'batch': 128}, 'no bucket held a call'), ({'batch': 256}, 'no bucket held a call')]
    """

    buckets: int = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", positive_int("buckets", self.buckets))

    def bucket(self, n: int, /) -> int:
        """Return the power of two that holds a size; see `Pow2`."""
        return 1 << max(0, logical_size(n) - 1).bit_length()


def extended(strategy: Strategy, largest: int) -> Strategy:
    """The strategy for sizes beyond the largest bucket of another one, by its own rule.

    A ladder with a ``max`` goes on as if it had none. Others have no rule: then each bucket is
    twice the one before, so few executables hold any size, and at most half of one is padding.
    """
    if isinstance(strategy, Ladder):
        return dataclasses.replace(strategy, max=None)
    return Exponential(2, min=max(1, largest))


# --- boundaries ---

# Explicit buckets, and the list of all buckets of a strategy that has a largest one.


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
    buckets: list[int] = []
    while not buckets or buckets[-1] < strategy.max:
        if len(buckets) == MOST_LISTED:
            return None
        buckets.append(strategy.bucket(buckets[-1] + 1 if buckets else 1))
    return tuple(buckets)
