"""Ranges of integers whose ends are numbers or symbolic sizes, and which of two ends is larger."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import InconclusiveDimensionOperation

from bucketjit._jax.patches.shapes import fresh_dimension
from bucketjit._sizes.bounds import interval
from bucketjit._sizes.expressions import Dim, compiled, is_symbolic, parsed, variables_of

_NARROW = 16  # bits: an integer type of at most these has bounds of its own
_LONGEST = 200  # characters of an expression; longer ones are forgotten
_ANY_SIZE = 1 << 40  # stands for the largest size
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


def is_at_most(
    one: Dim | None, other: Dim | None, most_of: Mapping[str, Dim] = MappingProxyType({})
) -> bool:
    """Whether ``one <= other`` at all sizes; False if that is not known.

    Args:
        one: An int or a symbolic size; None for an unknown one.
        other: The same.
        most_of: The most_of value of some variables. That of a later one may name earlier ones.
    """
    if one is None or other is None:
        return False
    difference = other - one
    if not is_symbolic(difference):
        return bool(difference >= 0)
    return _is_never_negative(difference, most_of) or _by_parts(one, other, most_of)


def _by_parts(one: Dim, other: Dim, most_of: Mapping[str, Dim]) -> bool:
    """Whether ``one <= other`` follows from one of the two parts of a ``min`` or ``max``."""
    if found := _parts("min", one):
        return any(is_at_most(x, other, most_of) for x in found)
    if found := _parts("max", other):
        return any(is_at_most(one, x, most_of) for x in found)
    if found := _parts("max", one):
        return all(is_at_most(x, other, most_of) for x in found)
    return all(is_at_most(one, x, most_of) for x in _parts("min", other) or [None])


def _parts(name: str, dim: Dim) -> list[Dim]:
    """The operands of a size that is a ``min`` or ``max``; none for any other one."""
    node = parsed(str(dim))
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == name):
        return []
    texts = [ast.unparse(x).replace("**", "^") for x in node.args]
    return [int(x) if _is_number(x) else fresh_dimension(dim, x) for x in texts]


def _is_never_negative(dim: Dim, most_of: Mapping[str, Dim]) -> bool:
    dim, quotients = _without_quotients(dim)
    bounds = {**most_of, **quotients}
    for variable in reversed(bounds):
        if is_symbolic(dim) and variable in variables_of(str(dim)):
            dim = _least(dim, variable, bounds[variable])
            if dim is None:
                return False
    if not is_symbolic(dim):
        return bool(dim >= 0)
    if bounds and "floordiv" in str(dim):  # a bound has brought another quotient
        return _is_never_negative(dim, {})
    variables = variables_of(str(dim))
    lo, hi = dict.fromkeys(variables, 1), dict.fromkeys(variables, _ANY_SIZE)
    try:
        return interval(parsed(str(dim)), lo, hi)[0] >= 0
    except ValueError:
        return False


def _without_quotients(dim: Dim) -> tuple[Dim, dict[str, Dim]]:
    """An expression with variables in the place of quotients, and the largest value of each.

    ``n - floordiv(n, 2)`` is ``n - q + 1`` for a q from 1 to n + 1.
    """
    text, most_of = str(dim), dict[str, Dim]()
    for node in ast.walk(parsed(text)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "floordiv"):
            continue
        whole, by = (_computed(ast.unparse(x), dim) for x in node.args)
        if (
            whole is None
            or not isinstance(by, int)
            or by < 1
            or "floordiv" in str(whole)
            or not is_at_most(0, whole)
        ):
            continue
        name = f"quotient_{len(most_of)}"
        text = text.replace(ast.unparse(node), f"({name} - 1)")
        most_of[name] = whole + 1
    found = _computed(text, dim) if most_of else dim
    return (dim, {}) if found is None else (found, most_of)


def solved_for(dim: Dim, variable: str) -> Dim | None:
    """The value of a variable at which an expression is 0.

    Args:
        dim: The expression.
        variable: The variable.

    Returns:
        An expression of the other variables; None if there is none without a quotient.
    """
    if not _is_linear(dim, variable):
        return None
    none, one = (_replaced(dim, variable, x) for x in (0, 1))
    if none is None or one is None:
        return None
    return {"1": -none, "-1": none}.get(str(one - none))


def _is_linear(dim: Dim, variable: str) -> bool:
    for node in ast.walk(parsed(str(dim))):
        bends = isinstance(node, ast.Call) or (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
        )
        if bends and variable in variables_of(ast.unparse(node)):
            return False
    return True


def _least(dim: Dim, variable: str, most: Dim) -> Dim | None:
    """The least value of an expression that is linear in a variable from 1 to `most`, if known."""
    if not _is_linear(dim, variable):
        return None
    none, one, at_most = (_replaced(dim, variable, x) for x in (0, 1, most))
    if is_at_most(none, one):
        return one
    return at_most if is_at_most(one, none) else None


def _replaced(dim: Dim, variable: str, value: Dim) -> Dim | None:
    return _computed(str(dim), dim, {variable: value})


def _computed(text: str, like: Dim, values: Mapping[str, Dim] = MappingProxyType({})) -> Dim | None:
    """An expression with values in the place of variables; None if JAX cannot compute it."""
    names = variables_of(text)
    sizes = [values[v] if v in values else fresh_dimension(like, v) for v in names]
    try:
        return compiled(text, "int")(*sizes)
    except InconclusiveDimensionOperation:
        return None


def _is_number(text: str) -> bool:
    return text.lstrip("-").isdigit()


def _extreme(name: str, one: Dim, other: Dim) -> Dim:
    like = one if is_symbolic(one) else other
    return fresh_dimension(like, f"{name}({one}, {other})")


def largest(one: Dim | None, other: Dim | None) -> Dim | None:
    """The larger one of two bounds, one of the two if that is known."""
    if one is None or other is None:
        return None
    if is_at_most(one, other):
        return other
    return one if is_at_most(other, one) else _extreme("max", one, other)


def smallest(one: Dim | None, other: Dim | None) -> Dim | None:
    """The smaller one of two bounds, one of the two if that is known."""
    if one is None or other is None:
        return None
    if is_at_most(one, other):
        return one
    return other if is_at_most(other, one) else _extreme("min", one, other)


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
    if (
        not jnp.issubdtype(jax.typeof(value).dtype, np.number)
        and np.asarray(value).dtype.kind != "b"
    ):
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
    """The bounds of a result, or those of its type where it may wrap around."""
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


def quotient(one: Range, by: Range, is_float: bool) -> Range:
    """The range of quotients, rounded down or towards 0.

    Args:
        one: The range of what is divided.
        by: The range of the divisor.
        is_float: Whether the quotient is not rounded.
    """
    if not is_at_most(1, by.low):
        return Range()
    ends = (by.low, by.high)
    is_number = all(isinstance(x, int) for x in ends) and by.low == by.high and not is_float
    parts = [b // by.low if is_number and b is not None else b for b in (one.low, one.high)]
    low, high = parts
    if is_natural(one):
        return Range(low if is_number else 0, high)
    low = None if low is None else smallest(low, 0)
    return Range(low, None if high is None else largest(high, 0))


def times(x: Range, count: Dim, *, also_one: bool) -> Range:
    """The range of sums of ``count`` values.

    Args:
        x: The range of each.
        count: How many there are.
        also_one: Whether it is that of the sums of fewer values too, from one on.
    """
    low, high = _times(x.low, count), _times(x.high, count)
    if not also_one:
        return Range(low, high)
    return Range(smallest(low, x.low), largest(high, x.high))
