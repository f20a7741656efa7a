"""Which values of a trace are equal, so that equal selections share one size.

a = gt x 0      number 7
b = gt x 0      number 7: an equal equation of equal operands
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bucketjit._ir.dataflow import ValueFacts
from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax.jaxprs import is_jaxpr, is_literal, open_jaxpr
from bucketjit._jax.primitives import called_jaxpr
from bucketjit._jax.tracers import Made, equation_of, literal_of

_BITS_OF_SIZES = 32

_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.dtype, np.generic, enum.Enum, type)


class ValueNumbers:
    """Numbers the values of a trace: equal equations of equal operands have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._facts = ValueFacts(self._found)
        self._kept: list[Any] = []  # what is known by its `id` alone
        self._false = self._number(("literal", "bool[]", "False"))

    def of(self, value: Any) -> int:
        """The number of a value."""
        return self._facts.of(value)

    def of_integer(self, value: Any) -> int:
        """The number of an integer, whatever its integer type is."""
        return self.of(unconverted(value))

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _found(self, value: Any, made: Made | None, operands: Sequence[int]) -> int:
        if made is not None:
            return self._results(made, operands)[made.position]
        literal = literal_of(value)
        if literal is not None:
            return self._literal(literal)
        if not isinstance(value, jax.core.Tracer) and np.ndim(value) == 0:
            return self._number(("number", str(jax.typeof(value)), _shown(value)))
        return self._number(("one", id(value)))

    def _literal(self, literal: Any) -> int:
        return self._number(("literal", str(literal.aval), _shown(literal.val)))

    def _results(self, eqn: Any, operands: Sequence[int]) -> list[int]:
        """The numbers of the results of an equation, or of the one that made a value."""
        results = eqn.results if isinstance(eqn, Made) else eqn.outvars
        name = eqn.primitive.name
        if name in ("jit", "pjit"):
            jaxpr, consts = open_jaxpr(called_jaxpr(eqn.params))
            if len(jaxpr.invars) == len(operands) and len(jaxpr.constvars) == len(consts):
                return self._called(jaxpr, consts, operands)
        if name == "ne" and operands[1] == self._false:  # as `jnp.count_nonzero` reads a mask
            return [operands[0]]
        params = tuple((k, self._param(v)) for k, v in sorted(eqn.params.items()))
        return [self._number((name, i, params, tuple(operands))) for i in range(len(results))]

    def _called(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[int]) -> list[int]:
        """The numbers of the results of a function under ``jit``: those of its equations."""
        self._kept.append(jaxpr)
        numbers = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            self._kept.append(const)
            numbers[variable] = self._number(("one", id(const)))

        def read(atom: Any) -> int:
            return self._literal(atom) if is_literal(atom) else numbers[atom]

        for eqn in jaxpr.eqns:
            outs = self._results(eqn, [read(x) for x in eqn.invars])
            numbers.update(zip(eqn.outvars, outs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _param(self, value: Any) -> Any:
        """The key of a parameter: by value if it is a plain one, else by identity."""
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(self._param, value))
        if is_symbolic(value) or (isinstance(value, _PLAIN) and not is_jaxpr(value)):
            return type(value).__name__, repr(value)
        self._kept.append(value)
        return id(value)


def _shown(value: Any) -> str:
    return repr(np.asarray(value).tolist())


def unconverted(value: Any) -> Any:
    """An integer before its conversions to integer types that hold every size."""
    while _bits(value) >= _BITS_OF_SIZES:
        made = equation_of(value)
        if made is None or made.primitive.name != "convert_element_type":
            break
        (operand,) = made.operands
        if not _bits(operand):
            break
        value = operand
    return value


def _bits(value: Any) -> int:
    """The number of bits of an integer type; 0 for any other type."""
    dtype = jax.typeof(value).dtype
    return 8 * dtype.itemsize if np.issubdtype(dtype, np.integer) else 0


def negated_mask(made: Made) -> Any | None:
    """The mask ``m`` of ``jnp.sum(~m)``, which is the size of `m` less ``jnp.sum(m)``."""
    found: Made | None = made
    for name in ("convert_element_type", "not"):
        found = None if found is None else equation_of(found.operands[0])
        if found is None or found.primitive.name != name:
            return None
    assert found is not None
    (mask,) = found.operands
    is_whole = len(made.params["axes"]) == mask.ndim
    return mask if is_whole and mask.dtype == bool else None
