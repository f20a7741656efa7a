"""Counts how often each size, or combination of sizes, occurred, and checks the sizes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

Sizes = Iterable[int] | Mapping[int, float]

_LARGEST = int(np.iinfo(np.int64).max)


class Histogram(NamedTuple):
    """How often each size occurred.

    Attributes:
        sizes: The distinct sizes in increasing order, each at least 1; of shape ``(m,)``.
        counts: How often each occurred, more than 0; of shape ``(m,)``.
    """

    sizes: Ints
    counts: Floats


class JointHistogram(NamedTuple):
    """How often each combination of the sizes of several variables occurred.

    Attributes:
        dims: The names of the ``d`` variables.
        points: The distinct combinations, each size at least 1; of shape ``(m, d)``.
        counts: How often each occurred; of shape ``(m,)``.
    """

    dims: tuple[str, ...]
    points: Ints
    counts: Floats

    @property
    def largest(self) -> list[int]:
        """The largest size of each variable."""
        return [int(np.max(column)) for column in self.points.T]


def histogram(sizes: Sizes) -> Histogram:
    """Count sizes. Size 0 is left out: a call of size 0 runs exact, in no bucket.

    Args:
        sizes: The size of each call, in any iterable or array; or a mapping of size to count.

    Returns:
        The distinct sizes and their counts.

    Raises:
        TypeError: If the sizes are no integers, or a count is no number.
        ValueError: If a size or a count is negative, or nothing was counted.

    Examples:
        >>> histogram([5, 3, 5, 0])
        Histogram(sizes=array([3, 5]), counts=array([1., 2.]))
        >>> histogram({3: 1, 5: 2}).counts
        array([1., 2.])
    """
    if isinstance(sizes, Mapping):
        values = _integers("sizes", list(sizes))
        counts = np.array([_count(n, c) for n, c in sizes.items()], np.float64)
    else:
        values = _integers("sizes", sizes)
        counts = np.ones(len(values))
    seen = (values > 0) & (counts > 0)
    distinct, where = np.unique(values[seen], return_inverse=True)
    if not len(distinct):
        raise ValueError("sizes must hold at least one size of 1 or more, not none")
    return Histogram(distinct, weigh(where, counts[seen]))


def joint_histogram(sizes: Mapping[str, Sizes]) -> JointHistogram:
    """Count combinations of sizes; one with a size 0 is left out.

    Args:
        sizes: The sizes of each variable, by its name; the i-th sizes of all variables are one
            call. Of a single variable, it may be a mapping of size to count.

    Returns:
        The distinct combinations and their counts.

    Raises:
        TypeError: If ``sizes`` is no mapping of names to integers.
        ValueError: If the variables have different numbers of sizes, or there are none.

    Examples:
        >>> joint_histogram({"b": [4, 4, 1], "s": [9, 9, 30]})
        JointHistogram(dims=('b', 's'), points=array([[ 1, 30], [ 4,  9]]), counts=array([1., 2.]))
    """
    if not isinstance(sizes, Mapping) or not all(isinstance(name, str) for name in sizes):
        raise TypeError(
            "sizes must map the name of each dimension variable to its sizes, such as "
            f"{{'b': [4, 8], 's': [17, 30]}}, not {sizes!r}"
        )
    counted = [name for name, column in sizes.items() if isinstance(column, Mapping)]
    if counted and len(sizes) == 1:
        seen = histogram(sizes[counted[0]])
        return JointHistogram(tuple(sizes), seen.sizes[:, None], seen.counts)
    if counted:
        raise TypeError(
            f"sizes[{counted[0]!r}] must be the size of each call, not counts of sizes: those do "
            "not tell which sizes of several variables belong together"
        )
    columns = {name: _integers(f"sizes[{name!r}]", column) for name, column in sizes.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"all variables must have as many sizes as there were calls, not {lengths}"
        )
    points = np.array(list(columns.values()), np.int64).T
    points = points[(points > 0).all(axis=1)] if len(columns) else points
    if not len(points):
        raise ValueError("sizes must hold at least one call with sizes of 1 or more, not none")
    distinct, counts = np.unique(points, axis=0, return_counts=True)
    return JointHistogram(tuple(columns), distinct, counts.astype(np.float64))


def largest_bucket(name: str, seen: int, multiple_of: int, largest: int | None) -> int:
    """The largest bucket: the limit of the user, or else the largest size seen, rounded up.

    Args:
        name: Name of the limit in messages.
        seen: The largest size seen.
        multiple_of: Every bucket is a multiple of this.
        largest: The limit of the user, or None.

    Returns:
        The largest bucket.

    Raises:
        ValueError: If the limit is not a multiple of ``multiple_of``, or no shape can hold it.

    Examples:
        >>> largest_bucket("max", 50, 8, None)
        56
    """
    if largest is not None and largest % multiple_of:
        raise ValueError(f"{name} must be a multiple of multiple_of ({multiple_of}), not {largest}")
    bucket = -(-seen // multiple_of) * multiple_of if largest is None else largest
    if bucket >= 2**63:
        given = f"multiple_of is {multiple_of}" if largest is None else f"{name} is given as such"
        raise ValueError(f"the largest bucket must be below 2**63, not {bucket}: {given}")
    return bucket


def rounded_up(seen: Histogram, multiple_of: int, largest: int) -> Histogram:
    """Round sizes up to multiples, drop those beyond the largest bucket, and add the bucket.

    Args:
        seen: The sizes.
        multiple_of: Every result is a multiple of this.
        largest: The largest bucket. If no size rounds up to it, its count is 0.

    Returns:
        The rounded sizes and their counts.

    Examples:
        >>> rounded_up(histogram([3, 5, 8, 20]), 4, 16)
        Histogram(sizes=array([ 4,  8, 16]), counts=array([1., 2., 0.]))
    """
    fits = seen.sizes <= largest
    sizes = -(-seen.sizes[fits] // multiple_of) * multiple_of
    distinct, where = np.unique(np.append(sizes, largest), return_inverse=True)
    return Histogram(distinct, weigh(where, np.append(seen.counts[fits], 0.0)))


def weigh(where: Ints, counts: Floats) -> Floats:
    """Sum the counts with equal positions in ``where``."""
    return np.bincount(where, counts).astype(np.float64)


def _integers(name: str, values: object) -> Ints:
    """An array of sizes, checked."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be an iterable of ints, not {values!r}")
    if not isinstance(values, np.ndarray):
        values = list(values)
        if any(isinstance(n, bool | np.bool_) for n in values):
            raise TypeError(f"{name} must be a flat iterable of ints, not of bool")
        # NumPy makes floats of its own ints where some are signed and some are not.
        values = [int(n) if isinstance(n, np.integer) else n for n in values]
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different length
        raise TypeError(f"{name} must be a flat iterable of ints, not a nested one") from None
    if not array.size:
        return np.zeros(0, np.int64)
    # NumPy makes arrays of another type (uint64, float64 or object) for ints of 2**63 and more.
    if array.ndim == 1 and array.dtype.kind not in "ib":
        for n in values:
            if isinstance(n, int | np.integer) and n > _LARGEST:
                raise ValueError(f"{name} must be below 2**63, not {n}")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} must be a flat iterable of ints, not of {array.dtype} with shape {array.shape}"
        )
    if (smallest := array.min()) < 0:
        raise ValueError(f"{name} must not be negative, not {smallest}")
    return array.astype(np.int64)


def _count(size: int, count: object) -> float:
    """Check the count of a size, and make it a float."""
    if isinstance(count, bool) or not isinstance(count, numbers.Real):
        raise TypeError(f"the count of size {size} must be a number, not {count!r}")
    number = float(count)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"the count of size {size} must be finite and not negative, not {count}")
    return number
