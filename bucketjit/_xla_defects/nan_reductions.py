"""Whether XLA's CPU backend may drop a NaN that a program would show.

Its library YNN takes `max(nan, x)` for ``x`` where it folds 4,096 elements or more: in their
maximum and minimum, and in what is computed of each element on the way into a sum (``relu``), in
``jax.jit`` too (jaxlib 0.10.2 and 0.12). Padding would take a call of 3,000 elements to a bucket
where that is so, and its NaN with it. So a program that chooses between floats is compiled without
these folds of the library (`_jax.library_options`).

But for a softmax, which is faster with them. It subtracts the maximum of a row, and divides by the
sum of what it makes of it. Where the row holds a NaN, that sum is NaN, whatever the maximum was,
and so is all that is divided by it. This pass follows what is computed of a maximum, row by row,
until it has met such a sum everywhere. What it does not know shows the loss.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._jax.jaxprs import all_equations, bodies, is_literal
from bucketjit._jax.primitives import name_of

_EXTREMA = ("reduce_max", "reduce_min")
_CHOICES = frozenset(
    (
        *("max", "min", "cummax", "cummin", "pmax", "pmin"),
        *("reduce_window_max", "reduce_window_min", "scatter-max", "scatter-min"),
    )
)
_ELEMENTWISE = frozenset(ELEMENTWISE)
# NaN where an operand is. (Of a product with truth values XLA makes a choice: `is_no_truth`.)
_STRICT = frozenset(
    (
        *("add", "add_any", "sub", "div", "neg", "abs", "square", "sqrt", "rsqrt"),
        *("exp", "exp2", "expm1", "log", "log2", "log1p"),
        *("copy", "stop_gradient", "convert_element_type", "integer_pow"),
    )
)
_NO_TRUTH = frozenset(("exp", "exp2", "logistic", "tanh", "sin", "cos"))
_READ_SIGNS = frozenset(("top_k", "approx_top_k", "bitcast_convert_type"))
_MOVES = frozenset(("broadcast_in_dim", "squeeze", "transpose", "copy", "stop_gradient"))
_MOST_EQUATIONS = 64  # to follow from one extremum
_DEPTH = 8  # of what is looked at to know an operand

Labels = tuple[int | None, ...]


def may_lose_nan(jaxpr: Any) -> bool:
    """Whether results may be others if what chooses between floats loses a NaN.

    Args:
        jaxpr: An open jaxpr without dead code.
    """
    # What an extremum is of must hold no choice, which XLA may make anew in each fold that reads
    # it, so one that shows is enough, at whatever depth.
    return _shows(jaxpr) or _reads_signs(jaxpr)


def _shows(jaxpr: Any) -> bool:
    choices, extrema = set(), []
    for at, eqn in enumerate(jaxpr.eqns):
        if any(map(_shows, bodies(eqn))):
            return True
        if _is_of_floats(eqn.outvars):
            name = name_of(eqn)
            if name in _CHOICES:
                choices.add(at)
            elif name in _EXTREMA:
                extrema.append(eqn)
    if not extrema:
        return bool(choices)
    paths = _NanPaths(jaxpr)
    for eqn in extrema:
        hidden = paths.hidden_choices(eqn)
        if hidden is None:
            return True
        choices -= hidden
    return bool(choices)


def _reads_signs(jaxpr: Any) -> bool:
    """Whether it matters which NaN it is that an extremum makes: of which sign, say."""
    equations = list(all_equations(jaxpr))
    return any(name_of(e) in _EXTREMA and _is_of_floats(e.outvars) for e in equations) and any(
        name_of(e) in _READ_SIGNS and _is_of_floats(e.invars) for e in equations
    )


def _is_of_floats(atoms: Sequence[Any]) -> bool:
    return any(jnp.issubdtype(getattr(v.aval, "dtype", bool), np.floating) for v in atoms)


class Kind(enum.Enum):
    """What a value is, beside what it would be if the NaN were not lost.

    Attributes:
        SAME: The same.
        NAN: The same, and NaN all along each row that holds a NaN.
        OTHER: Another one along such rows, and the same in all others.
        LOST: It is not known.
    """

    SAME = enum.auto()
    NAN = enum.auto()
    OTHER = enum.auto()
    LOST = enum.auto()


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        kind: See there.
        labels: The axis of the extremum's operand that each of its axes is, None for others; None
            if it has nothing to do with that operand.
        marked: It is NaN at each position at which the operand is.
    """

    kind: Kind = Kind.SAME
    labels: Labels | None = None
    marked: bool = False


_SAME, _LOST = Fact(), Fact(Kind.LOST)


class _NanPaths:
    """The equations of one program that are read by others, and what is found out of them.

    Args:
        jaxpr: An open jaxpr without dead code.
    """

    def __init__(self, jaxpr: Any) -> None:
        self._equations: Sequence[Any] = jaxpr.eqns
        self._results = {v for v in jaxpr.outvars if not is_literal(v)}
        self._made_by: dict[Any, int] = {}
        self._readers: dict[Any, list[int]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            self._made_by.update(dict.fromkeys(eqn.outvars, i))
            for v in eqn.invars:
                if not is_literal(v):
                    self._readers.setdefault(v, []).append(i)

    def hidden_choices(self, eqn: Any) -> set[int] | None:
        """Where the loss of a NaN by a ``reduce_max`` or ``reduce_min`` does not show, what has it.

        Returns:
            The choices among what the extremum makes, by position: no other NaN gets there. None
            if the loss may show.
        """
        (operand,), (out,) = eqn.invars, eqn.outvars
        if is_literal(operand) or self._made_by.get(out) is None:
            return None
        rank, axes = len(operand.aval.shape), set(eqn.params["axes"])
        rows = tuple(i for i in range(rank) if i not in axes)
        return _Following(self, operand, axes, out, rows).choices()

    def reads(self, var: Any) -> Sequence[int]:
        """The equations that read a variable, by position."""
        return self._readers.get(var, ())

    def is_result(self, var: Any) -> bool:
        """Whether it is a result of the program."""
        return var in self._results

    def equation(self, at: int) -> Any:
        """The equation at a position."""
        return self._equations[at]

    def maker(self, var: Any) -> Any | None:
        """The equation that makes a variable; None for an argument or a constant."""
        at = self._made_by.get(var)
        return None if at is None else self._equations[at]

    def is_no_truth(self, atom: Any) -> bool:
        """Whether XLA cannot know an operand as truth values that were converted to floats."""
        if is_literal(atom):
            return True
        eqn = self.maker(atom)
        while eqn is not None and name_of(eqn) in _MOVES and not is_literal(eqn.invars[0]):
            eqn = self.maker(eqn.invars[0])
        if eqn is None:  # an argument; whoever calls the program may have made it of anything
            return False
        if name_of(eqn) == "dot_general":  # a product by itself, of one element each
            (contracted, _), _ = eqn.params["dimension_numbers"]
            sizes = [eqn.invars[0].aval.shape[a] for a in contracted]
            return any(isinstance(size, int) and size > 1 for size in sizes)
        return name_of(eqn) in _NO_TRUTH


class _Following:
    """What is computed of one extremum."""

    def __init__(
        self, paths: _NanPaths, operand: Any, axes: set[int], out: Any, rows: Labels
    ) -> None:
        self._paths = paths
        self._axes = axes
        self._rank = len(rows) + len(axes)
        self._others: dict[Any, Fact] = {out: Fact(Kind.OTHER, rows)}
        self._known: dict[Any, Fact] = {
            operand: Fact(Kind.SAME, tuple(range(self._rank)), marked=True)
        }
        self._start = out

    def choices(self) -> set[int] | None:
        """See `_NanPaths.hidden_choices`."""
        if self._paths.is_result(self._start):
            return None
        waiting = list(self._paths.reads(self._start))
        heapq.heapify(waiting)
        done: set[int] = set()
        found: set[int] = set()
        while waiting:  # in the order of the program, so what an equation reads is known
            at = heapq.heappop(waiting)
            if at in done:
                continue
            done.add(at)
            eqn = self._paths.equation(at)
            fact = self._after(eqn, _DEPTH)
            if fact.kind is Kind.LOST or len(done) > _MOST_EQUATIONS:
                return None
            (out,) = eqn.outvars
            if fact.kind is not Kind.OTHER:
                self._known[out] = fact
                continue
            if self._paths.is_result(out):
                return None
            if all(is_literal(v) or v in self._others for v in eqn.invars):
                found.add(at)
            self._others[out] = fact
            for reader in self._paths.reads(out):
                heapq.heappush(waiting, reader)
        return found

    def _of(self, atom: Any, depth: int) -> Fact:
        """What is known of an operand; to know less of what is the same is never wrong."""
        if is_literal(atom):
            return _SAME
        found = self._others.get(atom) or self._known.get(atom)
        if found is None:
            eqn = self._paths.maker(atom)
            if depth == 0 or eqn is None or len(eqn.outvars) != 1:
                return _SAME
            fact = self._after(eqn, depth - 1)
            found = fact if fact.kind in (Kind.SAME, Kind.NAN) else _SAME
            self._known[atom] = found
        return found

    def _after(self, eqn: Any, depth: int) -> Fact:
        """What an equation makes."""
        facts = [self._of(v, depth) for v in eqn.invars]
        kinds = {f.kind for f in facts}
        unknown = _LOST if Kind.OTHER in kinds else _SAME
        name = name_of(eqn)
        if len(eqn.outvars) != 1:
            return unknown
        if name in _ELEMENTWISE:
            return self._elementwise(eqn, name, facts, unknown)
        if name == "reduce_sum" and facts[0].labels is not None:
            return self._summed(facts[0], eqn.params["axes"], unknown)
        if name in _MOVES and facts[0].labels is not None:
            labels = _moved(eqn, name, facts[0].labels)
            if labels is not None:
                return Fact(facts[0].kind, labels, facts[0].marked and self._is_whole(labels))
        return unknown

    def _is_whole(self, labels: Labels) -> bool:
        return len(labels) == self._rank and set(labels) == set(range(self._rank))

    def _elementwise(self, eqn: Any, name: str, facts: Sequence[Fact], unknown: Fact) -> Fact:
        rank = len(eqn.outvars[0].aval.shape)
        labels = _together([f.labels for f in facts if f.labels is not None], rank)
        if labels is None:
            return unknown
        strict = name in _STRICT and _stays_float(eqn)
        if name == "mul":
            strict = all(
                fact.kind is Kind.NAN or fact.marked or self._paths.is_no_truth(v)
                for v, fact in zip(eqn.invars, facts, strict=True)
            )
        marked = strict and self._is_whole(labels) and any(f.marked for f in facts)
        if strict and any(f.kind is Kind.NAN for f in facts):
            return Fact(Kind.NAN, labels, marked)
        if unknown is _LOST:
            return Fact(Kind.OTHER, labels, marked)
        return Fact(Kind.SAME, labels, True) if marked else _SAME

    def _summed(self, fact: Fact, axes: Sequence[int], unknown: Fact) -> Fact:
        assert fact.labels is not None
        gone = {fact.labels[a] for a in axes}
        labels = tuple(label for i, label in enumerate(fact.labels) if i not in axes)
        if not gone - {None} <= self._axes:
            return unknown  # of several rows
        if fact.kind is Kind.NAN or fact.marked and gone == self._axes:
            return Fact(Kind.NAN, labels)
        return Fact(Kind.OTHER, labels) if unknown is _LOST else _SAME


def _stays_float(eqn: Any) -> bool:
    """Whether no NaN is lost by way of another dtype."""
    if name_of(eqn) == "integer_pow":
        return bool(eqn.params["y"] != 0)
    dtypes = [getattr(v.aval, "dtype", np.dtype(bool)) for v in (*eqn.invars, *eqn.outvars)]
    return all(jnp.issubdtype(d, np.floating) and d.itemsize > 1 for d in dtypes)


def _together(every: Sequence[Labels], rank: int) -> Labels | None:
    """The labels of what is computed position by position; None if they do not agree.

    Args:
        every: Those of the operands that have any.
        rank: Of the result; operands of no axes go with others.
    """
    if not every or any(len(labels) != rank for labels in every):
        return None
    found: list[int | None] = []
    for labels in zip(*every, strict=True):
        named = {label for label in labels if label is not None}
        if len(named) > 1:
            return None
        found.append(named.pop() if named else None)
    kept = [label for label in found if label is not None]
    return tuple(found) if len(kept) == len(set(kept)) else None  # not row by row with itself


def _moved(eqn: Any, name: str, labels: Labels) -> Labels | None:
    """The labels of the axes where they go; None if one is repeated or dropped."""
    params: Mapping[str, Any] = eqn.params
    if name == "transpose":
        return tuple(labels[a] for a in params["permutation"])
    if name == "squeeze":
        gone = params["dimensions"]
        if any(labels[a] is not None for a in gone):
            return None
        return tuple(label for i, label in enumerate(labels) if i not in gone)
    if name == "broadcast_in_dim":
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        found: list[int | None] = [None] * len(after)
        for label, size, to in zip(labels, before, params["broadcast_dimensions"], strict=True):
            if label is not None and str(size) != str(after[to]):
                return None
            found[to] = label
        return tuple(found)
    return labels
