"""Reuse of values whose padding has been filled, in place of the unfilled originals.

    b = select (iota < n) a -inf      a rule fills the padding of the scores a for their maximum
    m = reduce_max b
    e = exp (sub a m)           ->    e = exp (sub b m)      now nothing reads a any more

Padding is arbitrary, so the filled value can serve wherever the original does. If one equation
fills a value and an elementwise equation reads the original, XLA computes and keeps both. A softmax
is the common case: its scores are masked for the maximum and unmasked for the exponentials. If both
equations read the filled value, only that one remains. (On CPU, an encoder takes 0.97 to 0.99 of
the time for a row of 34 to 212 tokens, and its compile takes about 0.93.)
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
    """Filled values, looked up by the value that was filled.

    A lookup also compares the logical shape. The logical shape determines what is padding, and one
    array may stand for two values of different logical shapes (``x`` and ``x[:-1]``).

    A lookup also compares the current trace of JAX. A tracer of one program must not be used in
    another program, be it an inner or an outer one.
    """

    def __init__(self) -> None:
        # The key is the `id` of a value: `==` of tracers would trace a comparison. The entry keeps
        # the value alive, so that its `id` is not reused.
        self._made: dict[tuple[int, Any], tuple[Any, str, Any]] = {}

    def note(self, value: object, shape: Shape, filled: object) -> None:
        """Remember the filled version of a value."""
        self._made[id(value), current_trace()] = value, str(shape), filled

    def operands(self, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Replace operands of an elementwise equation by their filled versions."""
        if not self._made or name_of(eqn) not in _READERS:
            return values
        return [self._of(x, v.aval) for x, v in zip(values, eqn.invars, strict=True)]

    def _of(self, value: object, aval: object) -> Any:
        """The filled version of a value of this type; the value itself if there is none."""
        made = self._made.get((id(value), current_trace()))
        if made is None or made[1] != str(getattr(aval, "shape", ())):
            return value
        return made[2]
