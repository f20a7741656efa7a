"""Hooks on numbers that are computed of symbolic sizes, such as ``x.shape[0] / 2``."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from bucketjit._jax import names
from bucketjit._jax.size_reports import fail, is_positive, report_raised, watching
from bucketjit._jax.user_code import caller_is_user

_shape_poly = names.module("export.shape_poly")

# The mark of a number that is computed of sizes.
NUMBER_OF_SIZES = "bucketjit: a number of sizes"

# Numbers that a size may be multiplied with: the product with a size is a normal float32.
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-64, 2.0**64


def _marked(value: object) -> Any:
    """Say of an array that the unpadded run has a number of Python in its place."""
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, np.inexact):
        return checkpoint_name(value, NUMBER_OF_SIZES)
    return value


def _is_number(other: object) -> bool:
    return isinstance(other, numbers.Number) and not isinstance(other, numbers.Integral)


def _is_left_alone(other: object) -> bool:
    """Whether a hook has nothing to say: nobody watches, or the operation is one of arrays."""
    return getattr(watching, "report", None) is None or isinstance(other, jax.Array | np.ndarray)


def operation_with_number(name: str) -> Callable[..., Any]:
    """A sum, difference, product or quotient of a size and another size or a number.

    Of floats, a product or quotient is marked, and a sum or difference is refused: it may nearly
    cancel. With 64-bit types all of them are exact.
    """
    plain = getattr(_shape_poly._DimExpr, name)
    divides, is_quotient = name == "__truediv__", "truediv" in name
    is_product = is_quotient or "mul" in name

    @functools.wraps(plain)
    def operation(self: Any, other: Any) -> Any:
        if _is_left_alone(other):
            return plain(self, other)
        is_whole = isinstance(other, int | np.integer | _shape_poly._DimExpr)
        if not is_whole and not _is_number(other):
            return _or_report(plain, self, other)
        if is_quotient:
            if divides and type(other) in (int, float) and other == 0:  # NumPy's give infinity
                raise ZeroDivisionError("division by zero")
            _report_zero(other if divides else self)
        elif is_whole:
            return plain(self, other)
        if not caller_is_user() or jax.dtypes.canonicalize_dtype(float) == np.float64:
            return plain(self, other)
        is_good = is_whole or not other or _LEAST_FLOAT <= abs(other) <= _MOST_FLOAT
        if not (is_product and is_good):
            fail(TypeError(f"a size and the number {other!r} are used as numbers of Python"))
        return _marked(_or_report(plain, self, other))

    return operation


def whole_operation(name: str) -> Callable[..., Any]:
    """A division with a whole result. By numbers of Python it jumps, so they are refused."""
    plain = getattr(_shape_poly._DimExpr, name)
    divides = not name.startswith("__r")

    @functools.wraps(plain)
    def operation(self: object, other: object) -> Any:
        if _is_left_alone(other):
            return plain(self, other)
        if _is_number(other):
            fail(TypeError(f"a size is divided by, or into, the number {other!r}"))
        _report_zero(other if divides else self)
        return plain(self, other)

    return operation


def _report_zero(divisor: object) -> None:
    """A size is divided by, which JAX takes for different from 0."""
    if isinstance(divisor, _shape_poly._DimExpr) and not is_positive(divisor):
        watching.report(divisor, 0)


def _or_report(plain: Callable[..., Any], *operands: object) -> Any:
    """Run an operation, and report what it raises for user code."""
    try:
        return plain(*operands)
    except (TypeError, ValueError) as error:
        report_raised(error)
        raise


def power(self: object, power: object, modulo: object = None) -> Any:
    """``size ** power``, which is reported where it raises."""
    if _is_left_alone(power):
        return _plain_pow(self, power, modulo)
    return _or_report(_plain_pow, self, power, modulo)


def exponent(self: object, base: object, modulo: object = None) -> Any:
    """``2 ** n`` wraps, and ``0.999 ** n`` is off by more than a rounding."""
    if _is_left_alone(base) or not caller_is_user():
        return _plain_rpow(self, base, modulo)
    fail(TypeError(f"a size is the exponent of {base!r}"))


_plain_pow, _plain_rpow = _shape_poly._DimExpr.__pow__, _shape_poly._DimExpr.__rpow__

OPERATORS_WITH_NUMBERS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")

WHOLE_OPERATORS = ("floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod")


def is_number_of_sizes(value: Any) -> bool:
    """Whether a tracer is computed of sizes alone: the unpadded run has a number in its place."""
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
            const = tracer._trace.frame.constvar_to_val.get(tracer.val)
            if const is None:  # an argument
                return False
            pending.append(const)
    return has_size


def reporting_conversion(name: str) -> Callable[..., Any]:
    """What a number of Python answers, and a tracer refuses to: user code may catch the refusal."""
    plain = getattr(jax.core.Tracer, name)

    @functools.wraps(plain)
    def reporting(self: object, *args: object, **kwargs: object) -> Any:
        try:
            return plain(self, *args, **kwargs)
        except (TypeError, AttributeError) as error:
            if getattr(watching, "report", None) is not None and is_number_of_sizes(self):
                report_raised(error)
            raise

    return reporting


CONVERSIONS = ("float", "int", "bool", "complex", "round", "hash", "array", "getattr")
