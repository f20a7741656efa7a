"""Filled values in place of those that they were made of, where nobody reads their padding.

Padding is arbitrary, so a value whose padding has been filled is as good as the value itself. Where
one equation fills a value and an elementwise one reads it too, XLA would make and keep both: a
softmax has its scores masked for their maximum and unmasked for the exponentials. Read by both, the
masked ones are all there is. (On CPU a row of 34 to 212 tokens takes an encoder 0.97 to 0.99 of the
time, and its compile about 0.93.)
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import JaxprEqn

from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._jax.primitives import name_of
from bucketjit._jax.transformations import current_trace
from bucketjit._sizes.expressions import Shape

_READERS = frozenset(ELEMENTWISE)


class FilledValues:
    """Filled values, by the values that they were made of.

    What is padding depends on the logical shape, and one array may stand for two values of
    different shapes (``x`` and ``x[:-1]``), so both are looked up. What was made while one program
    is traced is of no use in another that it holds, or is held by.
    """

    def __init__(self) -> None:
        # By identity: tracers are compared by what they trace. What is looked up is kept alive.
        self._made: dict[tuple[int, Any], tuple[Any, str, Any]] = {}

    def note(self, value: object, shape: Shape, filled: object) -> None:
        """Remember a value of this logical shape with its padding filled."""
        self._made[id(value), current_trace()] = value, str(shape), filled

    def operands(self, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """The operands of an equation, filled ones in place of others if it is elementwise."""
        if not self._made or name_of(eqn) not in _READERS:
            return values
        return [self._of(x, v.aval) for x, v in zip(values, eqn.invars, strict=True)]

    def _of(self, value: object, aval: object) -> Any:
        made = self._made.get((id(value), current_trace()))
        if made is None or made[1] != str(getattr(aval, "shape", ())):
            return value
        return made[2]
