"""What the padding of a value is known to hold, so that it need not be filled with the same again.

Arguments arrive padded with zeros, and a zero squared is a zero: the sum of ``x * x`` reads no
padding that would have to be masked. The interpreter follows such constants from equation to
equation in its one pass over a program; masking rules know nothing of it, they ask for a fill and
get the value as it is. Only what is certain is followed: operations on constants whose results need
no rounding. Where they do, XLA may get others than NumPy: it computes ``a * b + c`` in one step on
CPU, and takes numbers below the normal ones for zeros. It also makes ``x * (a * b)`` of ``x * a *
b``, so the constant factors of a value are followed with it: in whatever order they are multiplied,
that must need no rounding either.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._jax.primitives import name_of
from bucketjit._sizes.expressions import Shape, is_symbolic

_SAME = (
    *("copy", "stop_gradient", "convert_element_type"),
    *("transpose", "squeeze", "broadcast_in_dim"),
)
_OVER_STATIC_AXES = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
# Those that keep 0 do so exactly; at other constants nothing is claimed.
_KEEP_ZERO = (
    *("abs", "sign", "square", "sqrt", "cbrt", "floor", "ceil", "round"),
    *("sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "expm1", "log1p", "erf"),
    "integer_pow",
)
_LARGEST_POWER = 2048  # beyond which no float holds that of another number than 1
_MANY = 2**64  # an odd part with more digits than any float has
_POWERS = ("square", "integer_pow")
_PRODUCTS = ("mul", *_POWERS)
_KEEP_COMPLEX_ZERO = ("abs", "square", "integer_pow")
# With what they do to fractions, where that may need rounding.
_ARITHMETIC: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mul": (np.multiply, operator.mul),
    "add": (np.add, operator.add),
    "add_any": (np.add, operator.add),
    "sub": (np.subtract, operator.sub),
}
_CHOICES: Mapping[str, Callable[..., Any]] = {
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


class _Factors(NamedTuple):
    """The constants that may have been multiplied to a value.

    Attributes:
        spread: The sum of their binary exponents without signs: no product of some of them is
            larger than 2 to the power of it, or smaller than its inverse.
        odd: The product of their odd parts: that of some of them has no more digits.
    """

    spread: int = 0
    odd: int = 1

    def times(self, other: _Factors) -> _Factors:
        """Those of a product."""
        return _Factors(self.spread + other.spread, min(self.odd * other.odd, _MANY))

    def beside(self, other: _Factors) -> _Factors:
        """Those of a result that may have either as its own."""
        return _Factors(max(self.spread, other.spread), min(self.odd * other.odd, _MANY))

    def are_exact(self, constant: np.ndarray) -> bool:
        """Whether a constant is the same whichever of them are multiplied first."""
        if not jnp.issubdtype(constant.dtype, jnp.inexact):
            return True
        info = jnp.finfo(constant.dtype)
        if self.spread >= min(int(info.maxexp), -int(info.minexp)):
            return False
        return not constant.any() or self.odd.bit_length() <= info.nmant + 1


def _factors(constant: np.ndarray) -> _Factors:
    """A constant as the only factor of a value."""
    is_real = jnp.issubdtype(constant.dtype, jnp.floating)
    if not is_real or not constant.any() or not np.isfinite(constant):
        return _Factors()
    over, under = Fraction(float(constant)).as_integer_ratio()
    over = abs(over)
    twos = (over & -over).bit_length() - 1
    spread = max(over.bit_length(), 1) + under.bit_length()
    return _Factors(spread, over >> twos)


class KnownPadding:
    """Constants by value: every position of its padding, along any axis, holds the constant.

    What is padding depends on the logical shape, and one array may stand for two values of
    different shapes (``x`` and ``x[:-1]``), so both are looked up.
    """

    def __init__(self) -> None:
        # By identity: tracers are compared by what they trace. What is looked up is kept alive.
        self._known: dict[int, tuple[Any, str, np.ndarray, _Factors]] = {}

    def note(
        self, value: Any, shape: Shape, constant: Any, factors: _Factors | None = None
    ) -> None:
        """Remember that the padding of a value of this logical shape holds a constant."""
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            return
        if value.dtype == jax.dtypes.float0:  # which holds nothing
            return
        exact = np.asarray(constant)
        with np.errstate(all="ignore"):
            kept = exact.astype(value.dtype)
        if not np.isfinite(exact).all() or not (kept == exact).all() or _is_below_normal(kept):
            return
        every = (factors or _Factors()).beside(_factors(kept))
        if every.are_exact(kept):
            self._known.setdefault(id(value), (value, str(shape), kept, every))

    def knows(self, value: Any, shape: Shape) -> bool:
        """Whether the padding of a value is known to hold some constant."""
        return self._constant_of(value, shape) is not None

    def _constant_of(self, value: Any, shape: Shape) -> np.ndarray | None:
        known = self._known.get(id(value))
        return known[2] if known is not None and known[1] == str(shape) else None

    def holds(self, value: Any, shape: Shape, constant: Any) -> bool:
        """Whether the padding of a value is known to hold this constant, bit by bit."""
        kept = self._constant_of(value, shape)
        if kept is None or isinstance(constant, jax.Array) or np.ndim(constant):
            return False
        return kept.tobytes() == np.asarray(constant).astype(kept.dtype).tobytes()

    def follow(self, eqn: Any, operands: Sequence[Any], outs: Sequence[Any]) -> None:
        """Note what is known of the padding of an equation's outputs."""
        if len(outs) != 1 or not hasattr(outs[0], "dtype"):
            return
        name = name_of(eqn)
        constants = [self._constant(v, x) for v, x in zip(eqn.invars, operands, strict=True)]
        if not constants or any(c is None for c in constants):
            return
        constant = _result(name, eqn, constants)
        if constant is None:
            return
        factors = [self._factors(x, c) for x, c in zip(operands, constants, strict=True)]
        if name in _POWERS:
            factors *= min(eqn.params.get("y", 2), _LARGEST_POWER)
        combine = _Factors.times if name in _PRODUCTS else _Factors.beside
        all_of_them = functools.reduce(combine, factors)
        self.note(outs[0], eqn.outvars[0].aval.shape, constant, all_of_them)

    def _constant(self, var: Any, operand: Any) -> Any:
        if isinstance(operand, jax.core.Tracer):
            return self._constant_of(operand, var.aval.shape)
        if isinstance(operand, jax.Array) or np.ndim(operand):
            return None
        return np.asarray(operand, var.aval.dtype)

    def _factors(self, operand: Any, constant: np.ndarray) -> _Factors:
        known = self._known.get(id(operand))
        return known[3] if known is not None else _factors(constant)


def _result(name: str, eqn: Any, constants: Sequence[Any]) -> Any:
    """The constant in the padding of the output, or None if there may be none."""
    shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    first = constants[0]
    if name in _SAME:
        if name == "broadcast_in_dim" and shape:
            places = eqn.params["broadcast_dimensions"]
            if any(is_symbolic(d) and i not in places for i, d in enumerate(out)):
                return None
            if any(str(d) != str(out[p]) for d, p in zip(shape, places, strict=True)):
                return None
        return first
    if name in _OVER_STATIC_AXES:
        sizes = [shape[a] for a in eqn.params["axes"]]
        if any(map(is_symbolic, sizes)):
            return None
        if name == "reduce_sum":
            return first if _is_zero(first) else None
        return first if all(sizes) else None  # over no elements it is another constant
    if name in _KEEP_ZERO:
        if jnp.issubdtype(first.dtype, jnp.complexfloating) and name not in _KEEP_COMPLEX_ZERO:
            return None  # XLA's arc tangent of 0 is -0j
        return first if _is_zero(first) and eqn.params.get("y", 1) > 0 else None
    if name in _ARITHMETIC or name in _CHOICES:
        if any(v.aval.shape and str(v.aval.shape) != str(out) for v in eqn.invars):
            return None
        return of_two(name, *constants)
    return None


def of_two(name: str, a: np.ndarray, b: np.ndarray) -> Any:
    """What an operation makes of two constants; None if that is not certain."""
    with np.errstate(all="ignore"):
        if name in _CHOICES:
            of_zeros = not (a.any() or b.any())
            signs_differ = of_zeros and a.tobytes() != b.tobytes()  # 0.0 and -0.0: either may come
            return None if signs_differ else _CHOICES[name](a, b)
        operation, of_fractions = _ARITHMETIC[name]
        found = operation(a, b)
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return found  # integers wrap around everywhere
    if jnp.issubdtype(found.dtype, jnp.complexfloating):
        return found if not (a.any() or b.any()) else None
    if _is_below_normal(a) or _is_below_normal(b) or not np.isfinite(found):
        return None
    exact = of_fractions(*(Fraction(float(x)) for x in (a, b)))
    return found if Fraction(float(found)) == exact else None


def _is_below_normal(constant: np.ndarray) -> bool:
    """Whether it is so near to 0 that some take it for 0."""
    if not jnp.issubdtype(constant.dtype, jnp.inexact):
        return False
    parts = np.abs([constant.real, constant.imag]).astype(np.float64)
    return bool(((parts > 0) & (parts < float(jnp.finfo(constant.dtype).smallest_normal))).any())


def _is_zero(constant: Any) -> bool:
    """Whether it is the 0 that a sum is filled with, not -0.0."""
    return not constant.tobytes().strip(b"\0")
