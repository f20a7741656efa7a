"""Counts how often each size, or combination of sizes, occurred, and checks the sizes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

Sizes = Iterable[int] | Mapping[int, float]

_LARGEST = int(np.iinfo(np.int64).max)


class Histogram(NamedTuple):
    """How often each combination of the sizes of one or several variables occurred.

    Attributes:
        dims: The names of the ``d`` variables.
        points: The distinct combinations in increasing order, each size at least 1; of shape
            ``(m, d)``.
        counts: How often each occurred, more than 0; of shape ``(m,)``.
    """

    dims: tuple[str, ...]
    points: Ints
    counts: Floats


def is_named(sizes: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether sizes are given by the names of variables, not as sizes or counts of one."""
    return isinstance(sizes, Mapping) and bool(sizes) and all(isinstance(k, str) for k in sizes)


def histogram(sizes: Sizes | Mapping[str, Sizes]) -> Histogram:
    """Count combinations of sizes; a call with a size of 0 runs exact, and is left out.

    Examples:
        >>> histogram({"b": [4, 4, 1], "s": [9, 9, 30]})
        Histogram(dims=('b', 's'), points=array([[ 1, 30], [ 4,  9]]), counts=array([1., 2.]))
        >>> histogram({3: 1, 5: 2}).counts
        array([1., 2.])
    """
    named = is_named(sizes)
    columns: Mapping[str, Any] = sizes if is_named(sizes) else {"size": sizes}
    arrays, counts = {}, None
    for dim, column in columns.items():
        name = f"sizes[{dim!r}]" if named else "sizes"
        if isinstance(column, Mapping):
            if len(columns) > 1:
                raise TypeError(
                    f"{name} must be the size of each call: counts do not say which sizes of "
                    "several variables belong together"
                )
            column = dict(column)
            counts = np.array([_count(n, c) for n, c in column.items()], np.float64)
        arrays[dim] = _integers(name, column)
    lengths = {dim: len(array) for dim, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"all variables must have as many sizes as there were calls, not {lengths}"
        )
    points = np.stack(list(arrays.values()), axis=1)
    counts = np.ones(len(points)) if counts is None else counts
    seen = (points > 0).all(axis=1) & (counts > 0)
    if not seen.any():
        raise ValueError("sizes must hold at least one size of 1 or more, not none")
    distinct, where = np.unique(points[seen], axis=0, return_inverse=True)
    counts = np.bincount(where.ravel(), counts[seen]).astype(np.float64)
    return Histogram(tuple(columns), distinct, counts)


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
