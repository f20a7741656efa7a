"""How far numbers that are computed of sizes in 24 bits are from those of Python, which has 53.

Most formulas are off by a rounding or two: ``n / 2 - 0.5``. Those that nearly cancel are not:
``(n + 0.1) - n`` at 5000, and the square root of what should be 0. Which they are is measured: a
formula is computed in both precisions at many sizes at once, with a bound of its error there (the
running error analysis of Wilkinson, 1963). Small sizes are all tried; of larger ones enough to see
where a difference gets small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bucketjit._sizes.expressions import evaluate_at
from bucketjit._sizes.guards import Guard

_ROUNDING = 2.0**-24
# Of what comes out: about as many roundings as a sum of float32 has.
_MOST = 256 * _ROUNDING
_MOST_SIZE = 1 << 24
_SMALL, _STEP, _RANDOM = 4096, 1.005, 4096
_MOST_EXPONENT = 88.0  # beyond, float32 overflows

_Array = np.ndarray[Any, Any]

_FUNCTIONS: Mapping[str, Callable[[_Array], _Array]] = {
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "log": np.log,
    "log1p": np.log1p,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "atan": np.arctan,
}
# What passes 0 is as good as it is beside 1: jax.jit rounds its argument too.
_BESIDE_ONE = frozenset(("log", "sin", "cos", "tan"))
_GROW = frozenset(("exp", "exp2", "expm1", "sinh", "cosh"))
_TURN = frozenset(("sin", "cos", "tan"))
_WITHIN_ONE = frozenset(("sin", "cos", "tanh"))
_SAME = frozenset(("neg", "abs", "reduce_max", "reduce_min", "reduce_precision"))


class Measured:
    """A value that depends on sizes alone, at the sizes that are tried.

    Attributes:
        largest: What its absolute value does not exceed.
        error: How far it may be from that of the unpadded run.
        exact: The value in 53 bits; None where the unpadded run has an array in its place, which
            is rounded there too.
        single: The value in 24 bits.
    """

    def __init__(
        self, largest: _Array, error: _Array, exact: _Array | None = None, single: Any = None
    ) -> None:
        self.largest = largest
        self.error = error
        self.exact = exact
        self.single = single

    @classmethod
    def number(cls, exact: _Array, single: _Array, error: _Array | float = 0.0) -> Measured:
        """A number, with the error of what it is computed of; its own rounding is added."""
        with np.errstate(all="ignore"):
            off = np.abs(single.astype(np.float64) - exact)  # inf where only this overflows
            rounded = np.maximum(off, error + _ROUNDING * np.abs(exact))
            is_rounded = (off > 0) | (np.asarray(error) > 0)
            return cls(np.abs(exact), np.where(is_rounded, rounded, 0.0), exact, single)

    @classmethod
    def rounded_once(cls, exact: _Array) -> Measured:
        """A number of Python, rounded to 24 bits."""
        with np.errstate(all="ignore"):
            return cls.number(exact, exact.astype(np.float32))

    @property
    def as_array(self) -> Measured:
        """The same in an array of JAX."""
        return Measured(self.largest, self.error)

    def is_accurate(self, beside: float = 0.0) -> bool:
        """Whether its error is that of a few roundings, of itself or of what it is beside."""
        scale = np.maximum(self.largest, beside)
        return bool(np.all((self.error <= _MOST * scale) | ~np.isfinite(scale)))


class Samples:
    """Sizes that are tried.

    Args:
        at_hand: A size of each variable that is one of them.
        guards: What holds of all of them.
    """

    def __init__(self, at_hand: Mapping[str, int], guards: Sequence[Guard]) -> None:
        self._at_hand = at_hand
        self._guards = guards

    @functools.cached_property
    def _sizes(self) -> Mapping[str, _Array]:
        names, found = list(self._at_hand), _tried(list(self._at_hand.values()))
        sizes = dict(zip(names, found.T, strict=True))
        holds = np.ones(len(found), bool)
        for guard in self._guards:
            holds &= guard.holds_at(sizes)
        holds[0] = True  # those at hand
        return {name: column[holds] for name, column in sizes.items()}

    def of_size(self, size: Any) -> Measured:
        """A size, or an expression of sizes."""
        exact = np.asarray(evaluate_at(size, self._sizes), np.float64)
        return Measured.rounded_once(np.broadcast_to(exact, self._shape))

    def of_constant(self, value: Any) -> Measured | None:
        """A number that is written in the program; None for what is none."""
        if np.shape(value):
            return None
        if np.iscomplexobj(value):
            largest = np.broadcast_to(np.abs(complex(value)), self._shape)
            return Measured(largest, _ROUNDING * largest)
        return Measured.rounded_once(np.broadcast_to(np.float64(value), self._shape))

    @property
    def _shape(self) -> tuple[int, ...]:
        return np.shape(next(iter(self._sizes.values()))) if self._sizes else (1,)


def _tried(at_hand: Sequence[int]) -> _Array:
    """Rows of sizes, those at hand first."""
    count = len(at_hand)
    if not count:
        return np.zeros((1, 0))
    side = int(_SMALL ** (1 / count))
    steps = int(np.log(_MOST_SIZE / _SMALL) / np.log(_STEP))
    line = np.append(np.arange(1, _SMALL + 1), (_SMALL * _STEP ** np.arange(steps)).astype(int))
    line = np.append(line, _MOST_SIZE)
    rows = [np.asarray([at_hand])]
    if side > 1:  # all small ones, unless the variables are very many
        axes = np.meshgrid(*[np.arange(1, side + 1)] * count)
        rows.append(np.stack(axes, -1).reshape(-1, count))
    for i in range(count):  # one of them alone
        alone = np.tile(np.asarray(at_hand), (len(line), 1))
        alone[:, i] = line
        rows.append(alone)
    together = np.tile(line[:, None], (1, count))
    rows.append(together)
    generator = np.random.default_rng(0)
    spread = np.exp(generator.uniform(0, np.log(_MOST_SIZE), (_RANDOM, count))).astype(int)
    near = np.maximum(1, spread[:, :1] + generator.integers(-2, 3, (_RANDOM, count)))
    return np.concatenate([*rows, spread, near]).astype(np.float64)


def computed(name: str, params: Mapping[str, Any], operands: Sequence[Measured]) -> Measured | None:
    """What an operation makes of measured values; None if that is not known."""
    with np.errstate(all="ignore"):
        if name in _FUNCTIONS:
            return _of_function(name, operands[0])
        if name in _SAME:
            return _same(name, operands[0])
        if name in ("integer_pow", "square"):
            power = params.get("y", 2)
            return _power(operands[0], power, products=max(1, abs(power) - 1))
        if name in _PAIRS and len(operands) == 2:
            return _PAIRS[name](*operands)
        return None


def is_good(name: str, argument: Measured | None, result: Measured | None) -> bool:
    """Whether a function of a number is as good as ``jax.jit``'s, which rounds the number once.

    Args:
        name: An operation.
        argument: Its first operand, which has to be positive where the function asks for it.
        result: What it makes.
    """
    if name not in _FUNCTIONS:
        return True
    if argument is None:
        return name not in _GROW | _TURN
    if name in _TURN:
        return bool(np.all(argument.error <= _MOST))
    if name in _GROW and argument.exact is None:
        within = np.minimum(1.0, _MOST_EXPONENT / np.maximum(argument.largest, 1.0))
        return bool(np.all(argument.error * within <= _MOST))
    if result is None or argument.exact is None:
        return True
    if name in _GROW:
        is_held = argument.largest <= _MOST_EXPONENT
        result = Measured(result.largest[is_held], result.error[is_held])
    return result.is_accurate(1.0 if name in _BESIDE_ONE else 0.0)


def _of_function(name: str, x: Measured) -> Measured | None:
    if x.exact is None:
        if name not in _WITHIN_ONE:
            return None
        return Measured(np.ones_like(x.largest), x.error + 2 * _ROUNDING)
    function = _FUNCTIONS[name]
    at = function(x.exact)
    off = [np.abs(function(x.exact + sign * x.error) - at) for sign in (1, -1)]
    error = np.maximum(*off)
    is_nan = np.isnan(at)
    error = np.where(is_nan | (x.error == 0), 0.0, np.where(np.isnan(error), np.inf, error))
    largest = np.where(is_nan, np.inf, np.abs(at))
    return Measured(largest, error + 2 * _ROUNDING * np.abs(np.where(is_nan, 0.0, at)))


def _same(name: str, x: Measured) -> Measured:
    if x.exact is None or name not in ("neg", "abs"):
        return x.as_array
    of: Callable[[Any], Any] = np.negative if name == "neg" else np.abs
    return Measured(x.largest, x.error, of(x.exact), of(x.single))


def _power(x: Measured, power: float, products: int) -> Measured:
    error = abs(power) * x.largest ** (power - 1.0) * x.error
    if x.exact is None:
        largest = x.largest**power
        return Measured(largest, error + abs(power) * _ROUNDING * largest)
    found = Measured.number(x.exact ** float(power), x.single ** np.float32(power), error)
    return Measured(found.largest, products * found.error, found.exact, found.single)


def _pair(
    of: Callable[[Any, Any], Any], x: Measured, y: Measured, largest: _Array, error: _Array
) -> Measured:
    if x.exact is None or y.exact is None:
        return Measured(largest, error + _ROUNDING * largest)
    return Measured.number(of(x.exact, y.exact), of(x.single, y.single), error)


def _sum(of: Callable[[Any, Any], Any], x: Measured, y: Measured) -> Measured:
    return _pair(of, x, y, x.largest + y.largest, x.error + y.error)


def _product(x: Measured, y: Measured) -> Measured:
    error = x.largest * y.error + y.largest * x.error
    return _pair(np.multiply, x, y, x.largest * y.largest, error)


def _quotient(x: Measured, y: Measured) -> Measured | None:
    if y.exact is None:
        return None
    by = np.where(y.largest > 0, y.largest, np.nan)  # by 0 it is as in the unpadded run
    error = np.nan_to_num(x.error / by + x.largest * y.error / by**2, nan=0.0)
    return _pair(np.divide, x, y, x.largest / y.largest, error)


def _power_of(x: Measured, y: Measured) -> Measured | None:
    if x.exact is None or y.exact is None or np.any(y.exact != y.exact[0]):
        return None
    return _power(x, float(y.exact[0]), products=4)  # which is what a power by logarithms costs


def _greater(x: Measured, y: Measured) -> Measured:
    return Measured(np.maximum(x.largest, y.largest), np.maximum(x.error, y.error))


_PAIRS: Mapping[str, Callable[[Measured, Measured], Measured | None]] = {
    "add": functools.partial(_sum, np.add),
    "sub": functools.partial(_sum, np.subtract),
    "mul": _product,
    "div": _quotient,
    "pow": _power_of,
    "max": _greater,
    "min": _greater,
    "concatenate": _greater,
    "stack": _greater,
}
