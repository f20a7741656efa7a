"""Whether a program's results depend on the signs of eigenvectors and singular vectors.

A factorisation of a padded matrix gives the vectors of the matrix itself, but each with a sign
that may be another one. Where a program only uses them in products such as ``v @ diag(f(w)) @ v.T``
(a pseudo-inverse, least squares, a function of a matrix, the derivative of eigenvalues), a sign
occurs twice and goes away. So this pass multiplies each vector by an unknown sign and follows the
signs through the program, before any bucket is built. What it does not know shows the sign.

A sign goes away only where the axis that counts the vectors is contracted. It would in ``abs(v)``
too; but where eigenvalues are equal the vectors are known up to a rotation only, which the first
kind of use does not see and the second does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._jax.jaxprs import is_jaxpr, is_literal, open_jaxpr
from bucketjit._jax.primitives import CALLS, called_jaxpr, name_of
from bucketjit._sizes.expressions import Shape, is_symbolic
from bucketjit._sizes.reshape_groups import without_ones

#: A factorisation, and the axes of a value along which its signs lie: those that count matrices
#: of a batch, and the one that counts vectors.
Factor = tuple[int, tuple[int, ...]]


class Facts(NamedTuple):
    """What is known of a value.

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


Step = Callable[[Any, Sequence[Facts]], "frozenset[Factor] | None"]

_ELEMENTWISE = {"mul", "div", "add", "add_any", "sub", "select_n"}
_SAME_DIAGONAL = {"convert_element_type", "copy", "neg", "transpose"}
_SAME_ZERO = {*_SAME_DIAGONAL, "broadcast_in_dim", "reshape"}
_NUMBERED = {
    *("add", "mul", "sub", "eq", "lt", "select_n", "iota", "dim_as_value"),
    *("broadcast_in_dim", "convert_element_type", "copy", "reshape"),
}


def hidden_signs(jaxpr: Any) -> Mapping[int, Any]:
    """The factorisations whose signs no result of a program depends on.

    Args:
        jaxpr: An open jaxpr.

    Returns:
        The equations, in all programs inside this one too, by their ``id``.
    """
    work = _Following()
    for fact in work.program(jaxpr, [Facts()] * len(jaxpr.invars)):
        work.show(fact.signs)
    return {key: eqn for key, eqn in work.equations.items() if key not in work.shown}


class _Following:
    def __init__(self) -> None:
        self.equations: dict[int, Any] = {}
        self.shown: set[int] = set()
        self._of: list[int] = []  # the equation of each call of a factorisation
        self._numbers: dict[Any, int] = {}
        self._count = itertools.count()

    def show(self, signs: frozenset[Factor]) -> None:
        """Some result depends on these signs."""
        self.shown.update(self._of[group] for group, _ in signs)

    def program(self, jaxpr: Any, facts: Sequence[Facts]) -> list[Facts]:
        env: dict[Any, Facts] = dict(zip(jaxpr.invars, facts, strict=True))

        def read(atom: Any) -> Facts:
            if is_literal(atom):
                return self._literal(atom)
            if atom not in env:
                env[atom] = Facts(key=("only", next(self._count)))
            return env[atom]

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    @staticmethod
    def _literal(atom: Any) -> Facts:
        value = np.asarray(atom.val)
        return Facts(key=("literal", str(atom.aval), value.tobytes()), zero=not value.any())

    def _equation(self, eqn: Any, ins: Sequence[Facts]) -> list[Facts]:
        name = name_of(eqn)
        if name in ("eigh", "svd"):
            self._show_all(ins)
            return self._factorised(eqn)
        inner = open_jaxpr(called_jaxpr(eqn.params))[0] if name in CALLS else None
        if inner is not None and len(inner.invars) == len(ins):
            return self.program(inner, ins)
        signs = None
        if any(f.signs for f in ins):
            step = _STEPS.get(name)
            known = step is not None and (name not in _ELEMENTWISE or _in_place(eqn, ins))
            signs = step(eqn, ins) if step is not None and known else None
        if signs is None:
            self._show_all(ins)
            self._inside(eqn)
            signs = frozenset()
        if len(eqn.outvars) != 1:
            return [Facts(key=("only", next(self._count))) for _ in eqn.outvars]
        return [
            Facts(
                signs,
                self._number(eqn, ins),
                zero=name in _SAME_ZERO and ins[0].zero,
                pairs=_makes_pairs(eqn, ins),
                diagonal=_makes_diagonal(eqn, ins),
            )
        ]

    def _show_all(self, ins: Sequence[Facts]) -> None:
        for fact in ins:
            self.show(fact.signs)

    def _inside(self, eqn: Any) -> None:
        """Programs that an equation runs in ways of its own: what leaves them shows its signs."""
        params = list(eqn.params.values())
        for value in jax.tree_util.tree_leaves(params, is_leaf=is_jaxpr):
            if is_jaxpr(value):
                inner = open_jaxpr(value)[0]
                for fact in self.program(inner, [Facts()] * len(inner.invars)):
                    self.show(fact.signs)

    def _factorised(self, eqn: Any) -> list[Facts]:
        group, rank = len(self._of), len(_shape(eqn.invars[0])) - 2
        self._of.append(id(eqn))
        self.equations[id(eqn)] = eqn
        batch = tuple(range(rank))
        columns = Facts(frozenset({(group, (*batch, rank + 1))}))
        rows = Facts(frozenset({(group, (*batch, rank))}))
        if name_of(eqn) == "eigh":
            return [columns, Facts()]
        return [Facts(), columns, rows][: len(eqn.outvars)]

    def _number(self, eqn: Any, ins: Sequence[Facts]) -> Hashable:
        """One number for all equations that compute the same of the same."""
        if name_of(eqn) not in _NUMBERED or any(f.key is None for f in ins):
            return ("only", next(self._count))
        params = tuple((k, str(v)) for k, v in sorted(eqn.params.items()))
        key = (name_of(eqn), params, *(f.key for f in ins))
        return self._numbers.setdefault(key, next(self._count))


def _shape(atom: Any) -> Shape:
    return tuple(getattr(atom.aval, "shape", ()))


# --- diagonal matrices, as the derivative of eigenvalues makes them ---------------------------


def _makes_pairs(eqn: Any, ins: Sequence[Facts]) -> bool:
    if name_of(eqn) != "concatenate" or eqn.params["dimension"] != 1 or len(ins) != 2:
        return False
    columns = [_shape(v) for v in eqn.invars]
    return all(len(s) == 2 and s[1] == 1 for s in columns) and ins[0].key == ins[1].key is not None


def _makes_diagonal(eqn: Any, ins: Sequence[Facts]) -> bool:
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


def _moved(signs: frozenset[Factor], place: Callable[[int], int | None]) -> Any:
    """The signs after their axes moved; None if one of those axes is gone."""
    found = set()
    for group, axes in signs:
        places = [place(a) for a in axes]
        if None in places:
            return None
        found.add((group, tuple(places)))
    return frozenset(found)


def _in_place(eqn: Any, ins: Sequence[Facts]) -> bool:
    """Whether signs lie along axes of the output: elementwise equations spread axes of size 1."""
    out = _shape(eqn.outvars[0])
    for atom, fact in zip(eqn.invars, ins, strict=True):
        shape = _shape(atom)
        for axis in (a for _, axes in fact.signs for a in axes):
            if len(shape) != len(out) or str(shape[axis]) != str(out[axis]):
                return False
    return True


def _keep(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
    out = eqn.outvars[0].aval
    return ins[0].signs if jnp.issubdtype(out.dtype, jnp.inexact) else None


def _transpose(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
    order = tuple(eqn.params["permutation"])
    return _moved(ins[0].signs, order.index)


def _broadcast(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    places = eqn.params["broadcast_dimensions"]

    def place(axis: int) -> int | None:
        return places[axis] if str(before[axis]) == str(after[places[axis]]) else None

    return _moved(ins[0].signs, place)


def _squeeze(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
    gone = {d % len(_shape(eqn.invars[0])) for d in eqn.params["dimensions"]}
    return _moved(ins[0].signs, functools.partial(_without, gone))


def _reduce_sum(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
    return _moved(ins[0].signs, functools.partial(_without, set(eqn.params["axes"])))


def _without(gone: set[int], axis: int) -> int | None:
    return None if axis in gone else axis - sum(g < axis for g in gone)


def _reshape(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
    """One that adds and drops axes of size 1."""
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if list(map(str, without_ones(before))) != list(map(str, without_ones(after))):
        return None
    places = [i for i, d in enumerate(after) if is_symbolic(d) or d != 1]
    olds = [i for i, d in enumerate(before) if is_symbolic(d) or d != 1]
    return _moved(ins[0].signs, dict(zip(olds, places, strict=True)).get)


def _mul(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
    left, right = ins[0].signs, ins[1].signs
    return None if left & right else left | right


def _div(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
    return None if ins[1].signs else ins[0].signs


def _alike(ins: Sequence[Facts]) -> frozenset[Factor] | None:
    """Terms of one sum are multiplied by the same signs, which 0 is by any."""
    terms = [f for f in ins if not f.zero]
    signs = next((f.signs for f in terms if f.signs), frozenset[Factor]())
    # What is 0 off the diagonal does not change with the signs of its rows and its columns.
    twice = all(len(axes) == 1 and (group, (1 - axes[0],)) in signs for group, axes in signs)
    same = (f.signs == signs or (twice and f.diagonal and not f.signs) for f in terms)
    return signs if all(same) else None


def _add(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
    return _alike(ins)


def _select(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
    return None if ins[0].signs else _alike(ins[1:])


def _dot_general(eqn: Any, ins: Sequence[Facts]) -> frozenset[Factor] | None:
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
        free = [i for i in range(len(_shape(eqn.invars[side]))) if i not in used]
        places = {a: i for i, a in enumerate(batch[side])}
        places |= {a: start + i for i, a in enumerate(free)}
        start += len(free)
        moved = _moved(frozenset(signs[side]), places.get)
        if moved is None:
            return None
        found.append(moved)
    return None if found[0] & found[1] else found[0] | found[1]


_STEPS: Mapping[str, Step] = {
    **dict.fromkeys(("neg", "copy", "convert_element_type", "reduce_precision"), _keep),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "reduce_sum": _reduce_sum,
    "mul": _mul,
    "div": _div,
    **dict.fromkeys(("add", "add_any", "sub"), _add),
    "select_n": _select,
    "dot_general": _dot_general,
}
