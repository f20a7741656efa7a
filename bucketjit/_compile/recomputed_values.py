"""Find values that a program compares with themselves, or with what it has chosen among them.

    y = sub x (mul a b)      computed: it may be rounded in two ways
    m = reduce_max y         chosen among the elements of y
    c = eq y m               compares y with m, so this pass returns y

XLA's CPU backend may compute ``y`` in each kernel that reads it, and round it differently there:
``x - a * b`` in one step or in two (jaxlib 0.10.2 and 0.12, in ``jax.jit`` too). Then no element
equals the maximum, and its gradient is lost. Masks and padding can trigger or hide it. This pass
finds the values that must be computed once; a hook of the interpreter keeps them in memory.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from bucketjit._compile.nan_reductions import named
from bucketjit._ir.dataflow import ELEMENTWISE, Analysis, follow, follow_inside, through
from bucketjit._jax.jaxprs import CALLBACKS, CALLS, Atom, all_equations, bodies, is_literal, name_of

# Sets of primitives. Choices return some of the numbers of an operand.
_COMPARISONS = named("eq ne lt le gt ge eq_to lt_to le_to")
_CHOICES = named(
    "reduce_max reduce_min argmax argmin cummax cummin reduce sort top_k approx_top_k max min",
    "clamp reduce_window_max reduce_window_min reduce_window scatter-max scatter-min",
    "select_and_gather_add",
)
# Their results have the numbers of their first operand, up to the sign.
_MOVES = named(
    "broadcast_in_dim reshape transpose squeeze rev copy stop_gradient convert_element_type",
    "reduce_precision neg abs real imag bitcast_convert_type slice dynamic_slice gather split",
    "unstack sharding_constraint reshard pvary reduce_max reduce_min cummax cummin top_k",
    "approx_top_k reduce_window_max reduce_window_min",
)
# Each result has the numbers of the operand in the same place.
_MOVES_OF_EACH = named("sort optimization_barrier device_put")
# Their results have numbers of several operands, and may have others in some positions.
_MIXTURES = named(
    "concatenate stack pad dynamic_update_slice select_n max min clamp scatter scatter-add",
    "scatter-sub scatter-mul scatter-max scatter-min reduce reduce_window select_and_gather_add",
)
_MOVES_BITS = _MOVES - {"convert_element_type"}
_FUNCTIONS = frozenset(ELEMENTWISE) - _MOVES - _MIXTURES
_COMPUTED = _FUNCTIONS | {"reduce_sum", "reduce_prod"}
_DIFFERENCES = named("sub add add_any div")  # ``y + -m`` is 0, ``y / m`` is 1
_DECIDE_BY_TWO = _DIFFERENCES | _COMPARISONS | {"rem"}
_KEEP_DIFFERENCES = frozenset(ELEMENTWISE) | _MOVES | _MOVES_OF_EACH | _MIXTURES
# At a difference of nearly 0, or just below 0, they return something quite different than at 0.
_READ_SIGNS = _COMPARISONS | named(
    "sign sqrt rsqrt cbrt log log2 log1p pow floor ceil round asin acos acosh atanh",
    "bitcast_convert_type",
)
_READ = _READ_SIGNS | {"convert_element_type", "rem", "div"}  # in some cases; see `_read`
# Sources that are remembered of a value, the latest ones. A kernel of XLA is not made of more.
_MOST = 64
# The same operands need not give the same result.
_ANEW = frozenset(("rng_uniform", "empty", "ffi_call", *CALLBACKS))
_Sources = frozenset[int]  # computed and mixed values, by number
_NONE: _Sources = frozenset()


class _Facts(NamedTuple):
    """What is known of a value.

    Attributes:
        number: Identifies the value. Two values with one number are computed by the same operations
            on the same operands, so XLA computes one of them.
        parts: The sources whose elements it has: the last one, and those that it is mixed from.
        behind: The sources that it is a function of, element by element. A function of a source,
            and of what was chosen among it, have equal results.
        chosen: The sources whose elements something was chosen among, on the way to this value.
        nearly: The sources from which it subtracts what was chosen among them, or the other way.
    """

    number: int
    parts: _Sources = _NONE
    behind: _Sources = _NONE
    chosen: _Sources = _NONE
    nearly: _Sources = _NONE


def recomputed_values(jaxpr: Jaxpr) -> Mapping[Any, Hashable]:
    """The variables that must be computed once, those of inner programs included."""
    names = {name_of(eqn) for eqn in all_equations(jaxpr)}
    if names.isdisjoint(_READ) or names.isdisjoint(_CHOICES | _COMPARISONS):
        return {}
    work = _Following(jaxpr)
    follow(work, jaxpr, list(map(work.unknown, jaxpr.invars)))
    kept = work.to_keep()
    return {v: tuple(ns) for v, ns in work.numbers.items() if not kept.isdisjoint(ns)}


class _Following(Analysis[_Facts]):
    """Collects the values that must be computed once; ``numbers`` has one for each call."""

    # The second turn meets what the first one has carried on. A fixed point would take hundreds of
    # turns: each turn of a loop within a loop makes new values.
    most_turns = 2

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.table = {
            **dict.fromkeys(CALLS, self._call),
            **dict.fromkeys(("cond", "scan", "while"), self._inside),
        }
        self.numbers: dict[Any, list[int]] = defaultdict(list)
        # What a call only returns is noted where it is called.
        self._noted = {v for v in jaxpr.outvars if not is_literal(v)}
        for eqn in all_equations(jaxpr):
            self._noted.update(v for v in eqn.invars if not is_literal(v))
            if name_of(eqn) not in CALLS:
                outs = (v for body in bodies(eqn) for v in body.outvars)
                self._noted.update(v for v in outs if not is_literal(v))
        self._kept: set[int] = set()
        self._keys: dict[Hashable, int] = {}
        self._made_of: dict[int, _Sources] = {}  # a source, and the sources that it is mixed from
        self._twice: set[int] = set()  # sources that are in a mixture more than once
        self._joined: set[int] = set()
        # The loop that is followed. An operation in a loop is not shared with one outside, so it
        # gets another number.
        self._loop = 0

    def to_keep(self) -> set[int]:
        """The values that must be computed once.

        A value that is in a mixture twice, as in ``concatenate([y, y])``, is one of them: two loops
        of one kernel would compute it.
        """
        return self._kept.union(*(self._made_of[n] & self._twice for n in self._kept))

    def unknown(self, atom: Atom) -> _Facts:
        return _Facts(self._number(object()))

    def literal(self, atom: Literal) -> _Facts:
        return _Facts(self._number("literal", str(atom.aval), np.asarray(atom.val).tobytes()))

    def join(self, first: _Facts, second: _Facts) -> _Facts:
        """A value in memory that is one of two."""
        if first == second:
            return first
        number = first.number if first.number in self._joined else self._number(object())
        self._joined.add(number)
        sets = [_all(pair) for pair in zip(first[1:], second[1:], strict=True)]
        return self._in_memory(number, *sets)

    def row(self, value: _Facts, var: Var) -> _Facts:
        return value._replace(number=self._number(object()))

    def stacked(self, value: _Facts, var: Var) -> _Facts:
        return value

    def _in_memory(
        self, number: int, parts: _Sources, _: _Sources, chosen: _Sources, nearly: _Sources
    ) -> _Facts:
        if parts:
            parts = self._made_of[number] = parts | {number}
        return _Facts(number, parts, parts, chosen, nearly)

    def _number(self, *key: Hashable) -> int:
        """The number of a value that is computed as the key says; later ones are larger."""
        return self._keys.setdefault(key, len(self._keys))

    def _latest(self, parts: _Sources) -> _Sources:
        """The sources among these that none of the others is mixed from.

        What a loop carries stays: it is mixed from values that are mixed from it.
        """
        older = set().union(*(self._made_of[n] - {n} for n in parts))
        return parts - (older - self._joined)

    # --- equations ---

    def _note(self, eqn: JaxprEqn, outs: Sequence[_Facts]) -> Sequence[_Facts]:
        for var, fact in zip(eqn.outvars, outs, strict=True):
            if var in self._noted:
                self.numbers[var].append(fact.number)
        return outs

    def _call(self, eqn: JaxprEqn, ins: Sequence[_Facts]) -> Sequence[_Facts]:
        return self._note(eqn, through(self, eqn, ins))

    def _inside(self, eqn: JaxprEqn, ins: Sequence[_Facts]) -> Sequence[_Facts]:
        """Follow a loop or branches. Returns facts about the results, without sources inside."""
        around = self._loop
        self._loop = before = self._number("loop", around, id(eqn), *(f.number for f in ins))
        loaded = [
            self._in_memory(self._number("given", before, i), *sets)
            for i, (_, *sets) in enumerate(ins)
        ]
        outs = through(self, eqn, loaded)
        self._loop = around
        chosen = _all(f.chosen | f.parts for f in ins)  # a loop may choose, element by element
        facts = []
        for i, (_, *sets) in enumerate(outs):
            parts, behind, inside, nearly = (frozenset(n for n in s if n < before) for s in sets)
            number = self._number("result", before, i)
            facts.append(self._in_memory(number, parts, behind, _all((inside, chosen)), nearly))
        return self._note(eqn, facts)

    def default(self, eqn: JaxprEqn, ins: Sequence[_Facts]) -> Sequence[_Facts]:
        name, has_bodies = name_of(eqn), any(True for _ in bodies(eqn))
        follow_inside(self, eqn)
        chosen = _all(f.chosen for f in ins)
        if has_bodies or name in _CHOICES:
            chosen = _all((chosen, *(f.parts for f in ins)))
        near = _NONE  # the sources behind one operand among which the other one was chosen
        if name in _DECIDE_BY_TWO:
            left, right = ins
            near = self._latest((left.behind & right.chosen) | (right.behind & left.chosen))
        self._read(eqn, name, ins, near)
        # Elementwise operations and moves carry a difference on.
        nearly = _all(f.nearly for f in ins) if name in _KEEP_DIFFERENCES else _NONE
        if name in _DIFFERENCES:
            nearly = _all((nearly, near))
        is_new = not name or name in _ANEW or has_bodies or bool(eqn.effects)
        facts = []
        for i, out in enumerate(eqn.outvars):
            # A primitive without a name is not one of JAX's: nothing is known of it.
            params = object() if is_new else _params(eqn)
            key = self._loop, name, params, str(out.aval), i, *(f.number for f in ins)
            number = self._number(*key)
            # The bits of floats as integers, or such integers moved.
            is_moved = name in _MOVES_BITS and not _is_inexact(eqn.invars[0])
            if _is_inexact(out) or is_moved or name == "bitcast_convert_type":
                facts.append(_Facts(number, *self._sources(number, name, i, ins), chosen, nearly))
            else:
                facts.append(_Facts(number, chosen=chosen))
        return self._note(eqn, facts)

    def _read(self, eqn: JaxprEqn, name: str, ins: Sequence[_Facts], near: _Sources) -> None:
        """Note the values whose last bit may decide the result of an equation."""
        cut_off = name == "convert_element_type" and not _is_inexact(eqn.outvars[0])
        if name in _READ_SIGNS or cut_off:
            self._kept.update(*(f.nearly for f in ins))
        if name == "div":
            self._kept.update(ins[1].nearly)
        if name == "rem":
            self._kept.update(near)
        if name in _COMPARISONS and ins[0].number != ins[1].number:  # ``y != y`` asks for NaN
            self._kept.update(near, self._latest(ins[0].parts & ins[1].parts))

    def _sources(
        self, number: int, name: str, i: int, ins: Sequence[_Facts]
    ) -> tuple[_Sources, _Sources]:
        """The parts of a result, and the sources behind it."""
        if name in _MOVES or name in _MOVES_OF_EACH:
            moved = ins[i if name in _MOVES_OF_EACH else 0]
            return moved.parts, moved.behind
        itself = frozenset((number,))
        if name in _MIXTURES:
            mixed = [f.parts for f in (ins[1:] if name == "select_n" else ins)]
            if number not in self._made_of:
                twice = _all(a & b for a, b in itertools.combinations(mixed, 2))
                self._twice.update(self._latest(twice))
                self._made_of[number] = _all((itself, *mixed))
            return self._made_of[number], self._made_of[number]
        if name not in _COMPUTED:
            return _NONE, _NONE
        self._made_of[number] = itself
        behind = [f.behind for f in ins] if name in _FUNCTIONS else []
        return itself, _all((itself, *behind))


def _is_inexact(var: Atom) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", np.dtype(bool)), np.inexact)


def _params(eqn: JaxprEqn) -> Hashable:
    """A key that is equal only if parameters are. Text is in it, since ``0.0 == -0.0``."""
    params = tuple(sorted(eqn.params.items()))
    try:
        hash(params)
    except TypeError:  # an array, whose text may be abridged: equal to nothing
        return object()
    return params, str(params)


def _all(sets: Iterable[_Sources]) -> _Sources:
    """The latest of several sources."""
    different = set(sets)  # mostly one, or one and the empty set
    if len(different) < 2:
        return next(iter(different), _NONE)
    every = _NONE.union(*different)
    return every if len(every) <= _MOST else frozenset(sorted(every)[-_MOST:])
