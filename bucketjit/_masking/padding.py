"""What the padding of values is known to hold, to spare filling it again.

    x:f32[n]                   arguments are padded with zeros    the padding of x holds 0
    y:f32[n] = mul x x         table: 0 times 0 is exactly 0      the padding of y holds 0
    s:f32[] = reduce_sum y     its rule asks for a fill with 0    the fill returns y unchanged
    z:f32[n] = exp y           not in the table                   nothing is known of z

The interpreter follows this from equation to equation while it evaluates a program. It stages
branches and loops, so there is nothing to join. Masking rules do not know of it: they call
`RuleContext.fill`. A value is looked up by its `id`, as ``==`` of tracers would trace a comparison,
and by its logical shape. This determines what is padding, and one array may stand for two values of
different logical shapes (``x`` and ``x[:-1]``). Three facts are followed here, and two more along
each axis: `bucketjit._masking.padding_facts`.

*Zeros* along every axis. XLA may round differently from NumPy: on CPU it turns ``x * a * b`` into
``x * (a * b)``, so they are zeros only while the product of their factors stays finite.

A *softmax*, whose exponentials need no second fill:

    b = select (iota < n) a -inf      the rule of the maximum fills the scores a; its readers use b
    m = reduce_max b
    e = exp (sub b m)                 in the padding exp(-inf - m): 0
    s = reduce_sum e                  asks for a fill with 0, which is spared
    p = div e s                       in the padding 0 / s: 0
    y = dot_general p v               asks for a fill of p with 0, which is spared

Where the maximum is -inf or NaN, and where a score is +inf or NaN, the padding of e or p may be
NaN. Then all real values of e and p along the axis are NaN. So they are *zero* in the sense of
`bucketjit._masking.padding_facts`, and sums and contractions need no fill. All other readers get
theirs. An axis that may have no real value is not followed.
(XLA's CPU backend does not fuse a select into its library's reductions and contractions, so the two
selects took a quarter of the time of an attention.)

A *filled version*, which elementwise equations read in place of the value: padding is arbitrary,
and then nothing may read the original any more. A tracer of one program must not be used in another
one, so the trace of JAX is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from bucketjit._ir.dataflow import ELEMENTWISE
from bucketjit._ir.expressions import Shape, is_symbolic
from bucketjit._ir.ranges import is_at_most
from bucketjit._jax.config import current_trace
from bucketjit._jax.jaxprs import dtype_of, is_literal, name_of, shape_of
from bucketjit._masking.constants import (
    KEEP_ZEROS,
    PaddingNumber,
    constant_of,
    exponent_of_zeros,
    has_zero,
    is_zero,
)
from bucketjit._masking.padding_facts import (
    CERTAIN,
    FINITE,
    MADE,
    NOTHING,
    Fact,
    FactsOfResults,
    both,
    is_of_gradient,
    open_axes,
)
from bucketjit._masking.padding_plan import Plan
from bucketjit._masking.softmaxes import (
    Operand,
    Softmax,
    has_scores,
    softmax_of_result,
    with_softmax,
)

_READERS = frozenset(ELEMENTWISE)


class Around(NamedTuple):
    """What is around a program, for those who fill padding.

    Along a cut sequence, zeros by bits need a mask that is sent to all devices.
    """

    is_cut: bool = False  # a mesh cuts arguments
    is_cut_inside: bool = False  # also open axes behind the first one
    is_checked: bool = False  # kernels get rubbish in padding


AROUND_NOTHING = Around()


@dataclass
class _Value:
    """What is known of a value of one logical shape.

    Attributes:
        array: The value, which keeps its `id` from being used again.
        shape: The logical shape.
        exponent: See `bucketjit._masking.constants.PaddingNumber`; None if its padding is not 0.
        is_zeros: Whether it is an array of zeros only.
        fact: What its padding repeats, and where it is zero.
        softmax: What it is of a softmax.
        scores: The value, filled with -inf for a maximum.
        filled: Its filled version in each trace.
    """

    array: Any
    shape: Shape
    exponent: int | None = None
    is_zeros: bool = False
    fact: Fact = NOTHING
    softmax: Softmax | None = None
    scores: Any = None
    filled: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def has_zeros(self) -> bool:
        return self.exponent is not None

    def has_shape(self, shape: Shape) -> bool:
        return self.shape is shape or str(self.shape) == str(shape)


_NOTHING = _Value(None, ())


class Padding:
    """What is known of the padding of the values of a program."""

    def __init__(self, around: Around = AROUND_NOTHING) -> None:
        self.plan, self.around, self.results = Plan(), around, FactsOfResults()
        self._follows_facts = False
        self._values: dict[int, list[_Value]] = {}  # by `id`; one for each logical shape
        self._products: dict[Any, tuple[Any, Any]] = {}  # by what they are of, which is kept
        self._maximum: tuple[JaxprEqn, Any] | None = None  # the latest, and what its rule filled

    def follow_facts(self, plan: Plan) -> None:
        """Follow what padding repeats and where it is zero, too."""
        self._follows_facts, self.plan = True, plan

    def at_other_sizes(self) -> Padding:
        """For a program inside, where the same values have other padding: only zeros stay."""
        inside = Padding(self.around)
        for key, values in self._values.items():
            zeros = [_Value(v.array, v.shape, v.exponent) for v in values if v.has_zeros]
            inside._values[key] = zeros
        return inside

    def _of(self, array: Any, shape: Shape) -> _Value:
        """What is known of a value; not to be changed."""
        for value in self._values.get(id(array), ()):
            if value.has_shape(shape):
                return value
        return _NOTHING

    def _noted(self, array: Any, shape: Shape) -> _Value:
        """What is known of a value, to be added to."""
        if (value := self._of(array, shape)) is _NOTHING:
            value = _Value(array, shape)
            self._values.setdefault(id(array), []).append(value)
        return value

    def note_zeros(self, array: Any, shape: Shape, exponent: int = 0) -> None:
        """Remember that the padding of a value is 0; what is known already stays."""
        if has_zero(array.dtype) and not self._of(array, shape).has_zeros:
            self._noted(array, shape).exponent = exponent

    def holds(self, array: Any, shape: Shape, number: Any) -> bool:
        """Whether the padding of a value is known to hold a number, which only 0 is."""
        return self._of(array, shape).has_zeros and is_zero(number, array.dtype)

    def fact(self, array: Any, shape: Shape) -> Fact:
        """What the padding of a value is known to repeat, and where it is zero."""
        value = self._of(array, shape)
        if not value.has_zeros:
            return value.fact
        of_gradient = {a for a, fills in value.fact.zero.items() if is_of_gradient(fills)}
        zero = {a: MADE if a in of_gradient else CERTAIN for a in open_axes(shape)}
        return Fact(value.fact.repeats, zero)

    def facts(self, arrays: Iterable[Any], atoms: Iterable[Any]) -> list[Fact]:
        """What is known of some values, which stand for these of the program."""
        return list(map(self.fact, arrays, map(shape_of, atoms)))

    def note_fact(self, array: Any, shape: Shape, fact: Fact) -> None:
        """Remember what the padding of a value repeats, and where it is zero."""
        if fact.repeats or fact.zero:
            self._noted(array, shape).fact = fact

    def note_facts(
        self, arrays: Iterable[Any], atoms: Iterable[Any], facts: Iterable[Fact]
    ) -> None:
        """Remember what is known of some values."""
        for array, atom, fact in zip(arrays, atoms, facts, strict=True):
            self.note_fact(array, shape_of(atom), fact)

    def spares_fill(self, eqn: JaxprEqn, array: Any, axes: Sequence[int]) -> bool:
        """Whether an equation sums a value, whose padding adds nothing, along these axes."""
        if name_of(eqn) != "reduce_sum":
            return False
        shape = shape_of(eqn.invars[0])
        zero = self.fact(array, shape).zero
        opened = [a for a in axes if is_symbolic(shape[a])]
        fills = both(*map(zero.get, opened))
        is_exact = fills is not None and fills.isdisjoint(FINITE)
        return is_exact and all(is_at_most(1, shape[a]) for a in opened)

    def is_zeros(self, array: Any, shape: Shape) -> bool:
        """Whether a value is an array of zeros only, as far as it is known."""
        return self._of(array, shape).is_zeros

    def once(self, key: tuple[Any, ...], operands: object, make: Callable[[], Any]) -> Any:
        """What is made of some operands: made for the first in a trace that asks under a key.

        The operands are kept, so that no other ones get their `id`s, which are in the key.
        """
        key = current_trace(), *key
        if key not in self._products and (product := make()) is not None:
            self._products[key] = operands, product
        return self._products.get(key, (None, None))[1]

    def note_filled(
        self, eqn: JaxprEqn, array: Any, shape: Shape, filled: Any, number: Any
    ) -> None:
        """Remember the filled version of an operand of an equation.

        One whose padding is known to be 0 is not replaced by it: later equations may use the zeros,
        and nothing is known of the padding of the latter.
        """
        value = self._noted(array, shape)
        if not value.has_zeros:
            value.filled[current_trace()] = filled
        if _is_number(number) and has_scores(eqn) and float(np.asarray(number)) == -np.inf:
            value.scores, self._maximum = filled, (eqn, filled)

    def operands(self, eqn: JaxprEqn, arrays: list[Any]) -> list[Any]:
        """Replace operands of an elementwise equation by their filled versions."""
        if name_of(eqn) not in _READERS:
            return arrays
        values = [self._of(x, shape_of(v)) for x, v in zip(arrays, eqn.invars, strict=True)]
        if name_of(eqn) == "sub" and values[1].softmax is not None:
            # Less their maximum, scores are -inf in the padding, whatever it held before.
            scores = values[0].scores
            if scores is not None and values[1].softmax.of == id(scores):
                return [scores, arrays[1]]
        trace = current_trace()
        return [v.filled.get(trace, x) for v, x in zip(values, arrays, strict=True)]

    def follow(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Any],
        outs: Sequence[Any],
        *,
        is_plain: bool,
        is_default: bool,
    ) -> None:
        """Note what is known of an output; if it is plain, the primitive itself has computed it."""
        if len(outs) != 1 or not hasattr(outs[0], "dtype"):
            return
        (out,), (var,), name = outs, eqn.outvars, name_of(eqn)
        shape = shape_of(var)
        if name == "broadcast_in_dim" and is_literal(number := eqn.invars[0]):
            self._noted(out, shape).is_zeros = is_zero(number.val, dtype_of(var))
        if is_plain and name in KEEP_ZEROS:
            constants = list(map(self._constant, operands, eqn.invars))
            if (exponent := exponent_of_zeros(eqn, constants)) is not None:
                self.note_zeros(out, shape, exponent)
        softmax = None if self._maximum is None else self._softmax(eqn, operands, out)
        if softmax is not None:
            self._noted(out, shape).softmax = softmax
        fact = NOTHING
        if self._follows_facts and (is_plain or (is_default and name not in _READERS)):
            fact = self.results.of(eqn, self.facts(operands, eqn.invars))
            if not is_plain and self._of(out, shape).has_zeros:
                fact = fact._replace(repeats={})  # the rule has filled operands for these zeros
        self.note_fact(out, shape, with_softmax(fact, softmax, eqn))

    def _constant(self, operand: Any, atom: Any) -> PaddingNumber | None:
        """What is known to be in the padding of an operand; a number is its own padding."""
        if not isinstance(operand, jax.core.Tracer):
            return constant_of(operand, dtype_of(atom)) if _is_number(operand) else None
        exponent = self._of(operand, shape_of(atom)).exponent
        return None if exponent is None else PaddingNumber(np.zeros((), dtype_of(atom)), exponent)

    def _softmax(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> Softmax | None:
        if name_of(eqn) == "reduce_max":
            latest, filled = self._maximum or (None, None)
            ins = [Operand(id(filled) if latest is eqn else None)]
            return softmax_of_result(eqn, ins, id(out))
        softmaxes = [
            self._of(x, shape_of(v)).softmax for x, v in zip(operands, eqn.invars, strict=True)
        ]
        if not any(softmaxes):
            return None
        ins = [
            Operand(id(x), softmax, x if _is_number(x) else None)
            for x, softmax in zip(operands, softmaxes, strict=True)
        ]
        return softmax_of_result(eqn, ins, id(out))


def _is_number(x: Any) -> bool:
    return not isinstance(x, jax.Array) and np.ndim(x) == 0
