"""Facts by which sums over padding need no fill: it repeats real data, or it is zero.

    x:f32[n]            filled with its first element       the padding of x repeats x[0]
    y:f32[n] = exp x    any elementwise operation           the padding of y repeats y[0]
    g:f32[n]            filled with zeros                   the padding of g is zero
    h:f32[n] = mul g y  0 times y[0]                        the padding of h is zero
    w = dot_general y h   y[0] times 0                      needs no fill

Two facts are followed along each open axis. In an array that *repeats*, each padded slice equals
slice 0. In an array that is *zero*, each padded element is 0, or it is not finite, and then the
element of slice 0 is not finite either. Such padding can change no sum that has the elements of
slice 0 among its terms: where it adds anything but 0, the sum is NaN or infinite without it, too.
Slice 0 must be real: the axis has at least one real position.

It may be NaN in place of infinity. So contractions take such padding as it is, and sums do not: a
log-likelihood may well be -inf. Zeros that something not finite would change depend on `FINITE`,
those that were divided on `DIVIDED` as well, and those of a softmax, which is NaN as a whole or
nowhere, on `OF_SOFTMAX`.

A fact may depend on fills that are only planned; see `bucketjit._masking.padding_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from bucketjit._ir import dataflow
from bucketjit._ir.dataflow import ELEMENTWISE, REMOVES, TOUCHES, kept_axes, product_axes
from bucketjit._ir.expressions import Shape, is_symbolic
from bucketjit._jax.jaxprs import Atom, dtype_of, is_literal, name_of, shape_of


class Condition(NamedTuple):
    """What a fact depends on: a planned fill, or a property of the data.

    Attributes:
        where: The `id` of the equation, or the number of the argument, that is filled; the
            property, as a text.
        axis: The axis along which a planned fill repeats slice 0; None for a fill with 0 along all
            axes that need it.
    """

    where: int | str
    axis: int | None = None

    @property
    def cost(self) -> int:
        """How many fills with 0 it is worth."""
        if isinstance(self.where, str):
            return 0
        return 1 if self.axis is None else COST_OF_REPEATING


COST_OF_REPEATING = 2  # fills with 0, each of which may need an array of zeros

Fills = frozenset[Condition]
CERTAIN: Fills = frozenset()
FINITE: Fills = frozenset((Condition("slice 0 is finite"),))
MADE: Fills = frozenset((Condition("a planned fill has made the zeros"),))
OF_SOFTMAX: Fills = frozenset((Condition("a softmax is not NaN as a whole"),))
DIVIDED: Fills = frozenset((Condition("no divisor is 0"),))


def is_of_gradient(zero: Fills | None) -> bool:
    """Whether zeros are those of a planned fill, or were multiplied by what is not known.

    A gradient begins with such a fill. Zeros of arguments are not of this kind.
    """
    return zero is not None and any(condition.axis is None for condition in zero - OF_SOFTMAX)


class Fact(NamedTuple):
    """What the padding of an array holds: axes, each with the fills that this depends on.

    Attributes:
        repeats: The axes along which it repeats slice 0.
        zero: The axes along which it is zero.
    """

    repeats: Mapping[int, Fills] = {}
    zero: Mapping[int, Fills] = {}

    def fills(self, axis: int) -> Fills | None:
        """The fewest fills with which it repeats or is zero along an axis; None if neither."""
        return fewest(self.repeats.get(axis), self.zero.get(axis))

    def is_known_along(self, axes: Iterable[int]) -> bool:
        """Whether it repeats or is zero along each of these axes, whatever fills that takes."""
        return all(axis in self.repeats or axis in self.zero for axis in axes)

    def with_zeros(self, axes: Iterable[int], fills: Fills) -> Fact:
        """What holds where zeros are found along some axes besides."""
        return self._replace(zero={**self.zero, **dict.fromkeys(axes, fills)})

    def zeroed(self, axes: Set[int], fills: Fills) -> Fact:
        """What holds after a fill with 0 along some axes."""
        repeats = {axis: held for axis, held in self.repeats.items() if axis not in axes}
        return self._replace(repeats=repeats).with_zeros(axes, fills)

    def repeating(self, axes: Mapping[int, Fills]) -> Fact:
        """What holds after a fill with slice 0 along some axes."""
        zero = {axis: fills for axis, fills in self.zero.items() if axis not in axes}
        return Fact({**self.repeats, **axes}, zero)

    def joined(self, fact: Fact) -> Fact:
        """What holds of two arrays."""
        pairs = zip(self, fact, strict=True)
        return Fact(*({axis: a[axis] | b[axis] for axis in a.keys() & b.keys()} for a, b in pairs))

    def moved(self, by: int) -> Fact:
        """What holds where each axis is ``by`` axes further back; those before the first go."""
        return Fact(*({a + by: f for a, f in kind.items() if a + by >= 0} for kind in self))

    def includes(self, fact: Fact) -> bool:
        """Whether all that ``fact`` says holds, on no other conditions."""
        return all(
            axis in held and MADE & fills <= held[axis] <= fills
            for held, expected in zip(self, fact, strict=True)
            for axis, fills in expected.items()
        )


NOTHING = Fact()


def open_axes(shape: Shape) -> tuple[int, ...]:
    """The axes of symbolic size."""
    return tuple([i for i, dim in enumerate(shape) if is_symbolic(dim)])


def both(*needed: Fills | None) -> Fills | None:
    """All fills that are needed; None if one of them is None."""
    return None if None in needed else CERTAIN.union(*filter(None, needed))


def fewest(*possible: Fills | None) -> Fills | None:
    """The smallest of these sets of fills; None if all are None."""
    return min([fills for fills in possible if fills is not None], key=len, default=None)


# What is known of an operand along an axis: where it repeats, and where it is zero.
_Along = tuple[Fills | None, Fills | None]


def _source(atom: Atom, axis: int | None) -> int | _Along:
    """An axis of an operand; what is known of one that is static, or that it does not have."""
    shape = shape_of(atom)
    if axis is None or not shape:
        is_zero = is_literal(atom) and not np.any(atom.val)
        return CERTAIN, CERTAIN if is_zero else None
    return axis if is_symbolic(shape[axis]) else (CERTAIN, None)


Axes = Sequence[int | None]
Held = Sequence[Fills | None]  # of each operand
# By an equation, and where its operands are zero and where they repeat, along one axis of each.
Zero = Callable[[JaxprEqn, Held, Held], Fills | None]


# --- which axes of the operands a result has -----------------------------------------------------


def _carried(eqn: JaxprEqn) -> Iterator[tuple[int, Axes]]:
    """The axes of the operands that a result has; new ones repeat."""
    kept, rank = kept_axes(eqn), len(shape_of(eqn.invars[0]))
    is_new = name_of(eqn) == "broadcast_in_dim"
    for axis in range(len(shape_of(eqn.outvars[0]))):
        if axis in kept or is_new:
            yield axis, [kept.get(axis) if len(shape_of(v)) == rank else None for v in eqn.invars]


def _elementwise(eqn: JaxprEqn) -> Iterator[tuple[int, Axes]]:
    for axis in range(len(shape_of(eqn.outvars[0]))):
        yield axis, [axis] * len(eqn.invars)


def _iota(eqn: JaxprEqn) -> Iterator[tuple[int, Axes]]:
    for axis in range(len(shape_of(eqn.outvars[0]))):
        if axis != eqn.params["dimension"]:
            yield axis, ()


def _convolution(eqn: JaxprEqn) -> Iterator[tuple[int, Axes]]:
    """The batch is that of the data, and the features are those of the kernel."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    if str(params["batch_group_count"]) == "1":
        yield numbers.out_spec[0], (numbers.lhs_spec[0], None)
    if str(params["feature_group_count"]) == "1":
        yield numbers.out_spec[1], (None, numbers.rhs_spec[0])


def _gather(eqn: JaxprEqn) -> Iterator[tuple[int, Axes]]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, indices = (shape_of(v) for v in eqn.invars)
    batch = numbers.operand_batching_dims
    pairs = dict(zip(numbers.start_indices_batching_dims, batch, strict=True))
    single = {*numbers.collapsed_slice_dims, *batch}
    of_window = iter(sorted(set(range(len(shape))) - single))
    of_rows = iter(range(len(indices) - 1))
    for axis in range(len(shape_of(eqn.outvars[0]))):
        if axis in numbers.offset_dims:
            source = next(of_window)
            if str(sizes[source]) == str(shape[source]):
                yield axis, (source, None)
        else:
            row = next(of_rows)
            yield axis, (pairs.get(row), row)


def _scatter(eqn: JaxprEqn) -> Iterator[tuple[int, Axes]]:
    numbers = eqn.params["dimension_numbers"]
    shape, _, updates = (shape_of(v) for v in eqn.invars)
    of_window = iter(numbers.update_window_dims)
    rows = [u for u in range(len(updates)) if u not in numbers.update_window_dims]
    batch = numbers.scatter_indices_batching_dims
    pairs = dict(zip(numbers.operand_batching_dims, batch, strict=True))
    for axis, dim in enumerate(shape):
        if axis in pairs:
            # Of unique indices, those of padded rows are dropped.
            if not eqn.params["unique_indices"]:
                yield axis, (axis, pairs[axis], rows[pairs[axis]])
        elif axis not in numbers.inserted_window_dims:
            source = next(of_window)
            if str(updates[source]) == str(dim):
                yield axis, (axis, None, source)


def _left_zero(eqn: JaxprEqn, operand: Fact) -> dict[int, Fills]:
    """Where the operand of a scatter stays zero: nothing is written to padded positions."""
    numbers = eqn.params["dimension_numbers"]
    inserted = set(numbers.inserted_window_dims) - set(numbers.operand_batching_dims)
    adds = name_of(eqn) in ("scatter-add", "scatter-sub")
    return {
        axis: fills
        for axis, fills in operand.zero.items()
        # Slice 0 may be overwritten.
        if axis in inserted and (adds or fills.isdisjoint(FINITE | OF_SOFTMAX))
    }


# --- where a result is zero -------------------------------------------------------------------


def _first(eqn: JaxprEqn, zero: Held, repeats: Held) -> Fills | None:
    """Linear in the first operand; the others, if any, are numbers."""
    return zero[0] if zero else None


def _converted(eqn: JaxprEqn, zero: Held, repeats: Held) -> Fills | None:
    kinds = [dtype_of(v) for v in (*eqn.invars, *eqn.outvars)]
    exact = all(jnp.issubdtype(k, jnp.inexact) and k.name != "float8_e8m0fnu" for k in kinds)
    return zero[0] if exact else None


def _product(eqn: JaxprEqn, zero: Held, repeats: Held) -> Fills | None:
    if zero[0] is None and zero[1] is None:
        return None
    left, right = map(_finite, eqn.invars)
    return fewest(both(zero[0], repeats[1], right), both(zero[1], repeats[0], left), both(*zero))


def _finite(atom: Atom) -> Fills:
    """What has to hold for a factor to be finite."""
    return CERTAIN if is_literal(atom) and np.all(np.isfinite(atom.val)) else FINITE


def _scattered(eqn: JaxprEqn, zero: Held, repeats: Held) -> Fills | None:
    zeros = both(zero[0], zero[2])
    is_exact = zeros is not None and zeros.isdisjoint(FINITE | OF_SOFTMAX)
    # What is not finite is written where the indices say: they must be those of slice 0.
    return zeros if is_exact else both(zeros, repeats[1])


def _quotient(eqn: JaxprEqn, zero: Held, repeats: Held) -> Fills | None:
    divisor, dtype = eqn.invars[1], dtype_of(eqn.outvars[0])
    if zero[0] is None or not jnp.issubdtype(dtype, jnp.floating):  # of integers, 0 / 0 is -1
        return None
    is_certain = is_literal(divisor) and np.all(np.abs(divisor.val) >= jnp.finfo(dtype).tiny)
    return both(zero[0], repeats[1], CERTAIN if is_certain else FINITE | DIVIDED)


_ZERO: Mapping[str, Zero] = dataflow.table(
    {
        "neg copy stop_gradient abs square reduce_precision": _first,
        "convert_element_type": _converted,
        "integer_pow": lambda eqn, zero, _: zero[0] if eqn.params["y"] > 0 else None,
        "add add_any sub concatenate pad": lambda eqn, zero, _: both(*zero),
        "mul": _product,
        "dot_general conv_general_dilated": _product,
        "div": _quotient,
        "select_n": lambda eqn, zero, repeats: both(repeats[0], *zero[1:]),
        "transpose squeeze broadcast_in_dim reshape rev slice dynamic_slice": _first,
        "reduce_sum cumsum": _first,
        "scatter scatter-add scatter-sub": _scattered,
        "dynamic_update_slice": lambda eqn, zero, _: both(*zero[:2]),
    }
)
_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
# The axes of the operands that each axis of a result comes from.
_AXES: Mapping[str, Callable[[JaxprEqn], Iterable[tuple[int, Axes]]]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys((*REMOVES, *TOUCHES, "transpose", "broadcast_in_dim", "reshape"), _carried),
    **dict.fromkeys(("pad", "slice", "dynamic_slice", "dynamic_update_slice"), _carried),
    **dict.fromkeys(_SCATTERS, _scatter),
    "dot_general": lambda eqn: enumerate(product_axes(eqn)),
    **{"conv_general_dilated": _convolution, "gather": _gather, "iota": _iota},
}


class Reading(NamedTuple):
    """What is read of an equation to find the facts about its result.

    Attributes:
        eqn: The equation, which is kept so that no other one gets its `id`.
        opened: The open axes of each operand.
        is_open: Whether an operand or a result has one.
        sources: Each open axis of the result, with what it comes from in each operand.
    """

    eqn: JaxprEqn
    opened: list[tuple[int, ...]]
    is_open: bool
    sources: list[tuple[int, list[int | _Along]]]


class FactsOfResults:
    """The facts about the results of equations that are masked by their rules.

    Facts are followed several times, and each equation is read once.
    """

    def __init__(self) -> None:
        self._readings: dict[int, Reading] = {}  # by `id` of the equation

    def read(self, eqn: JaxprEqn) -> Reading:
        """Read an equation."""
        if id(eqn) not in self._readings:
            opened = [open_axes(shape_of(atom)) for atom in eqn.invars]
            outs = [open_axes(shape_of(var)) for var in eqn.outvars]
            has_axes = len(outs) == 1 and outs[0] and name_of(eqn) in _AXES
            axes = _AXES[name_of(eqn)](eqn) if has_axes else ()
            sources = [(i, [*map(_source, eqn.invars, of)]) for i, of in axes if i in outs[0]]
            self._readings[id(eqn)] = Reading(eqn, opened, any(opened) or any(outs), sources)
        return self._readings[id(eqn)]

    def of(self, eqn: JaxprEqn, ins: Sequence[Fact]) -> Fact:
        """The fact about the result of an equation, by those about its operands."""
        repeats, zeros, name = {}, {}, name_of(eqn)
        zero_of = _ZERO.get(name)
        for axis, sources in self.read(eqn).sources:
            along = [
                source
                if isinstance(source, tuple)
                else (fact.repeats.get(source), fact.zero.get(source))
                for fact, source in zip(ins, sources, strict=True)
            ]
            repeated, zero = [a[0] for a in along], [a[1] for a in along]
            if (fills := both(*repeated)) is not None:
                repeats[axis] = fills
            if zero_of is not None and (fills := zero_of(eqn, zero, repeated)) is not None:
                zeros[axis] = fills
        if name in _SCATTERS and len(eqn.outvars) == 1:
            zeros |= _left_zero(eqn, ins[0])
        return Fact(repeats, zeros)
