"""Hooks on numbers that are computed from symbolic sizes, such as ``x.shape[0] / 2``.

In the unpadded run such a number is a Python number; in a trace with symbolic sizes it is a tracer.
The hooks refuse what would give another result, and mark what may be rounded differently.
`size_hooks` installs them while a function is traced. They replace operators of
``shape_poly._DimExpr`` (since 0.4.14), which no public name allows.
"""

from __future__ import annotations

import functools
import numbers
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.errors import InconclusiveDimensionOperation
from jax.export import symbolic_shape
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from bucketjit._jax.user_code import caller_is_user

Size: Any = type(symbolic_shape("n")[0])  # the class of symbolic sizes

# Functions of the thread: ``report``, ``report_key``, ``report_text`` and ``report_raised``, the
# arguments of `size_hooks.watch_equalities`. Each is missing or None while no function is traced.
watching = threading.local()


def fail(error: Exception) -> NoReturn:
    """Raise an error from a hook, and report it if the hook runs for user code."""
    report_raised(error)
    raise error


def report_raised(error: Exception) -> None:
    """Report an error that a hook is about to raise, if the hook runs for user code."""
    report = getattr(watching, "report_raised", None)
    if report is not None and caller_is_user():
        report(error)


def reporting(
    plain: Callable[..., Any],
    *errors: type[Exception],
    counts: Callable[[Any], bool] = lambda value: True,
) -> Callable[..., Any]:
    """A method that reports its errors of some types, which user code may catch, and raises them.

    Only those of objects that count are reported.
    """

    @functools.wraps(plain)
    def method(self: object, *args: object, **kwargs: object) -> Any:
        try:
            return plain(self, *args, **kwargs)
        except errors as error:
            if getattr(watching, "report_raised", None) is not None and counts(self):
                report_raised(error)
            raise

    return method


# Looked up before the hooks are installed: a comparison by a hook is not one of user code.
_plain_ge = Size.__ge__


def is_positive(size: Any) -> bool:
    """Whether a size is at least 1 for all values of its variables; False if JAX does not know.

    Sizes are compared by ``shape_poly._DimExpr.__ge__`` (since 0.4.14).
    """
    try:
        return bool(_plain_ge(size, 1) if isinstance(size, Size) else size >= 1)
    except InconclusiveDimensionOperation:
        return False


# The checkpoint name that marks a number computed from sizes.
NUMBER_OF_SIZES = "bucketjit: a number of sizes"

# Bounds of the magnitude of a float that a size may be multiplied by or divided into: within them
# the result is a normal float32 for every int32 size.
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-64, 2.0**64
_MOST_POWER = 4  # of a size, for the same reason


def _marked(value: object) -> Any:
    """Mark a floating-point array: the unpadded run has a Python number in its place."""
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, np.inexact):
        return checkpoint_name(value, NUMBER_OF_SIZES)
    return value


def _is_number(operand: object) -> bool:
    return isinstance(operand, numbers.Number) and not isinstance(operand, numbers.Integral)


def _is_left_alone(operand: object) -> bool:
    """Whether a hook does nothing: no function is traced, or the other operand is an array."""
    return getattr(watching, "report", None) is None or isinstance(operand, jax.Array | np.ndarray)


def operation_with_number(name: str) -> Callable[..., Any]:
    """The hook for a sum, difference, product or quotient of a size and a size or a number.

    A product or quotient that is a float is marked as a number of sizes. A sum or difference with a
    float is refused: it may nearly cancel, and the error of float32 then shows. So is a product or
    quotient that may overflow or underflow in float32. With 64-bit types enabled, the trace
    computes in float64 as Python does, and nothing is marked or refused.
    """
    plain = getattr(Size, name)
    reported = reporting(plain, TypeError, ValueError)
    divides, is_quotient = name == "__truediv__", "truediv" in name
    is_product = is_quotient or "mul" in name

    @functools.wraps(plain)
    def operation(self: Any, operand: Any) -> Any:
        if _is_left_alone(operand):
            return plain(self, operand)
        is_whole = isinstance(operand, int | np.integer | Size)
        if not is_whole and not _is_number(operand):
            return reported(self, operand)
        if is_quotient:
            if divides and type(operand) in (int, float) and operand == 0:  # NumPy's is infinite
                raise ZeroDivisionError("division by zero")
            _report_zero(operand if divides else self)
        # JAX's own arithmetic on sizes is the same in both runs.
        is_same = (is_whole and not is_quotient) or not caller_is_user()
        if is_same or jax.dtypes.canonicalize_dtype(float) == np.float64:
            return plain(self, operand)
        is_good = is_whole or not operand or _LEAST_FLOAT <= abs(operand) <= _MOST_FLOAT
        if not (is_product and is_good):
            fail(TypeError(f"a size and the number {operand!r} are used as numbers of Python"))
        return _marked(reported(self, operand))

    return operation


def whole_operation(name: str) -> Callable[..., Any]:
    """The hook for ``//``, ``%`` or ``divmod`` of a size.

    With a float the result jumps, so an error of float32 could change it by 1: the hook raises
    ``TypeError``.
    """
    plain = getattr(Size, name)
    divides = not name.startswith("__r")

    @functools.wraps(plain)
    def operation(self: object, operand: object) -> Any:
        if _is_left_alone(operand):
            return plain(self, operand)
        if _is_number(operand):
            fail(TypeError(f"a size is divided by, or into, the number {operand!r}"))
        _report_zero(operand if divides else self)
        return plain(self, operand)

    return operation


def _report_zero(divisor: object) -> None:
    """Report a divisor that may be 0: JAX takes every symbolic size for different from 0."""
    if isinstance(divisor, Size) and not is_positive(divisor):
        watching.report(divisor, 0)


def power(self: Any, power: Any, modulo: object = None) -> Any:
    """The hook for ``size ** power``: a float power, or a negative one, makes a number of sizes.

    The power is limited so that no result leaves float32.
    """
    if _is_left_alone(power):
        return _plain_pow(self, power, modulo)
    is_float = isinstance(power, float) or (isinstance(power, int | np.integer) and power < 0)
    if modulo is not None or not is_float or not abs(power) <= _MOST_POWER:
        return _reported_pow(self, power, modulo)
    if power < 0:
        _report_zero(self)
    result = self.__jax_array__() ** float(power)
    is_exact = jax.dtypes.canonicalize_dtype(float) == np.float64
    return result if is_exact else _marked(result)


def exponent(self: object, base: object, modulo: object = None) -> Any:
    """The hook for ``base ** size``, which refuses it in user code.

    In the trace ``2 ** n`` wraps around, and ``0.999 ** n`` is off by more than one rounding.
    """
    if _is_left_alone(base) or not caller_is_user():
        return _plain_rpow(self, base, modulo)
    fail(TypeError(f"a size is the exponent of {base!r}"))


_plain_pow, _plain_rpow = Size.__pow__, Size.__rpow__
_reported_pow = reporting(_plain_pow, TypeError, ValueError)


def special_names(names: str) -> list[str]:
    """The names of special methods, such as ``__add__``."""
    return [f"__{name}__" for name in names.split()]


WITH_NUMBERS = special_names("add radd sub rsub mul rmul truediv rtruediv")

WHOLE_OPERATORS = special_names("floordiv rfloordiv mod rmod divmod rdivmod")


def is_number_of_sizes(value: Any) -> bool:
    """Whether a scalar tracer is computed from sizes alone: unpadded it is a Python number.

    The function walks back to what the tracer is made of (``tracer.parent``), which no public name
    has (``partial_eval.DynamicJaxprTracer``). One that depends on an argument is no number of
    sizes, nor is one that depends on no size.
    """
    if getattr(value.aval, "shape", None) != ():
        return False
    seen: set[int] = set()
    pending, has_size = [value], False
    while pending:
        tracer = pending.pop()
        if not isinstance(tracer, jax.core.Tracer) or id(tracer) in seen:
            continue
        seen.add(id(tracer))
        if not isinstance(tracer, partial_eval.DynamicJaxprTracer):
            return False
        if tracer.parent is not None:
            has_size |= tracer.parent.primitive.name == "dim_as_value"
            pending += tracer.parent.in_tracers
        elif not isinstance(tracer.val, jex_core.Literal):
            # A constant of this trace: a number, or a tracer of the trace around it.
            const = tracer._trace.frame.constvar_to_val.get(tracer.val)
            if const is None:  # an argument of the function
                return False
            pending.append(const)
    return has_size


# Conversions that a Python number allows and a tracer refuses: user code may catch the refusal and
# go on in another way than the unpadded run.
CONVERSIONS = {
    name: reporting(plain, TypeError, AttributeError, counts=is_number_of_sizes)
    for name in special_names("float int bool complex round hash array getattr")
    for plain in [getattr(jax.core.Tracer, name)]
}
