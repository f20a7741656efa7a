"""Where a few fills spare many: planned for a program before it is masked.

    before   w = dot_general (fill x) (fill h)       after   x' = x, its padding repeats x[0]
             v = dot_general (fill y) (fill g)               c' = fill c
             c = broadcast 1.0                               w = dot_general x h
             g, h = ...                                      v = dot_general y g

The gradient of a sum begins with a number that is broadcast along the axes of the sum. If its
padding is zero, so is that of all cotangents, as an expert's mask on the loss has it, and
contractions with values whose padding repeats need no fill. `bucketjit._masking.padding_facts` says
why, and the interpreter follows the facts again on what it has filled. A plan only says where to
fill, and a bad one costs fills. It counts them: arguments repeat, and values are filled where they
are made, only if that takes fewer operations in all.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from bucketjit._ir import dataflow
from bucketjit._ir.dataflow import Analysis
from bucketjit._ir.expressions import Shape, is_symbolic
from bucketjit._ir.ranges import is_at_most
from bucketjit._jax.jaxprs import Atom, dtype_of, name_of, open_jaxpr, scan_arity, shape_of
from bucketjit._masking.padding_facts import (
    CERTAIN,
    COST_OF_REPEATING,
    DIVIDED,
    FINITE,
    MADE,
    NOTHING,
    OF_SOFTMAX,
    Condition,
    Fact,
    FactsOfResults,
    Fills,
    both,
    fewest,
    is_of_gradient,
    open_axes,
)
from bucketjit._masking.softmaxes import Operand, softmax_of_result, with_softmax

_MOST_ARGUMENTS = 4  # that are left out one by one


class Plan(NamedTuple):
    """Where to fill: the axes of each equation, by `id`, and of each argument, by its number.

    Attributes:
        repeated: The axes along which a result or an argument is to repeat slice 0.
        zeroed: The axes along which a result is to be 0.
        attended: The sizes that meet in an attention: those of the axes of a softmax's results over
            which a product sums, and those that it keeps.
    """

    repeated: Mapping[int, frozenset[int]] = {}
    zeroed: Mapping[int, frozenset[int]] = {}
    attended: frozenset[str] = frozenset()


_plans: weakref.WeakKeyDictionary[Jaxpr, Plan] = weakref.WeakKeyDictionary()


def planned(jaxpr: Jaxpr, results: FactsOfResults | None = None) -> Plan:
    """The plan of a program whose arguments are padded with zeros; made once for each program."""
    if jaxpr not in _plans:
        _plans[jaxpr] = _planned(jaxpr, results or FactsOfResults())
    return _plans[jaxpr]


def _planned(jaxpr: Jaxpr, results: FactsOfResults) -> Plan:
    count = _counted(jaxpr, Plan(), results)
    least = without = count.cost
    best = Plan(attended=frozenset(count.attended))
    if without <= COST_OF_REPEATING:
        return best
    counted: set[Fills] = set()
    padded = [i for i, var in enumerate(jaxpr.invars) if open_axes(shape_of(var))]
    left_out = [None, *(padded if 1 < len(padded) <= _MOST_ARGUMENTS else [])]
    for everywhere, argument in itertools.product((False, True), left_out):
        asked = _Count(None, results, everywhere, argument)
        asked.follow(jaxpr)
        chosen = _chosen(asked.wanted)
        repeated: dict[int, frozenset[int]] = {}
        for where, axis in chosen:
            if isinstance(where, int) and axis is not None:
                repeated[where] = repeated.get(where, frozenset()) | {axis}
        zeroed = {where: axes for where, axes in asked.places.items() if Condition(where) in chosen}
        plan = Plan(repeated, zeroed, best.attended)
        cost = sum(fill.cost for fill in chosen)
        if cost == 0 or cost >= least or chosen in counted:
            continue
        counted.add(chosen)
        if (cost := cost + _counted(jaxpr, plan, results).cost) < least:
            least, best = cost, plan
        if 2 * least <= without:  # each candidate takes as long as masking the program
            break
    return best


def _counted(jaxpr: Jaxpr, plan: Plan, results: FactsOfResults) -> _Count:
    """How many fills contractions and sums take with a plan."""
    count = _Count(plan, results)
    count.follow(jaxpr)
    return count


# The sets of planned fills that would spare fills of an equation, and how many.
Ways = Sequence[tuple[Fills, int]]


def _chosen(wanted: Sequence[Ways]) -> Fills:
    """The fills that spare more than they cost; of all, those that do not are left out in turn."""
    chosen = CERTAIN.union(*(way for ways in wanted for way, _ in ways))
    while chosen:
        spared, worth = 0, dict.fromkeys(chosen, 0)
        for ways in wanted:
            possible = [(way, n) for way, n in ways if way <= chosen]
            best = max((n for _, n in possible), default=0)
            spared += best
            for fill in CERTAIN.union(*(way for way, _ in possible)):
                worth[fill] += best - max((n for way, n in possible if fill not in way), default=0)
        least = min(chosen, key=lambda fill: worth[fill] - fill.cost)
        if worth[least] > least.cost:
            return chosen if spared > sum(fill.cost for fill in chosen) else CERTAIN
        chosen -= {least}
    return CERTAIN


def facts_of_loop(
    eqn: JaxprEqn, ins: Sequence[Fact], plan: Plan, results: FactsOfResults
) -> list[Fact]:
    """What holds of the values that a ``scan`` carries, in each turn."""
    outs = dataflow.through(_Count(plan, results), eqn, list(map(_Guess, ins)))
    return [guess.fact for guess in outs[: scan_arity(eqn.params)[1]]]


def summed_pairs(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """The open axes of two operands along which an equation sums their products."""
    if name_of(eqn) == "dot_general":
        pairs = [*zip(*eqn.params["dimension_numbers"][0], strict=True)]
    elif name_of(eqn) == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        pairs = [(numbers.lhs_spec[1], numbers.rhs_spec[1])]
    else:
        return []
    shape = shape_of(eqn.invars[0])
    return [pair for pair in pairs if is_symbolic(shape[pair[0]])]


def _zero_in_products(fact: Fact, axes: Iterable[int]) -> Fills | None:
    """The fills with which a contraction along these axes may take zeros as they are.

    Divided by 0, finite numbers are infinite, and zeros NaN. That is accepted in a gradient alone,
    of which an axis has the zeros of a planned fill.
    """
    zero = both(*map(fact.zero.get, axes))
    if zero is None or zero.isdisjoint(DIVIDED):
        return zero
    return zero if any(z - FINITE - DIVIDED - OF_SOFTMAX for z in fact.zero.values()) else None


def fills_of_product(
    shapes: Sequence[Shape], pairs: Sequence[tuple[int, int]], facts: Sequence[Fact]
) -> tuple[bool, bool]:
    """Which of two arrays to fill before their products are summed along pairs of open axes.

    One of zeros is not filled, and neither is the other one if it repeats and the zeros are those
    of a gradient. Otherwise what repeats may not be finite, and zeros times it are not zero.
    """
    if not all(is_at_most(1, shapes[0][a]) for a, _ in pairs):
        return True, True
    zeros = [_zero_in_products(fact, (p[i] for p in pairs)) for i, fact in enumerate(facts)]
    left, right = (zero is None for zero in zeros)
    if left != right:
        held = [fact.fills(p[i]) for i, fact in enumerate(facts) for p in pairs]
        is_spared = is_of_gradient(zeros[left]) and None not in held
        return (False, False) if is_spared else (left, right)
    return left, right


class _Guess(NamedTuple):
    """What the padding of an array may hold, and what it is of a softmax.

    Attributes:
        fact: What its padding holds.
        operand: What it is of a softmax.
    """

    fact: Fact = NOTHING
    operand: Operand = Operand()


class _Count(Analysis[_Guess]):
    """Counts the fills of contractions and sums with a plan; without, finds what would spare them.

    Args:
        plan: The plan, or None.
        results: The facts about results.
        left_out: The number of an argument that is not to repeat, and then no result is.
        everywhere: Whether fills with 0 may be planned for all that is computed with what they
            make zero, or only where numbers are broadcast.

    Attributes:
        cost: How many there are.
        wanted: The ways to spare those of each equation.
        places: The axes along which a planned fill with 0 has to be.
        attended: See `Plan`.
    """

    def __init__(
        self,
        plan: Plan | None,
        results: FactsOfResults,
        everywhere: bool = False,
        left_out: int | None = None,
    ) -> None:
        self._plan, self._everywhere, self._left_out = plan, everywhere, left_out
        self._results = results
        self.cost = 0
        self.wanted: list[Ways] = []
        self.places: dict[int, frozenset[int]] = {}
        self.attended: set[str] = set()
        self.table = {"scan": self._scan, **dict.fromkeys(("while", "cond"), self.default)}
        self._is_settling = False

    def follow(self, jaxpr: Jaxpr) -> None:
        """Count in a program whose arguments are padded with zeros."""
        arguments = []
        for i, var in enumerate(jaxpr.invars):
            fact = Fact({}, dict.fromkeys(open_axes(shape_of(var)), CERTAIN))
            arguments.append(_Guess(self._repeated(i, var, fact), Operand(i)))
        dataflow.follow(self, jaxpr, arguments)

    def unknown(self, atom: Atom) -> _Guess:
        return _Guess()

    def literal(self, atom: Literal) -> _Guess:
        return _Guess(operand=Operand(number=atom.val))

    def default(self, eqn: JaxprEqn, ins: Sequence[_Guess]) -> Sequence[_Guess]:
        reading, key = self._results.read(eqn), id(eqn)
        if not reading.is_open:
            return [_Guess()] * len(eqn.outvars)
        facts = [guess.fact for guess in ins]
        self._count(eqn, facts)
        softmax = softmax_of_result(eqn, [guess.operand for guess in ins], key)
        fact = with_softmax(self._results.of(eqn, facts), softmax, eqn)
        is_known = all(map(Fact.is_known_along, facts, reading.opened))
        operand = Operand(key, softmax)
        if name_of(eqn) == "transpose":
            order = ins[0].operand.order or range(len(eqn.params["permutation"]))
            axes = tuple(order[i] for i in eqn.params["permutation"])
            operand = Operand(ins[0].operand.key, softmax, order=axes)
        outs = [_Guess(fact, operand)] * len(eqn.outvars)
        return self._filled(eqn, facts, outs, is_known)

    def join(self, one: _Guess, other: _Guess) -> _Guess:
        operand = one.operand if one.operand == other.operand else Operand()
        return _Guess(one.fact.joined(other.fact), operand)

    def row(self, value: _Guess, var: Var) -> _Guess:
        return _Guess(value.fact.moved(-1))

    def stacked(self, value: _Guess, var: Var) -> _Guess:
        return _Guess(value.fact.moved(1))

    def _scan(self, eqn: JaxprEqn, ins: Sequence[_Guess]) -> Sequence[_Guess]:
        """The turns until facts settle count for nothing; then one counts."""
        before, self._is_settling = self._is_settling, True
        outs = dataflow.through(self, eqn, ins)
        self._is_settling = before
        body = open_jaxpr(eqn.params["jaxpr"])[0]
        consts, carries = scan_arity(eqn.params)
        rows = map(self.row, ins[consts + carries :], body.invars[consts + carries :])
        dataflow.follow(self, body, [*ins[:consts], *outs[:carries], *rows])
        return self._filled(eqn, [guess.fact for guess in ins], outs, True)

    def _filled(
        self, eqn: JaxprEqn, ins: Sequence[Fact], outs: Sequence[_Guess], is_known: bool
    ) -> list[_Guess]:
        """The results of an equation after planned fills, or with those that may be planned."""
        repeats = is_known and (self._plan is not None or self._left_out is None)
        filled = []
        for var, (fact, operand) in zip(eqn.outvars, outs, strict=True):
            fact = self._repeated(id(eqn), var, fact) if repeats else fact
            filled.append(_Guess(self._zeroed(eqn, var, fact, ins), operand))
        return filled

    def _repeated(self, where: int, var: Var, fact: Fact) -> Fact:
        """A fact after a planned fill with slice 0, or with those that may be planned."""
        if self._plan is not None and where not in self._plan.repeated:
            return fact
        axes = set(open_axes(shape_of(var)))
        if self._plan is not None:
            return fact.repeating(dict.fromkeys(self._plan.repeated[where] & axes, CERTAIN))
        is_argument = fact.zero.keys() == axes and not fact.repeats
        dims = shape_of(var)
        # Nothing may be planned that takes both what an array repeats and that it is zero.
        return fact.repeating(
            {
                axis: frozenset((Condition(where, axis),))
                for axis in axes
                if (is_argument or not fact.is_known_along((axis,)))
                and where != self._left_out
                and is_at_most(1, dims[axis])
                and not jax.dtypes.issubdtype(dtype_of(var), jax.dtypes.extended)
            }
        )

    def _zeroed(self, eqn: JaxprEqn, var: Var, fact: Fact, ins: Sequence[Fact]) -> Fact:
        """A fact after a planned fill with 0, or with those that may be planned."""
        if self._plan is not None and id(eqn) not in self._plan.zeroed:
            return fact
        axes = frozenset(open_axes(shape_of(var)))
        if self._plan is not None:
            return fact.zeroed(self._plan.zeroed[id(eqn)] & axes, MADE)
        if name_of(eqn) == "broadcast_in_dim":
            axes -= set(eqn.params["broadcast_dimensions"])
        elif not (self._everywhere and any(any(held.zero.values()) for held in ins)):
            return fact
        if not jnp.issubdtype(dtype_of(var), jnp.inexact):
            return fact
        axes -= fact.zero.keys()
        self.places[id(eqn)] = self.places.get(id(eqn), frozenset()) | axes
        return fact.with_zeros(axes, frozenset((Condition(id(eqn)),)))

    def _count(self, eqn: JaxprEqn, ins: Sequence[Fact]) -> None:
        if self._is_settling:
            return
        shapes = list(map(shape_of, eqn.invars))
        pairs = summed_pairs(eqn)
        if name_of(eqn) == "reduce_sum":
            axes = [a for a in eqn.params["axes"] if is_symbolic(shapes[0][a])]
            zero = both(*(ins[0].zero.get(axis) for axis in axes))
            zero = zero if zero is None or zero.isdisjoint(FINITE) else None
            self.cost += zero is None
            self._want([(zero, 1)])
        elif pairs and self._plan is not None:
            self.cost += sum(fills_of_product(shapes, pairs, ins))
            for i, (fact, shape) in enumerate(zip(ins, shapes, strict=True)):
                if any(fact.zero.get(pair[i], CERTAIN) >= OF_SOFTMAX for pair in pairs):
                    rows = eqn.params.get("dimension_numbers", ((), ((), ())))[1][i]
                    opened = set(open_axes(shape)).difference(rows)
                    self.attended |= {str(shape[axis]) for axis in opened}
        elif pairs:
            sides = list(zip(ins, zip(*pairs, strict=True), strict=True))
            left, right = (_zero_in_products(fact, axes) for fact, axes in sides)
            held = [both(*map(fact.fills, axes)) for fact, axes in sides]
            ways = [both(left, right)]
            for zeros, facing in ((left, held[1]), (right, held[0])):
                ways.append(both(zeros, facing) if is_of_gradient(zeros) else None)
            self._want([(fewest(*ways), 2), (left, 1), (right, 1)])

    def _want(self, ways: Sequence[tuple[Fills | None, int]]) -> None:
        possible = [(way, spared) for way, spared in ways if way is not None]
        if possible and not any(way == CERTAIN and n == ways[0][1] for way, n in possible):
            self.wanted.append(possible)
