"""Refuse symbolic programs that are less exact than the unpadded run in floats made of sizes.

``x.shape[0] * 0.29`` is a Python float in the unpadded run, of 53 bits. In a program with symbolic
sizes it is an array of 24 bits. Multiplied with data, that is only one more rounding:

    a = dim_as_value n
    b = mul a 0.29        a number: `NUMBER_OF_SIZES` marks it
    c = mul x b           data, as exact as in the unpadded run

Elsewhere the difference can decide: at ``n = 100`` the Python float is 28.999999999999996, and the
array is 29.0, whose whole part is larger; ``n * 0.1 - 0.5`` nearly cancels at 5. So a number may
only be multiplied with data, divide it, or be divided by it. A program that does anything else with
a number is refused here, and is then traced at concrete sizes. So is one that converts a size to a
narrow integer, which may wrap.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from jax import dtypes
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from bucketjit._ir.dataflow import Analysis, follow, follow_inside, listed, through
from bucketjit._ir.expressions import is_symbolic
from bucketjit._ir.program import TraceRefused
from bucketjit._jax.jaxprs import Atom, dtype_of, equations_around, name_of
from bucketjit._jax.number_hooks import NUMBER_OF_SIZES
from bucketjit._jax.user_code import in_brackets, source_line

_NARROW = listed("int2 int4 int8 int16 uint2 uint4 uint8 uint16")
# Primitives whose result is the same number.
_CARRY = listed("broadcast_in_dim reshape squeeze copy stop_gradient convert_element_type")
# Primitives that may take a number and data; the result is data.
_MEETS = frozenset(("mul", "div"))


class _Kind(enum.IntEnum):
    """What a value depends on. The order is that of the join: the larger kind wins.

    Attributes:
        CONSTANT: It is the same at all sizes.
        SIZE: It is a size, or is computed by JAX from sizes.
        DATA: It depends on arguments.
        NUMBER: It is computed from sizes. The unpadded run may have a Python float in its place.
    """

    CONSTANT = enum.auto()
    SIZE = enum.auto()
    DATA = enum.auto()
    NUMBER = enum.auto()


def refuse_decisions(jaxpr: Jaxpr) -> None:
    """Refuse a program that does more with numbers than multiply or divide, or may wrap a size."""
    follow(_Kinds(jaxpr), jaxpr, [_Kind.DATA] * len(jaxpr.invars))


class _Kinds(Analysis[_Kind]):
    """The kind of each value of a program. Arguments are data."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._jaxpr = jaxpr
        self.table = {
            "dim_as_value": lambda eqn, ins: [_Kind.SIZE],
            "iota": self._iota,
            "name": self._name,
            "cond": self._cond,
        }

    def unknown(self, atom: Atom) -> _Kind:
        return _Kind.DATA

    def literal(self, atom: Literal) -> _Kind:
        return _Kind.CONSTANT

    def join(self, left: _Kind, right: _Kind) -> _Kind:
        return max(left, right)

    def row(self, value: _Kind, var: Var) -> _Kind:
        return value

    stacked = row

    def default(self, eqn: JaxprEqn, ins: Sequence[_Kind]) -> Sequence[_Kind]:
        follow_inside(self, eqn)
        return [self._of_operation(eqn, name_of(eqn), ins)] * len(eqn.outvars)

    def _iota(self, eqn: JaxprEqn, ins: Sequence[_Kind]) -> Sequence[_Kind]:
        is_open = is_symbolic(eqn.params["shape"][eqn.params["dimension"]])
        return [_Kind.SIZE if is_open else _Kind.CONSTANT]

    def _name(self, eqn: JaxprEqn, ins: Sequence[_Kind]) -> Sequence[_Kind]:
        is_number = eqn.params["name"] == NUMBER_OF_SIZES
        return [_Kind.NUMBER] if is_number else self.default(eqn, ins)

    def _cond(self, eqn: JaxprEqn, ins: Sequence[_Kind]) -> Sequence[_Kind]:
        if ins[0] is _Kind.NUMBER:
            self._refuse(eqn, "a number that is computed of sizes chooses a branch")
        return through(self, eqn, ins)

    def _refuse(self, eqn: JaxprEqn, why: str) -> NoReturn:
        line = source_line(eqn, equations_around(self._jaxpr, eqn))
        raise TraceRefused(
            f"{eqn.primitive.name}: {why}, and is not as exact at symbolic sizes"
            + in_brackets(line),
            "compute it of an array, such as jnp.float32(x.shape[0]), or leave the axis static",
        )

    def _of_operation(self, eqn: JaxprEqn, name: str, ins: Sequence[_Kind]) -> _Kind:
        if _Kind.NUMBER in ins:
            if _Kind.DATA in ins and name in _MEETS:
                return _Kind.DATA
            if _Kind.DATA in ins or name not in _CARRY:
                self._refuse(eqn, f"a number that is computed of sizes goes into {name}")
            if not dtypes.issubdtype(dtype_of(eqn.outvars[0]), np.inexact):
                self._refuse(eqn, "a number that is computed of sizes becomes an integer")
            return _Kind.NUMBER
        kind = max(ins, default=_Kind.DATA)
        if name == "convert_element_type" and kind is _Kind.SIZE:
            dtype = np.dtype(eqn.params["new_dtype"]).name
            if dtype in _NARROW:
                self._refuse(eqn, f"a size becomes {dtype}, and may wrap")
        return kind
