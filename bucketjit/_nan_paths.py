"""Whether a program's results show that a maximum or minimum has lost a NaN.

A softmax subtracts the maximum of a row, and divides by the sum of what it makes of it. Where the
row holds a NaN, that sum is NaN, whatever the maximum was, and so is all that is divided by it: the
maximum may be computed in a way that loses the NaN, which is faster (`rules._cpu_extrema`). This
pass follows what is computed of the maximum, row by row, until it has met such a sum everywhere.
What it does not know shows the loss.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bucketjit import _jax
from bucketjit._elementwise import ELEMENTWISE

_ELEMENTWISE = frozenset(ELEMENTWISE)
# NaN where an operand is. (A product is, too, where XLA does not make a choice of it.)
_STRICT = frozenset(
    (
        *("add", "add_any", "sub", "div", "neg", "abs", "square", "sqrt", "rsqrt"),
        *("exp", "exp2", "expm1", "log", "log2", "log1p"),
        *("copy", "stop_gradient", "convert_element_type", "integer_pow"),
    )
)
# What XLA does not take for truth values as numbers.
_NUMBERS = frozenset(("exp", "exp2", "log", "logistic", "tanh", "dot_general", "reduce_sum"))
_ARITHMETIC = frozenset(("add", "add_any", "sub", "mul", "div", "neg", "integer_pow"))
_MOVES = frozenset(("broadcast_in_dim", "squeeze", "transpose", "copy", "stop_gradient"))
_MOST_EQUATIONS = 64  # to follow from one extremum
_DEPTH = 8  # of what is looked at to know an operand

Labels = tuple[int | None, ...]


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


class NanPaths:
    """The equations of one program that are read by others, and what is found out of them.

    Args:
        jaxpr: An open jaxpr without dead code.
    """

    def __init__(self, jaxpr: Any) -> None:
        self._equations: Sequence[Any] = jaxpr.eqns
        self._results = {v for v in jaxpr.outvars if not _jax.is_literal(v)}
        self._made_by: dict[Any, int] = {}
        self._readers: dict[Any, list[int]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            self._made_by.update(dict.fromkeys(eqn.outvars, i))
            for v in eqn.invars:
                if not _jax.is_literal(v):
                    self._readers.setdefault(v, []).append(i)

    def show(self, eqn: Any) -> bool:
        """Whether results may show that a ``reduce_max`` or ``reduce_min`` has lost a NaN."""
        (operand,), (out,) = eqn.invars, eqn.outvars
        if _jax.is_literal(operand) or self._made_by.get(out) is None:
            return True
        rank, axes = len(operand.aval.shape), set(eqn.params["axes"])
        rows = tuple(i for i in range(rank) if i not in axes)
        return _Following(self, operand, axes, out, rows).shows()

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

    def may_be_truth(self, atom: Any, depth: int = _DEPTH) -> bool:
        """Whether XLA may know a factor as truth values: of a product it makes a choice then."""
        if _jax.is_literal(atom):
            return False
        eqn = self.maker(atom)
        if eqn is None:  # an argument; whoever calls the program may have made it of anything
            return True
        if _jax.name_of(eqn) in _NUMBERS:
            return False
        if depth == 0 or not _moves(eqn) and _jax.name_of(eqn) not in _ARITHMETIC:
            return True
        return any(self.may_be_truth(v, depth - 1) for v in eqn.invars)


class _Following:
    """What is computed of one extremum."""

    def __init__(
        self, paths: NanPaths, operand: Any, axes: set[int], out: Any, rows: Labels
    ) -> None:
        self._paths = paths
        self._axes = axes
        self._rank = len(rows) + len(axes)
        self._others: dict[Any, Fact] = {out: Fact(Kind.OTHER, rows)}
        self._known: dict[Any, Fact] = {
            operand: Fact(Kind.SAME, tuple(range(self._rank)), marked=True)
        }
        self._start = out

    def shows(self) -> bool:
        if self._paths.is_result(self._start):
            return True
        waiting = list(self._paths.reads(self._start))
        heapq.heapify(waiting)
        done: set[int] = set()
        while waiting:  # in the order of the program, so what an equation reads is known
            at = heapq.heappop(waiting)
            if at in done:
                continue
            done.add(at)
            eqn = self._paths.equation(at)
            fact = self._after(eqn, _DEPTH)
            if fact.kind is Kind.LOST or len(done) > _MOST_EQUATIONS:
                return True
            (out,) = eqn.outvars
            if fact.kind is not Kind.OTHER:
                self._known[out] = fact
                continue
            if self._paths.is_result(out):
                return True
            self._others[out] = fact
            for reader in self._paths.reads(out):
                heapq.heappush(waiting, reader)
        return False

    def _of(self, atom: Any, depth: int) -> Fact:
        """What is known of an operand; to know less of what is the same is never wrong."""
        if _jax.is_literal(atom):
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
        name = _jax.name_of(eqn)
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
        labels = _together([f.labels for f in facts if f.labels is not None])
        if labels is None:
            return unknown
        strict = name in _STRICT and _stays_float(eqn)
        if name == "mul":
            strict = not any(map(self._paths.may_be_truth, eqn.invars))
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


def _moves(eqn: Any) -> bool:
    name = _jax.name_of(eqn)
    return name in _MOVES or name == "convert_element_type" and _stays_float(eqn)


def _stays_float(eqn: Any) -> bool:
    """Whether no NaN is lost by way of another dtype."""
    if _jax.name_of(eqn) == "integer_pow":
        return bool(eqn.params["y"] != 0)
    dtypes = [getattr(v.aval, "dtype", np.dtype(bool)) for v in (*eqn.invars, *eqn.outvars)]
    return all(jnp.issubdtype(d, np.floating) and d.itemsize > 1 for d in dtypes)


def _together(every: Sequence[Labels]) -> Labels | None:
    """The labels of what is computed position by position; None if they do not agree."""
    if not every or len(set(map(len, every))) != 1:
        return None
    found: list[int | None] = []
    for labels in zip(*every, strict=True):
        named = {label for label in labels if label is not None}
        if len(named) > 1:
            return None
        found.append(named.pop() if named else None)
    return tuple(found)


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
