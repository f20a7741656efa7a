"""What a program computes of sizes alone, where the unpadded run has numbers of Python.

``x.shape[0] * 0.29`` is a float of Python there, of 53 bits, and an array of 24 bits in a program
that holds for all sizes. Where it is added to arrays, or multiplied with them, that is one rounding
more. But ``29.0 > 28.999999999999996``, and so is its whole part: what decides by such a number is
not to be traced at symbolic sizes. Nor is what wraps, a size as ``uint8``, and what is more than
some roundings off (`float_errors`).

A number is known by its mark, which is put on it where it is made; see `watch_equalities`. It is
followed through the program as long as it is computed with numbers, sizes and constants only. What
comes of it and of data is data, and rounds as that does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jax import dtypes

from bucketjit._errors import MaskingError
from bucketjit._jax.jaxprs import (
    all_equations,
    bodies,
    equations_around,
    is_literal,
    open_jaxpr,
    scan_arity,
)
from bucketjit._jax.number_hooks import NUMBER_OF_SIZES, ROUNDED_ONCE
from bucketjit._jax.primitives import CALLS, called_jaxpr, name_of
from bucketjit._jax.size_reports import is_positive
from bucketjit._jax.user_code import source_line
from bucketjit._sizes.expressions import is_symbolic
from bucketjit._tracing.float_errors import Measured, Samples, computed, is_good

_NARROW = frozenset(("int2", "int4", "int8", "int16", "uint2", "uint4", "uint8", "uint16"))
_LOSSY = frozenset(map(dtypes.canonicalize_dtype, ("float16", "bfloat16")))
_SIGNS_MULTIPLY = frozenset(("mul", "div"))
# The same number, or some of several.
_CARRY = frozenset(
    ("broadcast_in_dim", "reshape", "squeeze", "copy", "name", "stop_gradient", "slice")
    + ("concatenate", "stack", "transpose", "rev", "optimization_barrier", "sharding_constraint")
)
# Odd functions, and those of what is positive.
_KEEP_SIGN = _CARRY | frozenset(
    ("sqrt", "rsqrt", "cbrt", "reduce_precision", "convert_element_type", "reduce_sum")
    + ("tanh", "sinh", "asinh", "atan", "erf", "expm1")
)
# What goes on as exact as it was, but for some roundings.
_SMOOTH = frozenset(
    ("exp", "exp2", "log", "log1p", "cosh", "sin", "cos", "tan")
    + ("logistic", "erfc", "lgamma", "digamma", "add", "sub", "neg")
    + ("integer_pow", "square", "abs", "max", "min", "reduce_max", "reduce_min")
)
_ACCURATE = _SIGNS_MULTIPLY | _KEEP_SIGN | _SMOOTH
# They jump, or are not a number, next to 0 or below it.
_OF_POSITIVE = frozenset(("sqrt", "rsqrt", "log", "log1p", "lgamma", "digamma"))
_WHOLE_PART = frozenset(("floor", "ceil", "round", "sign", "is_finite"))
_COMPARE = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
# Where it may meet data, with the positions of operands that decide something.
_MEETS: dict[str, frozenset[int]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "pow", "max", "min", "atan2"), frozenset[int]()),
    **dict.fromkeys(("add_any", "concatenate", "pad", "dot_general", "stack"), frozenset[int]()),
    **dict.fromkeys(("dynamic_update_slice", "clamp"), frozenset[int]()),
    "select_n": frozenset({0}),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul"), frozenset({1})),
}


class _Known(NamedTuple):
    """What is known of a value that depends on sizes alone, or on nothing.

    Attributes:
        is_number: Whether the unpadded run may have a float of Python in its place.
        sign: 1 or -1 where it has that sign at all sizes; 0 where that is not known.
        is_once: Whether it is what the number of Python is rounded to.
        measured: The value, and how far it is off, at sizes that were tried.
        is_constant: Whether it is the same at all sizes.
    """

    is_number: bool
    sign: int
    is_once: bool = False
    measured: Measured | None = None
    is_constant: bool = False


_States = list[_Known | None]


def refuse_decisions(jaxpr: Any, samples: Samples) -> None:
    """Refuse a program that decides by a number which it computes of sizes, or has one that is off.

    Args:
        jaxpr: The program, open.
        samples: Sizes that it has to serve.

    Raises:
        MaskingError: An equation does.
    """
    has_numbers = any(map(_mark_of, all_equations(jaxpr)))
    try:
        _Walk(samples if has_numbers else None).program(jaxpr, [None] * len(jaxpr.invars))
    except _Refusal as refusal:
        eqn = refusal.eqn
        line = source_line(eqn, equations_around(jaxpr, eqn))
        raise MaskingError(
            f"{eqn.primitive.name}: {refusal}, and is not as exact at symbolic sizes"
            + (f" [{line}]" if line else ""),
            "compute it of an array, such as jnp.float32(x.shape[0]), or leave the axis static",
        ) from None


def _mark_of(eqn: Any) -> str | None:
    """The mark that an equation puts on a number, if it does."""
    mark = eqn.params["name"] if name_of(eqn) == "name" else None
    return mark if mark in (NUMBER_OF_SIZES, ROUNDED_ONCE) else None


class _Walk:
    """Follows what is known through a program.

    Args:
        samples: Sizes that are tried; None to try none.
    """

    def __init__(self, samples: Samples | None) -> None:
        self._samples = samples

    def program(self, jaxpr: Any, given: Sequence[_Known | None]) -> _States:
        """What is known of the outputs of a program whose inputs are given."""
        known: dict[Any, _Known] = {}
        known.update((v, k) for v, k in zip(jaxpr.invars, given, strict=True) if k is not None)

        def of(atom: Any) -> _Known | None:
            return None if is_literal(atom) else known.get(atom)

        for eqn in jaxpr.eqns:
            results = self._results(eqn, list(map(of, eqn.invars)))
            known.update((v, k) for v, k in zip(eqn.outvars, results, strict=True) if k is not None)
        return list(map(of, jaxpr.outvars))

    def _results(self, eqn: Any, operands: _States) -> _States:
        name, params = name_of(eqn), eqn.params
        nothing: _States = [None] * len(eqn.outvars)
        if name == "dim_as_value":
            sign = 1 if is_positive(params["dim"]) else 0
            return [_Known(False, sign, measured=self._of_size(params["dim"]))]
        if name == "iota":
            size = params["shape"][params["dimension"]]
            last = self._of_size(size)
            measured = None if last is None else last.as_array
            return [_Known(False, 0, measured=measured, is_constant=not is_symbolic(size))]
        if (mark := _mark_of(eqn)) is not None:
            return [_marked(operands[0], mark == ROUNDED_ONCE)]
        if name in CALLS:
            inner = open_jaxpr(called_jaxpr(params))[0]
            if len(inner.invars) == len(operands) and len(inner.outvars) == len(nothing):
                outs = self.program(inner, self._with_literals(eqn, operands))
                return [None if k is not None and k.is_constant else k for k in outs]
        if name in _CONTROL:
            return _CONTROL[name](self, eqn, operands)
        for inner in bodies(eqn):
            opened = open_jaxpr(inner)[0]
            self.program(opened, [None] * len(opened.invars))
        return self._of_operation(eqn, operands) if any(operands) else nothing

    def _of_operation(self, eqn: Any, operands: _States) -> _States:
        name, params = name_of(eqn), eqn.params
        every = self._with_literals(eqn, operands)
        numbers = [k for k in operands if k is not None and k.is_number]
        if name == "div" and (by := operands[1]) is not None and by.is_number and by.sign == 0:
            _refuse(eqn, "a number that is computed of sizes divides, and may be next to 0")
        known = [k for k in every if k is not None]
        if len(known) < len(every):
            return _with_data(eqn, operands, numbers)
        is_constant = all(k.is_constant for k in known)
        if name == "convert_element_type" and not numbers:
            if not is_constant and np.dtype(params["new_dtype"]).name in _NARROW:
                _refuse(eqn, f"a size becomes {np.dtype(params['new_dtype']).name}, and may wrap")
            return [known[0]]
        sign = _sign(name, [k.sign for k in known])
        measured = _measured(eqn, known)
        if not numbers:
            found = _Known(False, sign, measured=measured, is_constant=is_constant)
            return [found] * len(eqn.outvars)
        is_once = all(k.is_once for k in numbers)
        if name == "convert_element_type":
            if not dtypes.issubdtype(params["new_dtype"], np.inexact):
                _refuse(eqn, "a number that is computed of sizes becomes an integer")
        elif name in _COMPARE and is_once and eqn.outvars[0].aval.shape:
            # Arrays are compared in their own type, numbers of Python in theirs.
            return [None] * len(eqn.outvars)
        elif not (
            name in _ACCURATE
            or (is_once and name in _WHOLE_PART)
            or (name == "pow" and known[0].sign == 1 and not known[1].is_number)
        ):
            _refuse(eqn, f"a number that is computed of sizes goes into {name}")
        if measured is not None and measured.exact is not None and not measured.is_accurate():
            _refuse(eqn, f"numbers that are computed of sizes nearly cancel in {name}")
        if not is_once:  # else the function gets the same as in the unpadded run
            _refuse_enlarging(eqn, known[0], measured)
        keeps = name in _CARRY | _WHOLE_PART | {"neg"} or (
            name == "convert_element_type" and params["new_dtype"] in (np.float32, np.float64)
        )
        return [_Known(True, sign, is_once and keeps, measured)] * len(eqn.outvars)

    def _with_literals(self, eqn: Any, operands: _States) -> _States:
        pairs = zip(operands, eqn.invars, strict=True)
        return [k or self._of_literal(v) for k, v in pairs]

    def _of_size(self, size: Any) -> Measured | None:
        return None if self._samples is None else self._samples.of_size(size)

    def _of_literal(self, atom: Any) -> _Known | None:
        """A literal is as exact as it is in the unpadded run; None for what is none."""
        if not is_literal(atom):
            return None
        value = np.asarray(atom.val)
        measured = None if self._samples is None else self._samples.of_constant(value)
        sign = 0
        if not value.shape and np.isrealobj(value):
            sign = int(value > 0) - int(value < 0)  # 0 of a NaN
        return _Known(False, sign, measured=measured, is_constant=True)

    # --- control flow ---

    def _cond(self, eqn: Any, operands: _States) -> _States:
        if operands[0] is not None and operands[0].is_number:
            _refuse(eqn, "a number that is computed of sizes chooses a branch")
        outs = [self.program(open_jaxpr(b)[0], operands[1:]) for b in eqn.params["branches"]]
        return [_any_of(found) for found in zip(*outs, strict=True)]

    def _scan(self, eqn: Any, operands: _States) -> _States:
        consts, carried = scan_arity(eqn.params)
        body = open_jaxpr(eqn.params["jaxpr"])[0]
        carry, xs = operands[consts : consts + carried], operands[consts + carried :]

        def step(carry: _States) -> _States:
            return self.program(body, [*operands[:consts], *carry, *xs])

        return _around(step, carry)

    def _while(self, eqn: Any, operands: _States) -> _States:
        params = eqn.params
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        consts, carry = operands[of_cond : of_cond + of_body], operands[of_cond + of_body :]

        def step(carry: _States) -> _States:
            self.program(open_jaxpr(params["cond_jaxpr"])[0], [*operands[:of_cond], *carry])
            return self.program(open_jaxpr(params["body_jaxpr"])[0], [*consts, *carry])

        return _around(step, carry)


_CONTROL: Mapping[str, Callable[[_Walk, Any, _States], _States]] = {
    "cond": _Walk._cond,
    "scan": _Walk._scan,
    "while": _Walk._while,
}


def _marked(value: _Known | None, is_once: bool) -> _Known:
    """A value that is marked as a number."""
    if value is None:
        return _Known(True, 0, is_once)
    measured = value.measured
    if is_once and measured is not None and measured.exact is not None:
        measured = Measured.rounded_once(measured.exact)
    return _Known(True, value.sign, is_once, measured)


def _measured(eqn: Any, operands: Sequence[_Known]) -> Measured | None:
    """What an equation makes at the sizes that were tried."""
    given = [k.measured for k in operands if k.measured is not None]
    if len(given) < len(operands) or not eqn.outvars:
        return None
    name, out = name_of(eqn), eqn.outvars[0].aval
    if name == "convert_element_type" and out.dtype in _LOSSY:
        return None
    if name in _CARRY | {"convert_element_type"} and len(given) == 1:
        found: Measured | None = given[0]
    else:
        found = computed(name, eqn.params, given)
    is_scalar = not out.shape and np.issubdtype(out.dtype, np.number) and np.isrealobj(out)
    return found if found is None or is_scalar else found.as_array


def _refuse_enlarging(eqn: Any, argument: _Known, result: Measured | None) -> None:
    """Refuse a function that makes more of some roundings of its argument."""
    name = name_of(eqn)
    is_tried = argument.measured is not None and argument.measured.exact is not None
    if name in _OF_POSITIVE and argument.sign != 1 and not (is_tried and result is not None):
        _refuse(eqn, f"a number that is computed of sizes goes into {name}, and may be next to 0")
    if not is_good(name, argument.measured, result):
        _refuse(eqn, f"a number that is computed of sizes goes into {name}, which enlarges errors")


def _with_data(eqn: Any, operands: _States, numbers: Sequence[_Known]) -> _States:
    """What comes of values, some of which are data."""
    name = name_of(eqn)
    if not numbers or (name in _COMPARE and all(k.is_once for k in numbers)):
        return [None] * len(eqn.outvars)
    decide = _MEETS.get(name)
    if decide is None or any(k in numbers for i, k in enumerate(operands) if i in decide):
        _refuse(eqn, f"a number that is computed of sizes goes into {name}")
    is_chosen = name == "select_n"  # as it is
    return [_Known(True, 0, all(k.is_once for k in numbers)) if is_chosen else None]


def _sign(name: str, signs: Sequence[int]) -> int:
    if name in _SIGNS_MULTIPLY:
        return int(np.prod(signs))
    if name == "neg":
        return -signs[0]
    if name == "sub":
        signs = [signs[0], -signs[1]]
    if name in ("add", "sub", "max", "min", "concatenate", "stack"):
        return signs[0] if len(set(signs)) == 1 else 0
    if name in ("exp", "exp2", "logistic", "cosh"):
        return 1
    if name == "pow":
        return int(signs[0] == 1)
    if name in ("square", "abs"):
        return abs(signs[0])
    return signs[0] if name in _KEEP_SIGN else 0


def _around(step: Any, carry: _States) -> _States:
    """The outputs of a loop: what may come round in any turn of it."""
    while True:
        outs = step(carry)
        joined = [_any_of(pair) for pair in zip(carry, outs, strict=False)]
        if joined == carry:
            return outs
        carry = joined


def _any_of(found: Sequence[_Known | None]) -> _Known | None:
    """What is known of one of several values; a number remains one."""
    known = [k for k in found if k is not None]
    if len(known) < len(found) and not any(k.is_number for k in known):
        return None
    signs = {k.sign for k in known} if len(known) == len(found) else {0}
    is_number = any(k.is_number for k in known)
    is_once = is_number and all(k.is_once for k in known if k.is_number)
    measured = known[0].measured if known and len(known) == len(found) else None
    if any(k.measured is not measured for k in known):
        measured = None
    sign = signs.pop() if len(signs) == 1 else 0
    is_constant = all(k.is_constant for k in known) and measured is not None
    return _Known(is_number, sign, is_once, measured, is_constant)


def _refuse(eqn: Any, why: str) -> NoReturn:
    raise _Refusal(eqn, why)


class _Refusal(Exception):
    """An equation is refused; its line may be that of an equation around it."""

    def __init__(self, eqn: Any, why: str) -> None:
        super().__init__(why)
        self.eqn = eqn
