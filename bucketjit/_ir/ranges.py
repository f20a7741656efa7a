"""Ranges of integers whose ends are numbers or symbolic sizes, and which of two ends is larger."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._ir.bounds import is_never_negative, magnitude
from bucketjit._ir.expressions import Dim, is_symbolic
from bucketjit._jax.patches.shapes import fresh_dimension

_NARROW = 16  # bits: an integer type of at most these has bounds of its own
_LONGEST = 200  # characters of an expression; longer ones are forgotten
_MOST_ELEMENTS = 1 << 16  # of a constant whose values are looked at


@dataclass(frozen=True, eq=False)
class Range:
    """The smallest and the largest value of an array; None where no bound is known.

    Attributes:
        low: The lower bound.
        high: The upper bound.
    """

    low: Dim | None = None
    high: Dim | None = None

    def __eq__(self, other: object) -> bool:
        # As texts: `==` of sizes is an event of the trace.
        return isinstance(other, Range) and _texts(self) == _texts(other)

    __hash__ = None  # type: ignore[assignment]


def _texts(bounds: Range) -> tuple[str, str]:
    return str(bounds.low), str(bounds.high)


def is_at_most(one: Dim | None, other: Dim | None) -> bool:
    """Whether ``one <= other`` at all sizes; False if that is not known."""
    if one is None or other is None:
        return False
    difference = other - one
    if not is_symbolic(difference):
        return bool(difference >= 0)
    return is_never_negative(str(difference))


def _extreme(name: str, one: Dim | None, other: Dim | None) -> Dim | None:
    """The ``max`` or the ``min`` of two bounds, one of the two if that is known."""
    if one is None or other is None:
        return None
    is_smaller = is_at_most(one, other)
    if is_smaller or is_at_most(other, one):
        return other if is_smaller == (name == "max") else one
    return fresh_dimension(one if is_symbolic(one) else other, f"{name}({one}, {other})")


def largest(one: Dim | None, other: Dim | None) -> Dim | None:
    """The larger one of two bounds."""
    return _extreme("max", one, other)


def smallest(one: Dim | None, other: Dim | None) -> Dim | None:
    """The smaller one of two bounds."""
    return _extreme("min", one, other)


def tighter(pick: Callable[[Any, Any], Any], one: Dim | None, other: Dim | None) -> Dim | None:
    """What is picked of two bounds that both hold."""
    if one is None or other is None:
        return other if one is None else one
    return pick(one, other)


def is_natural(x: Range) -> bool:
    """Whether no value is negative."""
    return is_at_most(0, x.low)


def range_of_array(value: Any) -> Range:
    """The range of the values of an array, or a number, that is known."""
    if np.size(value) == 0 or np.size(value) > _MOST_ELEMENTS:
        return range_of_type(jax.typeof(value))
    if jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.extended):  # random keys
        return Range()
    values = np.asarray(value)
    if values.dtype.kind not in "biuf":
        return Range()
    low, high = values.min(), values.max()
    if values.dtype.kind == "f" and not np.isfinite([low, high]).all():
        return Range()
    return Range(math.floor(low), math.ceil(high))


def range_of_type(aval: Any) -> Range:
    """The bounds of the values that a type has, if it has few."""
    dtype = getattr(aval, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, np.bool_):
        return Range(0, 1)
    if dtype is None or not jnp.issubdtype(dtype, np.integer):
        return Range()
    limits = jnp.iinfo(dtype)
    if limits.bits <= _NARROW:
        return Range(int(limits.min), int(limits.max))
    return Range(0 if limits.min == 0 else None, None)


def fitted(found: Range, aval: Any) -> Range:
    """The bounds of a result that is a value of its type, without those that say nothing."""
    low, high = (None if len(str(x)) > _LONGEST else x for x in (found.low, found.high))
    dtype = aval.dtype
    if jnp.issubdtype(dtype, np.bool_):
        return Range(0, 1)
    if not jnp.issubdtype(dtype, np.integer):
        return Range(low, high)
    limits = jnp.iinfo(dtype)
    if (limits.min == 0 and not is_at_most(0, low)) or (
        limits.bits <= _NARROW
        and not (is_at_most(limits.min, low) and is_at_most(high, limits.max))
    ):
        return range_of_type(aval)
    beyond = (isinstance(low, int) and low < limits.min) or (
        isinstance(high, int) and high > limits.max
    )
    return range_of_type(aval) if beyond else Range(low, high)


def is_within_type(found: Range, dtype: Any) -> bool:
    """Whether an integer type has all integers of a range, so that none wraps around.

    For types of 32 bits and more, sizes are taken to be at most 2**24, as are products of sizes:
    ``100*n`` is within int32, and ``1103515245*n`` is not.
    """
    if found.low is None or found.high is None:
        return False
    limits = jnp.iinfo(dtype)
    return (
        is_at_most(limits.min, found.low)
        or (limits.min < 0 and _is_at_most_in_size(found.low, -int(limits.min), limits.bits))
    ) and (
        is_at_most(found.high, limits.max)
        or _is_at_most_in_size(found.high, int(limits.max), limits.bits)
    )


def _is_at_most_in_size(bound: Dim, most: int, bits: int) -> bool:
    return is_symbolic(bound) and bits > _NARROW and magnitude(str(bound)) <= most


def within_type(found: Range, aval: Any) -> Range:
    """A range with the ends of its integer type where it has none."""
    if not jnp.issubdtype(aval.dtype, np.integer):
        return found
    limits = jnp.iinfo(aval.dtype)
    low = int(limits.min) if found.low is None else found.low
    return Range(low, int(limits.max) if found.high is None else found.high)


def rounded(found: Range, dtype: Any) -> Range:
    """The bounds of numbers that are rounded to a floating type; a size is no bound of these."""
    return Range(_rounded(found.low, dtype, math.floor), _rounded(found.high, dtype, math.ceil))


def _rounded(bound: Dim | None, dtype: Any, away: Callable[[float], int]) -> int | None:
    if not isinstance(bound, int):
        return None
    nearest = float(np.asarray(bound, np.float64).astype(dtype))
    return away(nearest) if math.isfinite(nearest) else None


def joined(*ranges: Range) -> Range:
    """The range around all of these."""
    first, *others = ranges
    for x in others:
        first = Range(smallest(first.low, x.low), largest(first.high, x.high))
    return first


def sum_of(one: Dim | None, other: Dim | None) -> Dim | None:
    """The sum of two bounds."""
    return None if one is None or other is None else one + other


def negated(x: Range) -> Range:
    """The range of the negative values."""
    return Range(*(None if b is None else -b for b in (x.high, x.low)))


def _times(one: Dim | None, other: Dim | None) -> Dim | None:
    return None if one is None or other is None else one * other


def product(one: Range, other: Range) -> Range:
    """The range of products."""
    first: tuple[Any, Any] = (one.low, one.high)
    second: tuple[Any, Any] = (other.low, other.high)
    if is_natural(one) and is_natural(other):
        return Range(_times(one.low, other.low), _times(one.high, other.high))
    if not all(isinstance(x, int) for x in second):
        return Range()
    if second[0] == second[1]:
        low, high = first if second[0] >= 0 else first[::-1]
        return Range(_times(low, second[0]), _times(high, second[0]))
    if not all(isinstance(x, int) for x in first):
        return Range()
    corners = [a * b for a in first for b in second]
    return Range(min(corners), max(corners))


def quotient(one: Range, by: Range) -> Range:
    """The range of quotients of integers, rounded down or towards 0."""
    if not is_at_most(1, by.low):
        return Range()
    ends = (by.low, by.high)
    is_number = all(isinstance(x, int) for x in ends) and by.low == by.high
    parts = [b // by.low if is_number and b is not None else b for b in (one.low, one.high)]
    low, high = parts
    if is_natural(one):
        return Range(low if is_number else 0, high)
    low = None if low is None else smallest(low, 0)
    return Range(low, None if high is None else largest(high, 0))


def times(x: Range, count: Dim, *, also_one: bool) -> Range:
    """The range of sums of ``count`` values."""
    low, high = _times(x.low, count), _times(x.high, count)
    if not also_one:
        return Range(low, high)
    return Range(smallest(low, x.low), largest(high, x.high))
