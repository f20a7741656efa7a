"""Analysis: do a program's results depend on the signs of eigenvectors and singular vectors?

    v = eigh x             v is multiplied by the signs s along its axis 1
    a = mul v w            a too: w has no signs
    t = transpose v        t along its axis 0
    b = dot_general a t    s meets s along the contracted axis, so b has no sign: s is hidden

A factorisation of a padded matrix gives the vectors of the matrix itself, but the sign of each may
differ. A program that uses the vectors only in products such as ``v @ diag(f(w)) @ v.T`` (a
pseudo-inverse, least squares, a function of a matrix, the derivative of eigenvalues) uses each sign
twice, and its results are the same. This analysis multiplies each vector by an unknown sign and
follows the signs through the program, before any bucket is built. An operation that it does not
know is assumed to expose the signs of its operands.

A sign is hidden only by contracting the axis that counts the vectors. The signs of ``abs(v)``
cancel too, but that is not enough: vectors of equal eigenvalues are determined up to a rotation
only. A contraction also hides the rotation, and ``abs`` does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from bucketjit._ir import dataflow
from bucketjit._ir.dataflow import kept_axes, product_axes
from bucketjit._jax.jaxprs import Atom, dtype_of, name_of, shape_of

#: The number of a factorisation, and the axes of a value along which its signs lie: the axes that
#: count the matrices of a batch, then the axis that counts the vectors.
Factor = tuple[int, tuple[int, ...]]


class Facts(NamedTuple):
    """What the analysis knows of one value.

    Attributes:
        signs: The signs that the value is multiplied by.
        key: A number. Values with the same one are equal; None is equal to no other value.
        zero: True if the value is 0 everywhere.
        pairs: True for a matrix of two equal columns: index pairs of positions on a diagonal.
        diagonal: True for a matrix that is 0 off its diagonal.
    """

    signs: frozenset[Factor] = frozenset()
    key: int | None = None
    zero: bool = False
    pairs: bool = False
    diagonal: bool = False


Signs = frozenset[Factor]

# Primitives that map a diagonal matrix to one, and zeros to zeros.
_SAME_DIAGONAL = {"convert_element_type", "copy", "neg", "transpose"}
_SAME_ZERO = {*_SAME_DIAGONAL, "broadcast_in_dim", "reshape"}
# Primitives whose results get a `key`: they compute the index arrays of a diagonal.
_NUMBERED = {
    *("add", "mul", "sub", "eq", "lt", "select_n", "iota", "dim_as_value"),
    *("broadcast_in_dim", "convert_element_type", "copy", "reshape"),
}


def hidden_signs(jaxpr: Jaxpr) -> Mapping[int, JaxprEqn]:
    """Find the factorisations whose signs no result of a program depends on."""
    signs = _Signs()
    signs.show(dataflow.follow(signs, jaxpr, [Facts()] * len(jaxpr.invars)))
    return {key: eqn for key, eqn in signs.equations.items() if key not in signs.shown}


class _Signs(dataflow.Analysis[Facts]):
    """The analysis: the signs that each value is multiplied by.

    Branches and loops are in the table with the default, so values are never joined. Each turn of a
    loop makes new vectors, whose signs must not cancel those of another turn.

    Attributes:
        equations: The factorisations, by their ``id``.
        shown: Ids of the factorisations whose signs some result depends on.
    """

    def __init__(self) -> None:
        self.equations: dict[int, JaxprEqn] = {}
        self.shown: set[int] = set()
        self.table = {
            **dict.fromkeys(_CARRIERS, self._carried),
            **dataflow.table({"eigh svd": self._factorised, "cond scan while": self.default}),
        }
        # The `id` of the equation of each group of signs. An equation in a program that is called
        # twice makes two groups, since each call makes new vectors.
        self._of: list[int] = []
        self._numbers: dict[Hashable, int] = {}

    def show(self, facts: Sequence[Facts]) -> None:
        """Record that some result depends on the signs of these values."""
        self.shown.update(self._of[group] for fact in facts for group, _ in fact.signs)

    def unknown(self, atom: Atom) -> Facts:
        """A value that is equal to itself only."""
        return Facts(key=self._number(object()))

    def literal(self, atom: Literal) -> Facts:
        """A constant; literals of the same type and bits get the same key."""
        value = np.asarray(atom.val)
        key = self._number(("literal", str(atom.aval), value.tobytes()))
        return Facts(key=key, zero=not value.any())

    def default(self, eqn: JaxprEqn, ins: Sequence[Facts]) -> Sequence[Facts]:
        """Record that an unknown equation exposes the signs of everything it reads."""
        self.show(ins)
        self.show(dataflow.follow_inside(self, eqn))
        return self._facts_of(eqn, ins, frozenset())

    def _carried(self, eqn: JaxprEqn, ins: Sequence[Facts]) -> Sequence[Facts]:
        """The facts of a result that may have the signs of its operands; else the default."""
        signs = _signs_of(eqn, ins) if any(f.signs for f in ins) else Signs()
        return self.default(eqn, ins) if signs is None else self._facts_of(eqn, ins, signs)

    def _factorised(self, eqn: JaxprEqn, ins: Sequence[Facts]) -> Sequence[Facts]:
        """New signs for the vectors of a factorisation, which exposes the signs of its operand."""
        self.show(ins)
        group, rank = len(self._of), len(shape_of(eqn.invars[0])) - 2
        self._of.append(id(eqn))
        self.equations[id(eqn)] = eqn
        batch = tuple(range(rank))
        columns = Facts(frozenset({(group, (*batch, rank + 1))}))
        rows = Facts(frozenset({(group, (*batch, rank))}))
        if name_of(eqn) == "eigh":
            return [columns, Facts()]
        return [Facts(), columns, rows][: len(eqn.outvars)]

    def _facts_of(self, eqn: JaxprEqn, ins: Sequence[Facts], signs: Signs) -> Sequence[Facts]:
        """The facts of the results of an equation; its only result is multiplied by ``signs``."""
        if len(eqn.outvars) != 1:
            return [self.unknown(var) for var in eqn.outvars]
        zero = name_of(eqn) in _SAME_ZERO and ins[0].zero
        pairs, diagonal = _makes_pairs(eqn, ins), _makes_diagonal(eqn, ins)
        key: Hashable = object()
        if name_of(eqn) in _NUMBERED and None not in (keys := [f.key for f in ins]):
            params = tuple((k, str(v)) for k, v in sorted(eqn.params.items()))
            key = name_of(eqn), params, *keys
        return [Facts(signs, self._number(key), zero, pairs, diagonal)]

    def _number(self, key: Hashable) -> int:
        """The same number for all values that are computed alike, of equal operands."""
        return self._numbers.setdefault(key, len(self._numbers))


# --- diagonal matrices, as the derivative of eigenvalues makes them ---------------------------


def _makes_pairs(eqn: JaxprEqn, ins: Sequence[Facts]) -> bool:
    """Whether an equation joins two equal columns to index pairs."""
    if name_of(eqn) != "concatenate" or eqn.params["dimension"] != 1 or len(ins) != 2:
        return False
    columns = [shape_of(v) for v in eqn.invars]
    return all(len(s) == 2 and s[1] == 1 for s in columns) and ins[0].key == ins[1].key is not None


def _makes_diagonal(eqn: JaxprEqn, ins: Sequence[Facts]) -> bool:
    """Whether a result is a diagonal matrix: one moved, or values scattered to index pairs."""
    name = name_of(eqn)
    if name in _SAME_DIAGONAL:
        return ins[0].diagonal
    if name not in ("scatter-add", "scatter_add", "scatter"):
        return False
    numbers = eqn.params["dimension_numbers"]
    plain = (
        not numbers.update_window_dims
        and tuple(numbers.inserted_window_dims) == (0, 1)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0, 1)
    )
    return plain and ins[0].zero and ins[1].pairs and not ins[2].signs


# --- equations ------------------------------------------------------------------------------


def _moved(signs: Signs, places: Mapping[int | None, int]) -> Signs | None:
    """Move the axes of signs; None if one lies along an axis that is not in the result."""
    if not all(axis in places for _, axes in signs for axis in axes):
        return None
    return frozenset((group, tuple(places[axis] for axis in axes)) for group, axes in signs)


def _signs_of(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    """From the facts of the operands to the signs of the result; None if the signs show."""
    name = name_of(eqn)
    if name == "dot_general":
        return _dot_general(eqn, ins)
    if not jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.inexact):  # a conversion to integers
        return None
    places: dict[int | None, int] = {axis: place for place, axis in kept_axes(eqn).items()}
    moved = [_moved(f.signs, places) for f in ins]
    facts = [f._replace(signs=m) for f, m in zip(ins, moved, strict=True) if m is not None]
    if len(facts) < len(ins):
        return None
    first, rest = facts[0].signs, facts[1:]
    if name == "select_n":
        return None if first else _alike(rest)
    if name in ("add", "add_any", "sub"):
        return _alike(facts)
    second = rest[0].signs if rest else Signs()
    # In a product a shared sign would cancel, but elementwise: that does not hide a rotation, as
    # the module docstring explains.
    if (second and name == "div") or first & second:
        return None
    return first | second


def _alike(ins: Sequence[Facts]) -> Signs | None:
    """The signs that all terms of a sum have in common; None if they differ.

    A term that is 0 everywhere agrees with any signs.
    """
    terms = [f for f in ins if not f.zero]
    signs = next((f.signs for f in terms if f.signs), Signs())
    # If each sign multiplies rows and columns alike, the square of a sign is on the diagonal: a
    # diagonal matrix without signs is also one with these.
    twice = all(len(axes) == 1 and (group, (1 - axes[0],)) in signs for group, axes in signs)
    same = (f.signs == signs or (twice and f.diagonal and not f.signs) for f in terms)
    return signs if all(same) else None


def _dot_general(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    """The signs of a contraction; equal signs that meet along a contracted axis cancel."""
    contract, batch = eqn.params["dimension_numbers"]
    signs = [set(f.signs) for f in ins]
    # Signs along the rows of a diagonal matrix can be moved to its columns. They are moved so that
    # they meet the same signs of the other operand along the contracted axis.
    for side, facing in ((0, 1), (1, 0)):
        if ins[side].diagonal and len(contract[side]) == 1:
            axis = contract[side][0]
            for group, axes in ins[facing].signs:
                if axes == tuple(contract[facing]):
                    signs[side] ^= {(group, (axis,)), (group, (1 - axis,))}
    # Cancel signs whose axes meet the axes of the same signs, at least one of them contracted.
    across = dict([*zip(*contract, strict=True), *zip(*batch, strict=True)])
    for group, axes in list(signs[0]):
        if any(a in contract[0] for a in axes) and all(a in across for a in axes):
            there = (group, tuple(across[a] for a in axes))
            if there in signs[1]:
                signs[0].discard((group, axes))
                signs[1].discard(there)
    # The remaining signs, along the axes of the result.
    sources = product_axes(eqn)
    left, right = (
        _moved(frozenset(signs[k]), {s[k]: i for i, s in enumerate(sources) if s[k] is not None})
        for k in (0, 1)
    )
    return None if left is None or right is None or left & right else left | right


_CARRIERS = (
    *("neg", "copy", "convert_element_type", "reduce_precision", "transpose", "broadcast_in_dim"),
    *("squeeze", "reshape", "reduce_sum", "mul", "div", "add", "add_any", "sub", "select_n"),
    "dot_general",
)
