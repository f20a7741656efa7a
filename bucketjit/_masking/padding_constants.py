"""Constants that the padding of values is known to hold, to spare filling it again.

    x:f32[n]                   arguments are padded with zeros    the padding of x holds 0
    y:f32[n] = mul x x         table: 0 times 0 is exactly 0      the padding of y holds 0
    s:f32[] = reduce_sum y     its rule asks for a fill with 0    the fill returns y unchanged
    z:f32[n] = exp y           not in the table                   nothing is known of z

The interpreter follows such constants from equation to equation while it evaluates a program. It
stages branches and loops, so there is nothing to join. Masking rules do not know of it: they call
`RuleContext.fill`, which returns a value unchanged if its padding holds the wanted constant
already.

A constant is followed only through results that need no rounding, since XLA may round differently
from NumPy. On CPU, XLA computes ``a * b + c`` with a single rounding and flushes subnormal numbers
to zero. XLA also turns ``x * a * b`` into ``x * (a * b)``. So the constant factors of a value are
followed with its constant: their product must be exact in any order.
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
from jax.extend.core import JaxprEqn

from bucketjit._ir import dataflow
from bucketjit._jax.jaxprs import dtype_of, shape_of
from bucketjit._jax.primitives import name_of
from bucketjit._sizes.expressions import Shape, is_symbolic

_LARGEST_POWER = 2048  # exponents; from 2**2048 on, no float holds a power of 2 or of 1/2
_MANY = 2**64  # larger than the significand of any float; odd parts are capped here
_POWERS = ("square", "integer_pow")
_PRODUCTS = ("mul", *_POWERS)
# The operation in NumPy, and on fractions. A result is exact if both agree.
_ARITHMETIC: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mul": (np.multiply, operator.mul),
    "add": (np.add, operator.add),
    "add_any": (np.add, operator.add),
    "sub": (np.subtract, operator.sub),
}
# These return one of their operands, or bits of both, and never round.
_CHOICES: Mapping[str, Callable[..., Any]] = {
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}

#: From an equation and the constants in the padding of its operands to the constant in the padding
#: of its result; None if that is unknown.
_Transfer = Callable[[JaxprEqn, Sequence[np.ndarray]], np.ndarray | None]


class _Factors(NamedTuple):
    """The constants that a value may have been multiplied by.

    Attributes:
        spread: A bound of the sum of the absolute binary exponents. A product of some of the
            factors is at most 2 to the power of it, and at least the inverse of that.
        odd: The product of the odd parts of the significands, at most `_MANY`. A product of some of
            the factors has no more binary digits than this.
    """

    spread: int = 0
    odd: int = 1

    def times(self, other: _Factors) -> _Factors:
        """The factors of a product of two values."""
        return _Factors(self.spread + other.spread, min(self.odd * other.odd, _MANY))

    def beside(self, other: _Factors) -> _Factors:
        """The factors of a result that may have those of either operand."""
        return _Factors(max(self.spread, other.spread), min(self.odd * other.odd, _MANY))

    def are_exact(self, constant: np.ndarray) -> bool:
        """Whether a constant is the same whatever factors are multiplied first."""
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
    """The constant that the padding of a value holds, looked up by the value.

    Every position of the padding holds the constant, along every axis. A lookup also compares the
    logical shape. The logical shape determines what is padding, and one array may stand for two
    values of different logical shapes (``x`` and ``x[:-1]``).
    """

    def __init__(self) -> None:
        # The key is the `id` of a value: `==` of tracers would trace a comparison. The entry keeps
        # the value alive, so that its `id` is not reused.
        self._known: dict[int, tuple[Any, str, np.ndarray, _Factors]] = {}

    def note(
        self, value: Any, shape: Shape, constant: Any, factors: _Factors | None = None
    ) -> None:
        """Remember that the padding of a value holds a constant.

        Nothing is remembered if the dtype of the value cannot hold the constant exactly as a finite
        normal number, or if its product with the factors may need rounding. The first constant that
        is noted for a value stays.
        """
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            return
        if value.dtype == jax.dtypes.float0:  # an array without contents
            return
        exact = np.asarray(constant)
        with np.errstate(all="ignore"):
            kept = exact.astype(value.dtype)
        if not np.isfinite(exact).all() or not (kept == exact).all() or _is_below_normal(kept):
            return
        every = (factors or _Factors()).beside(_factors(kept))
        if every.are_exact(kept):
            self._known.setdefault(id(value), (value, str(shape), kept, every))

    def knows(self, value: object, shape: Shape) -> bool:
        """Whether the padding of a value of this logical shape is known to hold some constant."""
        return self._constant_of(value, shape) is not None

    def _constant_of(self, value: object, shape: Shape) -> np.ndarray | None:
        """The constant in the padding of a value of this logical shape, or None."""
        known = self._known.get(id(value))
        return known[2] if known is not None and known[1] == str(shape) else None

    def holds(self, value: Any, shape: Shape, constant: Any) -> bool:
        """Whether the padding of a value is known to hold a given constant."""
        kept = self._constant_of(value, shape)
        if kept is None or isinstance(constant, jax.Array) or np.ndim(constant):
            return False
        return kept.tobytes() == np.asarray(constant).astype(kept.dtype).tobytes()

    def follow(self, eqn: JaxprEqn, operands: Sequence[Any], outs: Sequence[Any]) -> None:
        """Note the constant in the padding of an equation's output, if operands determine it."""
        name = name_of(eqn)
        transfer = _TABLE.get(name)
        if transfer is None or not hasattr(outs[0], "dtype"):
            return
        constants = [self._constant(v, x) for v, x in zip(eqn.invars, operands, strict=True)]
        if any(c is None for c in constants):
            return
        constant = transfer(eqn, constants)
        if constant is None:
            return
        factors = [self._factors(x, c) for x, c in zip(operands, constants, strict=True)]
        if name in _POWERS:
            factors *= min(eqn.params.get("y", 2), _LARGEST_POWER)
        combine = _Factors.times if name in _PRODUCTS else _Factors.beside
        self.note(outs[0], shape_of(eqn.outvars[0]), constant, functools.reduce(combine, factors))

    def _constant(self, var: Any, operand: Any) -> Any:
        """The constant in the padding of an operand; a scalar constant is its own padding."""
        if isinstance(operand, jax.core.Tracer):
            return self._constant_of(operand, shape_of(var))
        if isinstance(operand, jax.Array) or np.ndim(operand):
            return None
        return np.asarray(operand, dtype_of(var))

    def _factors(self, operand: object, constant: np.ndarray) -> _Factors:
        """The factors of an operand; if it has not been noted, those of its constant alone."""
        known = self._known.get(id(operand))
        return known[3] if known is not None else _factors(constant)


def _broadcast(eqn: JaxprEqn, constants: Sequence[np.ndarray]) -> np.ndarray | None:
    """The constant, unless a symbolic axis is added or an axis of size 1 becomes symbolic."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    places = eqn.params["broadcast_dimensions"]
    is_new = (is_symbolic(d) and i not in places for i, d in enumerate(after))
    is_spread = (str(d) != str(after[p]) for d, p in zip(before, places, strict=True))
    return None if before and (any(is_new) or any(is_spread)) else constants[0]


def _reduce(eqn: JaxprEqn, constants: Sequence[np.ndarray]) -> np.ndarray | None:
    """The constant of a reduction over static axes."""
    sizes = [shape_of(eqn.invars[0])[axis] for axis in eqn.params["axes"]]
    if any(map(is_symbolic, sizes)):
        return None
    if name_of(eqn) == "reduce_sum":
        return _zero(eqn, constants)
    return constants[0] if all(sizes) else None  # an empty maximum is -inf, not the constant


def _zero(eqn: JaxprEqn, constants: Sequence[np.ndarray]) -> np.ndarray | None:
    """0 if the operand's constant is 0, else None."""
    return constants[0] if _is_zero(constants[0]) and eqn.params.get("y", 1) > 0 else None


def _real_zero(eqn: JaxprEqn, constants: Sequence[np.ndarray]) -> np.ndarray | None:
    """0 if the operand is real and its constant is 0, else None."""
    is_complex = jnp.issubdtype(constants[0].dtype, jnp.complexfloating)
    return None if is_complex else _zero(eqn, constants)  # in XLA, the arc tangent of 0j is -0j


def _two(eqn: JaxprEqn, constants: Sequence[np.ndarray]) -> np.ndarray | None:
    """The constant of an elementwise operation on operands of equal shape, or on scalars."""
    out = str(shape_of(eqn.outvars[0]))
    if any(shape and str(shape) != out for shape in map(shape_of, eqn.invars)):
        return None
    return of_two(name_of(eqn), *constants)


def of_two(name: str, a: np.ndarray, b: np.ndarray) -> Any:
    """The result of an operation on two constants."""
    with np.errstate(all="ignore"):
        if name in _CHOICES:
            of_zeros = not (a.any() or b.any())
            # The maximum of 0.0 and -0.0 may be either one.
            signs_differ = of_zeros and a.tobytes() != b.tobytes()
            return None if signs_differ else _CHOICES[name](a, b)
        operation, of_fractions = _ARITHMETIC[name]
        found = operation(a, b)
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return found  # integers wrap around in NumPy as in XLA
    if jnp.issubdtype(found.dtype, jnp.complexfloating):
        return found if not (a.any() or b.any()) else None
    if _is_below_normal(a) or _is_below_normal(b) or not np.isfinite(found):
        return None
    exact = of_fractions(*(Fraction(float(x)) for x in (a, b)))
    return found if Fraction(float(found)) == exact else None


def _is_below_normal(constant: np.ndarray) -> bool:
    """Whether a constant is subnormal, so that some backends take it for 0."""
    if not jnp.issubdtype(constant.dtype, jnp.inexact):
        return False
    parts = np.abs([constant.real, constant.imag]).astype(np.float64)
    return bool(((parts > 0) & (parts < float(jnp.finfo(constant.dtype).smallest_normal))).any())


def _is_zero(constant: Any) -> bool:
    """Whether all bits are 0: the 0 that a sum is filled with. False for -0.0."""
    return not constant.tobytes().strip(b"\0")


_TABLE: Mapping[str, _Transfer] = dataflow.table(
    {
        "copy stop_gradient convert_element_type transpose squeeze": lambda eqn, ins: ins[0],
        "broadcast_in_dim": _broadcast,
        "reduce_sum reduce_max reduce_min reduce_and reduce_or": _reduce,
        # These map 0 to exactly 0. Nothing is known of their results at other constants.
        "abs square integer_pow": _zero,
        "sign sqrt cbrt floor ceil round expm1 log1p erf": _real_zero,
        "sin tan asin atan sinh tanh asinh atanh": _real_zero,
        " ".join((*_ARITHMETIC, *_CHOICES)): _two,
    }
)
