"""The padding of a softmax is zero already, so its exponentials need not be filled again.

    b = select (iota < n) a -inf      the rule of the maximum fills the scores a; its readers use b
    m = reduce_max b
    e = exp (sub b m)                 in the padding exp(-inf - m): 0
    s = reduce_sum e                  asks for a fill with 0, which is spared
    p = div e s                       in the padding 0 / s: 0
    y = dot_general p v               asks for a fill of p with 0, which is spared

There is one exception. Where the maximum is -inf or NaN, and where a score is +inf or NaN, the
padding of e or p may be NaN. Then all real values of p along the axis are NaN, and a real value of
e is. A sum, or a contraction with zeros in the padding of its other operand, is NaN there in any
case, so such readers need no fill. All others get theirs. An axis that may have no real value is
not followed: its sum is 0.

XLA's CPU backend does not fuse a select into its library's reductions and contractions, so the two
selects took a quarter of the time of an attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from bucketjit._ir.ranges import is_at_most
from bucketjit._jax.jaxprs import shape_of
from bucketjit._jax.primitives import name_of
from bucketjit._sizes.expressions import Shape, is_symbolic

_READERS = ("reduce_sum", "dot_general")


class _Along(NamedTuple):
    """What is known of a value: its padding along some axes.

    Attributes:
        value: The value, which keeps its `id` from being used again.
        shape: Its logical shape, as text.
        axes: The axes that the softmax runs along.
        what: ``"scores"`` (-inf), ``"shifted"`` (the scores without their maximum) or ``"zeros"``.
    """

    value: Any
    shape: str
    axes: frozenset[int]
    what: str


class _Reduced(NamedTuple):
    """The maximum or the sum of a value along the axes of its softmax.

    Attributes:
        value: The result, which keeps its `id` from being used again.
        of: The value that was reduced.
        axes: The axes.
        places: The axis of the reduced value for each axis of the result; None for one of size 1.
    """

    value: Any
    of: Any
    axes: frozenset[int]
    places: tuple[int | None, ...]

    def is_beside(self, value: object, rank: int) -> bool:
        """Whether each element meets those it was reduced from, in an operation with ``value``."""
        return (
            self.of is value
            and len(self.places) == rank
            and all(
                place == i or (place is None and i in self.axes)
                for i, place in enumerate(self.places)
            )
        )


class SoftmaxPadding:
    """Follows the values of softmaxes from equation to equation.

    A value is looked up by its identity, and its logical shape is compared, as in `KnownPadding`.
    """

    def __init__(self) -> None:
        self._along: dict[int, _Along] = {}
        self._reduced: dict[int, _Reduced] = {}
        self._filled: tuple[JaxprEqn, Any] | None = None  # by the rule of the latest maximum

    def note_fill(
        self, eqn: JaxprEqn, filled: Any, shape: Shape, axes: Iterable[int], value: Any
    ) -> None:
        """Remember the operand of a maximum, which was filled with -inf."""
        if name_of(eqn) != "reduce_max" or isinstance(value, jax.Array) or np.ndim(value):
            return
        if not all(is_at_most(1, shape[axis]) for axis in axes):
            return
        if jnp.issubdtype(filled.dtype, jnp.floating) and float(np.asarray(value)) == -np.inf:
            along = _Along(filled, str(shape), frozenset(axes), "scores")
            self._along[id(filled)] = along
            self._filled = eqn, filled

    def spares(self, eqn: JaxprEqn, value: Any, shape: Shape, axes: Sequence[int]) -> bool:
        """Whether an equation reads a value as if its padding were filled with 0."""
        known = self._along.get(id(value))
        return (
            known is not None
            and known.what == "zeros"
            and known.shape == str(shape)
            and name_of(eqn) in _READERS
            and known.axes.issuperset(a for a in axes if is_symbolic(shape[a]))
        )

    def follow(self, eqn: JaxprEqn, operands: Sequence[Any], outs: Sequence[Any]) -> None:
        """Note what is known of an equation's output."""
        if not self._along:
            return
        step = _STEPS.get(name_of(eqn))
        if step is not None:
            step(self, eqn, operands, outs[0])

    def _note(self, eqn: JaxprEqn, out: Any, axes: frozenset[int], what: str) -> None:
        self._along[id(out)] = _Along(out, str(shape_of(eqn.outvars[0])), axes, what)

    # --- one method for each primitive of a softmax ---

    def _maximum(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> None:
        if self._filled is not None and self._filled[0] is eqn:
            self._note_reduced(eqn, self._filled[1], out)

    def _sum(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> None:
        known = self._along.get(id(operands[0]))
        if known is not None and known.what == "zeros" and known.axes == set(eqn.params["axes"]):
            self._note_reduced(eqn, operands[0], out)

    def _note_reduced(self, eqn: JaxprEqn, of: Any, out: Any) -> None:
        axes = frozenset(eqn.params["axes"])
        places = tuple(i for i in range(of.ndim) if i not in axes)
        self._reduced[id(out)] = _Reduced(out, of, axes, places)

    def _same(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> None:
        reduced = self._reduced.get(id(operands[0]))
        if reduced is not None:
            self._reduced[id(out)] = reduced._replace(value=out)

    def _at_least(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> None:
        """The maximum of a value and -inf, which `jax.nn.softmax` takes."""
        for own, other in (operands, operands[::-1]):
            reduced = self._reduced.get(id(own))
            is_constant = not isinstance(other, jax.core.Tracer) and np.ndim(other) == 0
            if reduced is not None and is_constant and float(other) == -np.inf:
                self._reduced[id(out)] = reduced._replace(value=out)

    def _broadcast(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> None:
        reduced = self._reduced.get(id(operands[0]))
        if reduced is None:
            return
        places: list[int | None] = [None] * out.ndim
        before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
        for i, place in enumerate(eqn.params["broadcast_dimensions"]):
            if str(before[i]) == str(after[place]):
                places[place] = reduced.places[i]
            elif reduced.places[i] is not None:
                return
        self._reduced[id(out)] = reduced._replace(value=out, places=tuple(places))

    def _minus(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> None:
        self._beside(eqn, operands, out, "scores", "shifted")

    def _exponential(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> None:
        known = self._along.get(id(operands[0]))
        if known is not None and known.what == "shifted":
            self._note(eqn, out, known.axes, "zeros")

    def _over(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> None:
        self._beside(eqn, operands, out, "zeros", "zeros")

    def _beside(
        self, eqn: JaxprEqn, operands: Sequence[Any], out: Any, before: str, after: str
    ) -> None:
        """Note the result of an operation on a value and what it was reduced to."""
        known, reduced = self._along.get(id(operands[0])), self._reduced.get(id(operands[1]))
        if known is None or reduced is None or known.what != before:
            return
        if known.axes == reduced.axes and reduced.is_beside(operands[0], out.ndim):
            self._note(eqn, out, known.axes, after)


_STEPS = {
    "reduce_max": SoftmaxPadding._maximum,
    "reduce_sum": SoftmaxPadding._sum,
    "stop_gradient": SoftmaxPadding._same,
    "copy": SoftmaxPadding._same,
    "max": SoftmaxPadding._at_least,
    "broadcast_in_dim": SoftmaxPadding._broadcast,
    "sub": SoftmaxPadding._minus,
    "exp": SoftmaxPadding._exponential,
    "div": SoftmaxPadding._over,
}
