"""Whether a program's results depend on the signs of eigenvectors and singular vectors.

    v = eigh x             v is multiplied by the signs s along its axis 1
    a = mul v w            a too: w has no signs
    t = transpose v        t along its axis 0
    b = dot_general a t    s meets s along the contracted axis, so b has no sign: s is hidden

A factorisation of a padded matrix gives the vectors of the matrix itself, but the sign of each may
differ. A program that uses the vectors only in products such as ``v @ diag(f(w)) @ v.T`` (a
pseudo-inverse, least squares, a function of a matrix, the derivative of eigenvalues) uses each sign
twice, and its results are the same. This pass multiplies each vector by an unknown sign and follows
the signs through the program, before any bucket is built. It assumes that an equation that it does
not know shows the sign.

A sign is hidden only where the axis that counts the vectors is contracted. ``abs(v)`` has no signs
either. But where eigenvalues are equal, the vectors are known up to a rotation only; a contraction
hides the rotation too, and ``abs`` does not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from bucketjit._ir import dataflow
from bucketjit._jax.jaxprs import Atom, dtype_of, shape_of
from bucketjit._jax.primitives import name_of
from bucketjit._sizes.expressions import is_symbolic
from bucketjit._sizes.reshape_groups import without_ones

#: A factorisation, and the axes of a value along which its signs lie: those that count matrices
#: of a batch, and the one that counts vectors.
Factor = tuple[int, tuple[int, ...]]


class Facts(NamedTuple):
    """What is known of a value; the lattice value of this analysis.

    Attributes:
        signs: The signs that it is multiplied by.
        key: Values of one key are equal; None if no other value is known to be equal.
        zero: It is 0 everywhere.
        pairs: A matrix of two columns, which are equal: positions on a diagonal.
        diagonal: A matrix that is 0 off its diagonal.
    """

    signs: frozenset[Factor] = frozenset()
    key: Hashable = None
    zero: bool = False
    pairs: bool = False
    diagonal: bool = False


Signs = frozenset[Factor]

#: From the facts of the operands to the signs of the result; None if the signs show.
Step = Callable[[JaxprEqn, Sequence[Facts]], Signs | None]

_SAME_DIAGONAL = {"convert_element_type", "copy", "neg", "transpose"}
_SAME_ZERO = {*_SAME_DIAGONAL, "broadcast_in_dim", "reshape"}
_NUMBERED = {
    *("add", "mul", "sub", "eq", "lt", "select_n", "iota", "dim_as_value"),
    *("broadcast_in_dim", "convert_element_type", "copy", "reshape"),
}


def hidden_signs(jaxpr: Jaxpr) -> Mapping[int, JaxprEqn]:
    """The factorisations whose signs no result of a program depends on.

    Args:
        jaxpr: An open jaxpr.

    Returns:
        The equations, in all programs inside this one too, by their ``id``.
    """
    signs = _Signs()
    signs.show(dataflow.follow(signs, jaxpr, [Facts()] * len(jaxpr.invars)))
    return {key: eqn for key, eqn in signs.equations.items() if key not in signs.shown}


class _Signs(dataflow.Analysis[Facts]):
    """Which signs each value is multiplied by.

    Branches and loops get the default too, so nothing is joined: a turn of a loop makes vectors of
    its own, whose signs must not cancel those of another turn.

    Attributes:
        equations: The factorisations, by their ``id``.
        shown: Those that some result depends on the signs of.
    """

    def __init__(self) -> None:
        self.equations: dict[int, JaxprEqn] = {}
        self.shown: set[int] = set()
        self.table = {
            **{name: functools.partial(self._step, step) for name, step in _STEPS.items()},
            **dataflow.table({"eigh svd": self._factorised, "cond scan while": self.default}),
        }
        self._of: list[int] = []  # the equation of each call of a factorisation
        self._numbers: dict[Hashable, int] = {}
        self._count = itertools.count()

    def show(self, facts: Sequence[Facts]) -> None:
        """Some result depends on the signs of these values."""
        self.shown.update(self._of[group] for fact in facts for group, _ in fact.signs)

    def unknown(self, atom: Atom) -> Facts:
        """A value is equal to itself, and nothing more is known of it."""
        return Facts(key=("only", next(self._count)))

    def literal(self, atom: Literal) -> Facts:
        """Literals of the same bits are equal."""
        value = np.asarray(atom.val)
        return Facts(key=("literal", str(atom.aval), value.tobytes()), zero=not value.any())

    def default(self, eqn: JaxprEqn, ins: Sequence[Facts]) -> Sequence[Facts]:
        """What the table does not know shows the signs of all that it reads."""
        self.show(ins)
        self.show(dataflow.follow_inside(self, eqn))
        return self._made(eqn, ins, frozenset())

    def _step(self, step: Step, eqn: JaxprEqn, ins: Sequence[Facts]) -> Sequence[Facts]:
        signs = step(eqn, ins) if any(f.signs for f in ins) else Signs()
        return self.default(eqn, ins) if signs is None else self._made(eqn, ins, signs)

    def _factorised(self, eqn: JaxprEqn, ins: Sequence[Facts]) -> Sequence[Facts]:
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

    def _made(self, eqn: JaxprEqn, ins: Sequence[Facts], signs: Signs) -> Sequence[Facts]:
        """What is known of the results of an equation, beside the signs of its only one."""
        if len(eqn.outvars) != 1:
            return [self.unknown(var) for var in eqn.outvars]
        zero = name_of(eqn) in _SAME_ZERO and ins[0].zero
        pairs, diagonal = _makes_pairs(eqn, ins), _makes_diagonal(eqn, ins)
        return [Facts(signs, self._number(eqn, ins), zero, pairs, diagonal)]

    def _number(self, eqn: JaxprEqn, ins: Sequence[Facts]) -> Hashable:
        """One number for all equations that compute the same of the same."""
        if name_of(eqn) not in _NUMBERED or any(f.key is None for f in ins):
            return ("only", next(self._count))
        params = tuple((k, str(v)) for k, v in sorted(eqn.params.items()))
        key = (name_of(eqn), params, *(f.key for f in ins))
        return self._numbers.setdefault(key, next(self._count))


# --- diagonal matrices, as the derivative of eigenvalues makes them ---------------------------


def _makes_pairs(eqn: JaxprEqn, ins: Sequence[Facts]) -> bool:
    if name_of(eqn) != "concatenate" or eqn.params["dimension"] != 1 or len(ins) != 2:
        return False
    columns = [shape_of(v) for v in eqn.invars]
    return all(len(s) == 2 and s[1] == 1 for s in columns) and ins[0].key == ins[1].key is not None


def _makes_diagonal(eqn: JaxprEqn, ins: Sequence[Facts]) -> bool:
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


def _moved(signs: Signs, place: Callable[[int], int | None]) -> Signs | None:
    """The signs after their axes moved; None if one of those axes is gone."""
    found = set()
    for group, axes in signs:
        places = [at for at in map(place, axes) if at is not None]
        if len(places) < len(axes):
            return None
        found.add((group, tuple(places)))
    return frozenset(found)


def _in_place(step: Step) -> Step:
    """A step of an elementwise primitive, if no sign lies along an axis that it broadcasts."""

    @functools.wraps(step)
    def checked(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
        out = shape_of(eqn.outvars[0])
        for atom, fact in zip(eqn.invars, ins, strict=True):
            shape = shape_of(atom)
            for axis in (a for _, axes in fact.signs for a in axes):
                if len(shape) != len(out) or str(shape[axis]) != str(out[axis]):
                    return None
        return step(eqn, ins)

    return checked


def _keep(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    return ins[0].signs if jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.inexact) else None


def _transpose(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    order = tuple(eqn.params["permutation"])
    return _moved(ins[0].signs, order.index)


def _broadcast(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    places = eqn.params["broadcast_dimensions"]

    def place(axis: int) -> int | None:
        return places[axis] if str(before[axis]) == str(after[places[axis]]) else None

    return _moved(ins[0].signs, place)


def _squeeze(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    gone = {d % len(shape_of(eqn.invars[0])) for d in eqn.params["dimensions"]}
    return _moved(ins[0].signs, functools.partial(_without, gone))


def _reduce_sum(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    return _moved(ins[0].signs, functools.partial(_without, set(eqn.params["axes"])))


def _without(gone: set[int], axis: int) -> int | None:
    return None if axis in gone else axis - sum(g < axis for g in gone)


def _reshape(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    """One that adds and drops axes of size 1."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if list(map(str, without_ones(before))) != list(map(str, without_ones(after))):
        return None
    places = [i for i, d in enumerate(after) if is_symbolic(d) or d != 1]
    olds = [i for i, d in enumerate(before) if is_symbolic(d) or d != 1]
    return _moved(ins[0].signs, dict(zip(olds, places, strict=True)).get)


@_in_place
def _mul(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    left, right = ins[0].signs, ins[1].signs
    return None if left & right else left | right


@_in_place
def _div(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    return None if ins[1].signs else ins[0].signs


def _alike(ins: Sequence[Facts]) -> Signs | None:
    """Terms of one sum are multiplied by the same signs, which 0 is by any."""
    terms = [f for f in ins if not f.zero]
    signs = next((f.signs for f in terms if f.signs), Signs())
    # What is 0 off the diagonal does not change with the signs of its rows and its columns.
    twice = all(len(axes) == 1 and (group, (1 - axes[0],)) in signs for group, axes in signs)
    same = (f.signs == signs or (twice and f.diagonal and not f.signs) for f in terms)
    return signs if all(same) else None


@_in_place
def _add(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    return _alike(ins)


@_in_place
def _select(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    return None if ins[0].signs else _alike(ins[1:])


def _dot_general(eqn: JaxprEqn, ins: Sequence[Facts]) -> Signs | None:
    contract, batch = eqn.params["dimension_numbers"]
    signs = [set(f.signs) for f in ins]
    # A diagonal matrix times signs along its rows is the same as along its columns.
    for side, other in ((0, 1), (1, 0)):
        if ins[side].diagonal and len(contract[side]) == 1:
            axis = contract[side][0]
            for group, axes in ins[other].signs:
                if axes == tuple(contract[other]):
                    signs[side] ^= {(group, (axis,)), (group, (1 - axis,))}
    across = dict([*zip(*contract, strict=True), *zip(*batch, strict=True)])
    for group, axes in list(signs[0]):
        if any(a in contract[0] for a in axes) and all(a in across for a in axes):
            there = (group, tuple(across[a] for a in axes))
            if there in signs[1]:
                signs[0].discard((group, axes))
                signs[1].discard(there)
    found: list[frozenset[Factor]] = []
    start = len(batch[0])
    for side in (0, 1):
        used = (*contract[side], *batch[side])
        free = [i for i in range(len(shape_of(eqn.invars[side]))) if i not in used]
        places = {a: i for i, a in enumerate(batch[side])}
        places |= {a: start + i for i, a in enumerate(free)}
        start += len(free)
        moved = _moved(frozenset(signs[side]), places.get)
        if moved is None:
            return None
        found.append(moved)
    return None if found[0] & found[1] else found[0] | found[1]


_STEPS: Mapping[str, Step] = dataflow.table(
    {
        "neg copy convert_element_type reduce_precision": _keep,
        "transpose": _transpose,
        "broadcast_in_dim": _broadcast,
        "squeeze": _squeeze,
        "reshape": _reshape,
        "reduce_sum": _reduce_sum,
        "mul": _mul,
        "div": _div,
        "add add_any sub": _add,
        "select_n": _select,
        "dot_general": _dot_general,
    }
)
