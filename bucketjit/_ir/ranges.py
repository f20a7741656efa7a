"""Ranges of integers whose ends are numbers or symbolic sizes, and which of two ends is larger."""

from __future__ import annotations

import functools
import math
import operator
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
    """The smallest and the largest value of an array; None where no bound is known."""

    low: Dim | None = None
    high: Dim | None = None

    def __eq__(self, other: object) -> bool:
        # As texts: `==` of sizes is an event of the trace.
        return isinstance(other, Range) and f"{self.low} {self.high}" == f"{other.low} {other.high}"

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_natural(self) -> bool:
        """Whether no value is negative."""
        return is_at_most(0, self.low)

    @property
    def is_number(self) -> bool:
        """Whether there is one value, which is known."""
        return isinstance(self.low, int) and self.low == self.high

    def __neg__(self) -> Range:
        return Range(*(None if end is None else -end for end in (self.high, self.low)))

    def __add__(self, other: Range) -> Range:
        return Range(sum_of(self.low, other.low), sum_of(self.high, other.high))

    def __or__(self, other: Range) -> Range:
        return Range(smallest(self.low, other.low), largest(self.high, other.high))

    def __mul__(self, other: Range) -> Range:
        x, y = (other, self) if self.is_number else (self, other)
        if x.is_natural and y.is_natural:
            return Range(_times(x.low, y.low), _times(x.high, y.high))
        ends: list[Any] = [x.low, x.high, y.low, y.high]
        if y.is_number:
            first, last = ends[:2] if ends[2] >= 0 else ends[1::-1]
            return Range(_times(first, y.low), _times(last, y.low))
        if not all(isinstance(end, int) for end in ends):
            return Range()
        corners = [a * b for a in ends[:2] for b in ends[2:]]
        return Range(min(corners), max(corners))


def is_at_most(a: Dim | None, b: Dim | None) -> bool:
    """Whether ``a <= b`` at all sizes; False if that is not known."""
    if a is None or b is None:
        return False
    difference = b - a
    if not is_symbolic(difference):
        return bool(difference >= 0)
    return is_never_negative(str(difference))


def _extreme(name: str, a: Dim | None, b: Dim | None) -> Dim | None:
    if a is None or b is None:
        return None
    is_smaller = is_at_most(a, b)
    if is_smaller or is_at_most(b, a):
        return b if is_smaller == (name == "max") else a
    return fresh_dimension(a if is_symbolic(a) else b, f"{name}({a}, {b})")


#: The larger and the smaller one of two bounds; None if one of them is not known.
largest, smallest = functools.partial(_extreme, "max"), functools.partial(_extreme, "min")


def tighter(pick: Callable[[Any, Any], Any], a: Dim | None, b: Dim | None) -> Dim | None:
    """What is picked of two bounds that both hold."""
    return pick(a, b) if a is not None and b is not None else b if a is None else a


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


def fitted(x: Range, aval: Any) -> Range:
    """The bounds of a result that is a value of its type, without those that say nothing."""
    low, high = (None if len(str(end)) > _LONGEST else end for end in (x.low, x.high))
    dtype = aval.dtype
    if jnp.issubdtype(dtype, np.bool_):
        return Range(0, 1)
    if not jnp.issubdtype(dtype, np.integer):
        return Range(low, high)
    limits = jnp.iinfo(dtype)
    is_outside = (limits.min == 0 and not is_at_most(0, low)) or (
        limits.bits <= _NARROW
        and not (is_at_most(limits.min, low) and is_at_most(high, limits.max))
    )
    is_beyond = (isinstance(low, int) and low < limits.min) or (
        isinstance(high, int) and high > limits.max
    )
    return range_of_type(aval) if is_outside or is_beyond else Range(low, high)


def is_within_type(x: Range, dtype: Any) -> bool:
    """Whether an integer type has all integers of a range, so that none wraps around.

    For types of 32 bits and more, sizes are taken to be at most 2**24, as are products of sizes:
    ``100*n`` is within int32, and ``1103515245*n`` is not.
    """
    if x.low is None or x.high is None:
        return False
    limits = jnp.iinfo(dtype)
    least, most = int(limits.min), int(limits.max)

    def fits(bound: Dim, limit: int) -> bool:
        is_size = is_symbolic(bound) and limits.bits > _NARROW
        return is_size and magnitude(str(bound)) <= limit

    is_above = is_at_most(least, x.low) or (least < 0 and fits(x.low, -least))
    return is_above and (is_at_most(x.high, most) or fits(x.high, most))


def within_type(x: Range, aval: Any) -> Range:
    """A range with the ends of its integer type where it has none."""
    if not jnp.issubdtype(aval.dtype, np.integer):
        return x
    limits = jnp.iinfo(aval.dtype)
    low = int(limits.min) if x.low is None else x.low
    return Range(low, int(limits.max) if x.high is None else x.high)


def rounded(x: Range, dtype: Any) -> Range:
    """The bounds of numbers that are rounded to a floating type; a size is no bound of these."""
    return Range(_rounded(x.low, dtype, math.floor), _rounded(x.high, dtype, math.ceil))


def _rounded(bound: Dim | None, dtype: Any, away: Callable[[float], int]) -> int | None:
    if not isinstance(bound, int):
        return None
    nearest = float(np.asarray(bound, np.float64).astype(dtype))
    return away(nearest) if math.isfinite(nearest) else None


def _of_both(operation: Callable[[Any, Any], Any], a: Dim | None, b: Dim | None) -> Dim | None:
    return None if a is None or b is None else operation(a, b)


#: The sum and the product of two bounds; None if one of them is not known.
sum_of = functools.partial(_of_both, operator.add)
_times = functools.partial(_of_both, operator.mul)


def quotient(x: Range, by: Range) -> Range:
    """The range of quotients of integers, rounded down or towards 0."""
    if not is_at_most(1, by.low):
        return Range()
    low, high = x.low, x.high
    if by.is_number:
        low, high = (None if b is None else b // by.low for b in (low, high))
    if x.is_natural:
        return Range(low if by.is_number else 0, high)
    return Range(smallest(low, 0), largest(high, 0))


def times(x: Range, count: Dim, *, also_one: bool) -> Range:
    """The range of sums of ``count`` values, and of one value if ``also_one``."""
    total = Range(_times(x.low, count), _times(x.high, count))
    return total | x if also_one else total
