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

from bucketjit._ir import dataflow
from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax.jaxprs import CALLS, called_jaxpr, is_jaxpr, open_jaxpr
from bucketjit._jax.tracers import Made, equation_of, literal_of

BITS_OF_SIZES = 32

_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.dtype, np.generic, enum.Enum, type)


class ValueNumbers(dataflow.TraceAnalysis[int]):
    """Numbers the values of a trace: equal equations of equal operands have equal numbers.

    An equation that runs programs is compared as one, with these programs, but for a call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Any, int] = {}
        self._kept: list[Any] = []  # what is known by its `id` alone
        self._false = self._number(("literal", "bool[]", "False"))
        self.table = {
            **dict.fromkeys((*CALLS, "cond", "scan", "while"), self.default),
            **dataflow.table({"jit pjit": self._called, "ne": self._unequal}),
        }

    def of_integer(self, value: Any) -> int:
        """The number of an integer, whatever its integer type is."""
        return self.of(unconverted(value))

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def held(self, value: Any) -> int:
        """Numbers are equal by value; anything else only to itself."""
        if (literal := literal_of(value)) is not None:
            return self.literal(literal)
        if not isinstance(value, jax.core.Tracer) and np.ndim(value) == 0:
            return self._number(("number", str(jax.typeof(value)), _shown(value)))
        return self._only(value)

    def _only(self, value: Any) -> int:
        self._kept.append(value)
        return self._number(("one", id(value)))

    def unknown(self, atom: Any) -> int:
        """A value that is equal to no other one."""
        return self._number(object())

    def literal(self, atom: Any) -> int:
        """A number written into an equation."""
        return self._number(("literal", str(atom.aval), _shown(atom.val)))

    def default(self, eqn: Any, ins: Sequence[int]) -> list[int]:
        """The numbers of the results of an equation, by its parameters and operands."""
        params = tuple((k, self._param(v)) for k, v in sorted(eqn.params.items()))
        key = eqn.primitive.name, params, tuple(ins)
        return [self._number((i, key)) for i in range(len(eqn.outvars))]

    def _unequal(self, eqn: Any, ins: Sequence[int]) -> list[int]:
        # As `jnp.count_nonzero` reads a mask.
        return [ins[0]] if ins[1] == self._false else self.default(eqn, ins)

    def _called(self, eqn: Any, ins: Sequence[int]) -> list[int]:
        """The numbers of the results of a function under ``jit``: those of its equations."""
        jaxpr, consts = open_jaxpr(called_jaxpr(eqn.params))
        if len(jaxpr.invars) != len(ins) or len(jaxpr.constvars) != len(consts):
            return self.default(eqn, ins)
        constants: dict[Any, int] = dict(zip(jaxpr.constvars, map(self._only, consts), strict=True))
        return dataflow.follow(self, jaxpr, ins, constants)

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
    while _bits(value) >= BITS_OF_SIZES:
        eqn = equation_of(value)
        is_convert = eqn is not None and eqn.primitive.name == "convert_element_type"
        if eqn is None or not is_convert or not _bits(eqn.operands[0]):
            break
        (value,) = eqn.operands
    return value


def _bits(value: Any) -> int:
    """The number of bits of an integer type; 0 for any other type."""
    dtype = jax.typeof(value).dtype
    return 8 * dtype.itemsize if np.issubdtype(dtype, np.integer) else 0


def negated_mask(total: Made) -> Any | None:
    """The mask ``m`` of ``jnp.sum(~m)``, which is the size of `m` less ``jnp.sum(m)``."""
    (mask,) = total.operands
    for name in ("convert_element_type", "not"):
        eqn = equation_of(mask)
        if eqn is None or eqn.primitive.name != name:
            return None
        (mask,) = eqn.operands
    is_whole = len(total.params["axes"]) == mask.ndim
    return mask if is_whole and mask.dtype == bool else None
