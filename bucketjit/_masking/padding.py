"""What the padding of values is known to hold, to spare filling it again.

    x:f32[n]                   arguments are padded with zeros    the padding of x holds 0
    y:f32[n] = mul x x         table: 0 times 0 is exactly 0      the padding of y holds 0
    s:f32[] = reduce_sum y     its rule asks for a fill with 0    the fill returns y unchanged
    z:f32[n] = exp y           not in the table                   nothing is known of z

The interpreter follows this from equation to equation while it evaluates a program. It stages
branches and loops, so there is nothing to join. Masking rules do not know of it: they call
`RuleContext.fill`. A value is looked up by its `id`, as ``==`` of tracers would trace a comparison.
The logical shape is compared too: it determines what is padding, and one array may stand for two
values of different logical shapes (``x`` and ``x[:-1]``). Three facts are followed here, and two
more along each axis: `bucketjit._masking.padding_facts`.

A *constant* in the padding, along every axis. XLA may round differently from NumPy: on CPU it
computes ``a * b + c`` with a single rounding, flushes subnormal numbers to zero, and turns ``x * a
* b`` into ``x * (a * b)``. So floats are followed only where they are small multiples of 1/16,
which no order of operations rounds, and 0 only while the product of its factors stays finite.

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

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from bucketjit._ir.dataflow import ELEMENTWISE
from bucketjit._ir.expressions import Shape, is_symbolic
from bucketjit._ir.ranges import is_at_most
from bucketjit._jax.config import current_trace
from bucketjit._jax.jaxprs import dtype_of, name_of, shape_of
from bucketjit._masking.padding_constants import (
    CHANGES,
    OF_A_SOFTMAX,
    Softmax,
    is_beside,
    is_finite,
    is_lowest,
    is_simple,
    limit,
    reduced,
    spread,
)
from bucketjit._masking.padding_facts import (
    CERTAIN,
    FINITE,
    MADE,
    NOTHING,
    OF_SOFTMAX,
    Fact,
    both,
    fact_of_result,
    is_of_gradient,
    open_axes,
)
from bucketjit._masking.padding_plan import Plan

_MOST_EXPONENT = 2048  # from 2**2048 on, no float holds a power of 2
_READERS = frozenset(ELEMENTWISE)


class _Constant(NamedTuple):
    """The constant in the padding of a value.

    Attributes:
        value: The value, which keeps its `id` from being used again.
        shape: Its logical shape, as text.
        constant: The constant.
        exponent: A product of some of the factors of the value is less than 2 to the power of it.
    """

    value: Any
    shape: str
    constant: np.ndarray
    exponent: int


class Around(NamedTuple):
    """What is around a program, for those who fill padding.

    Along a cut sequence, zeros by bits need a mask that is sent to all devices.
    """

    is_cut: bool = False  # a mesh cuts arguments
    is_cut_inside: bool = False  # also open axes behind the first one
    is_checked: bool = False  # kernels get rubbish in padding


AROUND_NOTHING = Around()


class Padding:
    """What is known of the padding of the values of a program; ``constants`` are known already."""

    def __init__(
        self, constants: dict[int, _Constant] | None = None, around: Around = AROUND_NOTHING
    ) -> None:
        self.plan, self.around = Plan(), around
        self._constants = {} if constants is None else constants
        self._follows_facts = False
        self._facts: dict[int, tuple[Any, str, Fact]] = {}
        self._zeros: dict[int, Any] = {}  # arrays of zeros only, by `id`
        self._made: dict[Any, tuple[Any, Any]] = {}  # by what it was made of, which is kept alive
        self._softmax: dict[int, Softmax] = {}
        self._maximum: tuple[JaxprEqn, Any] | None = None  # the latest, and what its rule filled
        self._filled: dict[tuple[int, Any], tuple[Any, str, Any]] = {}

    def follow_facts(self, plan: Plan) -> None:
        """Follow what padding repeats and where it is zero, too."""
        self._follows_facts, self.plan = True, plan

    def at_other_sizes(self) -> Padding:
        """For a program inside, where the same values have other padding: only constants stay."""
        return Padding(self._constants, self.around)

    def note(self, value: Any, shape: Shape, constant: Any, exponent: int = 0) -> None:
        """Remember that the padding of a value holds a constant, if that is followed.

        The first constant that is noted for a value stays.
        """
        dtype = value.dtype
        if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
            return
        exact = np.asarray(constant)
        with np.errstate(all="ignore"):
            kept = exact.astype(dtype)
        is_exact = np.isfinite(exact).all() and (kept == exact).all()
        if is_exact and is_simple(kept) and exponent < limit(dtype):
            self._constants.setdefault(id(value), _Constant(value, str(shape), kept, exponent))

    def constant_of(self, value: object, shape: Shape) -> np.ndarray | None:
        """The constant in the padding of a value of this logical shape, or None."""
        known = self._constants.get(id(value))
        return known.constant if known is not None and known.shape == str(shape) else None

    def holds(self, value: Any, shape: Shape, constant: Any) -> bool:
        """Whether the padding of a value is known to hold a given constant."""
        kept = self.constant_of(value, shape)
        if kept is None or isinstance(constant, jax.Array) or np.ndim(constant):
            return False
        return kept.tobytes() == np.asarray(constant).astype(kept.dtype).tobytes()

    def fact(self, value: Any, atom: Any) -> Fact:
        """What the padding of a value is known to repeat, and where it is zero."""
        shape = shape_of(atom)
        fact = self._noted(value, shape)
        constant = self.constant_of(value, shape)
        if constant is not None and not constant.tobytes().strip(b"\0"):
            of_gradient = {a for a, fills in fact.zero.items() if is_of_gradient(fills)}
            zero = {a: MADE if a in of_gradient else CERTAIN for a in open_axes(shape)}
            fact = Fact(fact.repeats, zero)
        return fact

    def _noted(self, value: object, shape: Shape) -> Fact:
        """The fact that was noted for a value of this logical shape."""
        _, of, fact = self._facts.get(id(value), (None, None, NOTHING))
        return fact if of == str(shape) else NOTHING

    def facts(self, values: Iterable[Any], atoms: Iterable[Any]) -> list[Fact]:
        """What is known of some values, which stand for these of the program."""
        return list(map(self.fact, values, atoms))

    def note_facts(
        self, values: Iterable[Any], atoms: Iterable[Any], facts: Iterable[Fact]
    ) -> None:
        """Remember what is known of some values."""
        for value, atom, fact in zip(values, atoms, facts, strict=True):
            self.note_fact(value, shape_of(atom), fact)

    def note_fact(self, value: Any, shape: Shape, fact: Fact) -> None:
        """Remember what the padding of a value repeats, and where it is zero."""
        if fact.repeats or fact.zero:
            self._facts[id(value)] = value, str(shape), fact

    def note_fact_of_fill(
        self, value: Any, shape: Shape, filled: Any, axes: Iterable[int], constant: Any
    ) -> None:
        """Note what is known of a value that was filled with a constant along some axes."""
        fact = self._noted(value, shape)
        is_zero = not isinstance(constant, jax.Array) and not np.any(constant)
        along = set(axes).intersection(open_axes(shape))
        zero = {**fact.zero, **dict.fromkeys(along, CERTAIN)} if is_zero else {}
        repeats = {axis: CERTAIN for axis in fact.repeats if axis not in along}
        self.note_fact(filled, shape, Fact(repeats, zero))

    def note_zeroed(self, value: Any, shape: Shape, axes: Iterable[int]) -> None:
        """Note that a planned fill has made zeros of the padding along some axes."""
        fact = self._noted(value, shape)
        self.note_fact(value, shape, Fact(fact.repeats, {**fact.zero, **dict.fromkeys(axes, MADE)}))

    def note_repeating(self, value: Any, shape: Shape, filled: Any, axis: int) -> None:
        """Note what is known of a value that was filled with slice 0 along an axis."""
        fact = self._noted(value, shape)
        zero = {a: fills for a, fills in fact.zero.items() if a != axis}
        self.note_fact(filled, shape, Fact({**fact.repeats, axis: CERTAIN}, zero))

    def spares_fill(self, eqn: JaxprEqn, value: Any, axes: Sequence[int]) -> bool:
        """Whether an equation sums a value, whose padding adds nothing, along these axes."""
        if name_of(eqn) != "reduce_sum":
            return False
        shape = shape_of(eqn.invars[0])
        zero = self.fact(value, eqn.invars[0]).zero
        opened = [a for a in axes if is_symbolic(shape[a])]
        fills = both(*map(zero.get, opened))
        is_exact = fills is not None and fills.isdisjoint(FINITE)
        return is_exact and all(is_at_most(1, shape[a]) for a in opened)

    def is_zeros(self, value: object) -> bool:
        """Whether a value is an array of zeros only, as far as it is known."""
        return id(value) in self._zeros

    def made_before(self, key: tuple[Any, ...] | None) -> Any:
        """What was made of a value in this trace, under this key, or None."""
        return None if key is None else self._made.get((current_trace(), *key), (None, None))[1]

    def note_made(self, key: tuple[Any, ...] | None, value: object, made: object) -> None:
        """Remember what was made of a value, so that it is made once in a trace."""
        if key is not None:
            self._made[current_trace(), *key] = value, made

    def note_filled(self, value: object, shape: Shape, filled: object) -> None:
        """Remember the filled version of a value.

        One whose padding holds a known constant is not replaced by it: later equations may use the
        constant, and nothing is known of the padding of the latter.
        """
        if self.constant_of(value, shape) is None:
            self._filled[id(value), current_trace()] = value, str(shape), filled

    def note_scores(
        self,
        eqn: JaxprEqn,
        operand: Any,
        filled: Any,
        shape: Shape,
        axes: Iterable[int],
        value: Any,
    ) -> None:
        """Remember the operand of a maximum, which was filled with -inf."""
        is_maximum = name_of(eqn) == "reduce_max" and jnp.issubdtype(filled.dtype, jnp.floating)
        has_some = all(is_at_most(1, shape[axis]) for axis in axes)
        if is_maximum and has_some and is_lowest(value):
            scores = Softmax(filled, str(shape), frozenset(axes), "scores", operand)
            self._softmax[id(filled)], self._maximum = scores, (eqn, filled)

    def operands(self, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Replace operands of an elementwise equation by their filled versions."""
        if name_of(eqn) == "sub" and (peak := self._softmax.get(id(values[1]))) is not None:
            # Less their maximum, scores are -inf in the padding, whatever it held before.
            match self._softmax.get(id(peak.of)):
                case Softmax(scores, own, _, "scores", of) if of is values[0]:
                    if own == str(shape_of(eqn.invars[0])):
                        return [scores, values[1]]
        if not self._filled or name_of(eqn) not in _READERS:
            return values
        found = []
        for value, atom in zip(values, eqn.invars, strict=True):
            _, shape, filled = self._filled.get((id(value), current_trace()), (None, None, None))
            found.append(filled if shape == str(shape_of(atom)) else value)
        return found

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
        if name_of(eqn) == "broadcast_in_dim":
            number = getattr(eqn.invars[0], "val", None)  # of a literal
            if number is not None and not np.asarray(number).tobytes().strip(b"\0"):
                self._zeros[id(outs[0])] = outs[0]
        if is_plain and name_of(eqn) in CHANGES and hasattr(outs[0], "dtype"):
            self._follow_constant(eqn, operands, outs[0])
        zero: Iterable[int] = ()
        if self._softmax and name_of(eqn) in OF_A_SOFTMAX:
            found = self._softmax_of(eqn, operands, outs[0])
            if found is not None:
                shape = str(shape_of(eqn.outvars[0]))
                self._softmax[id(outs[0])] = found._replace(value=outs[0], shape=shape)
                zero = found.axes if found.what == "zeros" else ()
        if len(outs) != 1:
            return
        fact = NOTHING
        if self._follows_facts and (is_plain or (is_default and name_of(eqn) not in _READERS)):
            ins = [self.fact(x, v) for x, v in zip(operands, eqn.invars, strict=True)]
            fact = fact_of_result(eqn, ins)
            if not is_plain and self.constant_of(outs[0], shape_of(eqn.outvars[0])) is not None:
                fact = fact._replace(repeats={})  # the rule has filled operands for that constant
        axes = set(zero).intersection(open_axes(shape_of(eqn.outvars[0]))) if zero else ()
        more = dict.fromkeys(axes, OF_SOFTMAX)
        self.note_fact(outs[0], shape_of(eqn.outvars[0]), fact._replace(zero={**fact.zero, **more}))

    # --- constants ---

    def _follow_constant(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> None:
        constants = [self._constant(v, x) for v, x in zip(eqn.invars, operands, strict=True)]
        if any(c is None for c in constants):
            return
        constant = CHANGES[name_of(eqn)](eqn, constants)
        if constant is None:
            return
        exponents = [self._exponent(x, c) for x, c in zip(operands, constants, strict=True)]
        if name_of(eqn) in ("square", "integer_pow"):
            exponents *= min(eqn.params.get("y", 2), _MOST_EXPONENT)
        is_product = name_of(eqn) in ("mul", "square", "integer_pow")
        exponent = sum(exponents) if is_product else max(exponents)
        self.note(out, shape_of(eqn.outvars[0]), constant, exponent)

    def _constant(self, var: Any, operand: Any) -> Any:
        """The constant in the padding of an operand; a scalar constant is its own padding."""
        if isinstance(operand, jax.core.Tracer):
            return self.constant_of(operand, shape_of(var))
        if isinstance(operand, jax.Array) or np.ndim(operand):
            return None
        return np.asarray(operand, dtype_of(var))

    def _exponent(self, operand: object, constant: np.ndarray) -> int:
        known = self._constants.get(id(operand))
        if known is not None:
            return known.exponent
        is_float = jnp.issubdtype(constant.dtype, jnp.inexact)
        return max(0, int(np.frexp(float(np.abs(constant)))[1])) if is_float else 0

    # --- softmaxes ---

    def _softmax_of(self, eqn: JaxprEqn, operands: Sequence[Any], out: Any) -> Softmax | None:
        name = name_of(eqn)
        one, two = [*(self._softmax.get(id(x)) for x in operands), None][:2]
        what, other = (None if x is None else x.what for x in (one, two))
        if name == "reduce_max":
            latest, filled = self._maximum or (None, None)
            return reduced(eqn, filled) if latest is eqn else None
        if name == "max":  # of a value and -inf, which `jax.nn.softmax` takes
            if other == "reduced" and is_lowest(operands[0]):
                return two
            return one if what == "reduced" and is_lowest(operands[1]) else None
        if name == "select_n":  # `logsumexp` takes 0 for a maximum that is infinite
            # A sum must not become 0, as it is a divisor.
            known = [k for x in operands[1:] if (k := self._softmax.get(id(x))) is not None]
            others = [x for x in operands[1:] if id(x) not in self._softmax]
            if len(known) != 1 or known[0].what != "reduced" or not all(map(is_finite, others)):
                return None
            of = self._softmax.get(id(known[0].of))
            is_maximum = of is not None and of.what == "scores"
            is_divisor = all(np.any(np.asarray(x).astype(known[0].of.dtype)) for x in others)
            return known[0] if is_maximum or is_divisor else None
        if one is None:
            return None
        if name == "reduce_sum":
            is_whole = what == "zeros" and one.axes == set(eqn.params["axes"])
            return reduced(eqn, one.of) if is_whole else None
        if name == "exp":
            return one._replace(what="zeros", of=out) if what == "shifted" else None
        if name in ("sub", "div"):
            before, after = ("scores", "shifted") if name == "sub" else ("zeros", "zeros")
            if two is None or two.axes != one.axes or (what, other) != (before, "reduced"):
                return None
            source = operands[0] if name == "sub" else one.of
            return one._replace(what=after, of=out) if is_beside(two, source, out.ndim) else None
        if name == "convert_element_type":  # halves are summed as floats
            # In another dtype than that of the exponentials, a sum may round to 0.
            if what == "reduced":
                summed = self._softmax.get(id(one.of))
                is_back = summed is not None and summed.what == "zeros"
                return one if is_back and out.dtype == one.of.dtype else None
            widest = jnp.promote_types(operands[0].dtype, out.dtype)
            return one if what == "zeros" and widest == out.dtype else None
        if what != "reduced":
            return None
        return spread(eqn, one) if name == "broadcast_in_dim" else one
