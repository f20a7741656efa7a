"""Which results of a program are the same on all shards, though each shard has rows of its own.

    a:f32[n, 3]                             rows of a shard: differs
    b:f32[3] = reduce_sum a                 differs
    c:f32[3] = psum[axes=('d',)] b          the same
    d:f32[3] = mul c lr                     the same, as both are

Arguments without open axes are the same on all shards. A branch or a loop whose condition differs
has results that differ.

Programs that combine gradients over uneven shards in two ways at once are refused:

    c:f32[] = shard_psum[is_transposed=True] b     the gradient of a psum
    d:f32[] = shard_mean[is_transposed=False] c    a pmean of it

A mean weighs shards by their rows, and a sum does not. A gradient that was taken through a sum is
right if it is summed in the end, and one that was taken through means if it is averaged. On shards
with equally many rows both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from bucketjit._ir.dataflow import Analysis, follow, table, through
from bucketjit._ir.expressions import is_symbolic
from bucketjit._ir.program import Program
from bucketjit._ir.shard_reductions import COMBINED, shard_mean_p, shard_psum_p
from bucketjit._jax.jaxprs import all_equations, bodies, is_jaxpr, open_jaxpr, shape_of
from bucketjit._jax.primitives import CALLBACKS
from bucketjit._jax.user_code import source_line
from bucketjit.errors import MaskingError


def is_same_on_all(program: Program, axis: Any) -> list[bool]:
    """For each result of a program, whether all shards have the same."""
    return _followed(_SameOnAll(axis), program)[: len(program.out_shapes)]


def refuse_two_weightings(program: Program) -> None:
    """Refuse a program that sums gradients of means, or averages gradients of sums."""
    _followed(_OneWeighting(), program)


def _followed(analysis: Analysis[Any], program: Program) -> list[Any]:
    """What an analysis finds of the results of a program."""
    jaxpr = program.jaxpr
    constants = {var: analysis.unknown(var) for var in jaxpr.constvars}
    return follow(analysis, jaxpr, list(map(analysis.unknown, jaxpr.invars)), constants)


class _SameOnAll(Analysis[bool]):
    """Whether a value is the same on all shards."""

    def __init__(self, axis: Any) -> None:
        self._axis = axis
        self.table = table(
            {
                "psum pmax pmin all_gather": self._combined,
                "axis_index ppermute all_to_all reduce_scatter pbroadcast": _differs,
                " ".join(CALLBACKS): _differs,
                "cond": self._branches,
                "while": self._while_loop,
                "scan": self._scan,
            }
        )

    def unknown(self, atom: Any) -> bool:
        return not _is_open(atom)

    def literal(self, atom: Literal) -> bool:
        return True

    def join(self, one: bool, other: bool) -> bool:
        return one and other

    def row(self, value: bool, var: Var) -> bool:
        return value and not _is_open(var)

    stacked = row

    def default(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        if eqn.primitive in COMBINED:
            return [True]
        same = all(ins) and not _mentions_size(list(eqn.params.values()))
        return [same and not _is_open(var) for var in eqn.outvars]

    def _combined(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        over = self._axis in _axes(eqn) and not eqn.params.get("axis_index_groups")
        same = ins if len(ins) == len(eqn.outvars) else [all(ins)] * len(eqn.outvars)
        return [(over or x) and not _is_open(v) for x, v in zip(same, eqn.outvars, strict=True)]

    def _branches(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        outs = through(self, eqn, ins)
        return outs if ins[0] else self._different(eqn, "condition")

    def _while_loop(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        outs = through(self, eqn, ins)
        condition = open_jaxpr(eqn.params["cond_jaxpr"])[0]
        consts = ins[: eqn.params["cond_nconsts"]]
        (goes_on,) = follow(self, condition, [*consts, *outs])
        return outs if goes_on else self._different(eqn, "condition")

    def _scan(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        if is_symbolic(eqn.params["length"]):
            return self._different(eqn, "number of steps")
        return through(self, eqn, ins)

    def _different(self, eqn: JaxprEqn, what: str) -> Sequence[bool]:
        """The results of a branch or a loop that differs, in which no collective may be."""
        for inner in (inner for body in bodies(eqn) for inner in all_equations(body)):
            waits = self._axis in _axes(inner) and inner.primitive.name != "axis_index"
            if waits or inner.primitive in COMBINED:
                raise MaskingError(
                    f"{eqn.primitive.name}: it holds a collective, and its {what} differs from "
                    "shard to shard, so shards would wait for each other for ever"
                    + _line(source_line(inner, (eqn,)) or source_line(eqn)),
                    "decide by a value that is the same on all shards, such as jax.lax.pmax "
                    "of it, or take the collective out",
                )
        return _differs(eqn, ())


_Through = frozenset[Any]  # the primitives whose transposes a value was computed by

_NAMES = {shard_mean_p: "pmean", shard_psum_p: "psum"}


class _OneWeighting(Analysis[_Through]):
    """Which transposes a value was computed by."""

    def unknown(self, atom: Any) -> _Through:
        return frozenset()

    def join(self, one: _Through, other: _Through) -> _Through:
        return one | other

    def row(self, value: _Through, var: Any) -> _Through:
        return value

    stacked = row

    def default(self, eqn: JaxprEqn, ins: Sequence[_Through]) -> Sequence[_Through]:
        before, primitive = frozenset().union(*ins), eqn.primitive
        if primitive not in _NAMES:
            return [before] * len(eqn.outvars)
        if eqn.params["is_transposed"]:
            return [before | {primitive}]
        if others := sorted(_NAMES[p] for p in before - {primitive}):
            raise MaskingError(
                f"a gradient that was taken through {others[0]} is combined by "
                f"{_NAMES[primitive]}, which weighs shards of different sizes in another way"
                + _line(source_line(eqn)),
                "use jax.lax.pmean for both, or psum for both; or take the gradient of the sum of "
                "each shard, and divide its psum by the psum of what it counts",
            )
        return [frozenset()]


def _axes(eqn: JaxprEqn) -> Sequence[Any]:
    """The axes that a collective names."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return names if isinstance(names, tuple | list) else (names,)


def _line(line: str | None) -> str:
    return f" [{line}]" if line else ""


def _differs(eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
    return [False] * len(eqn.outvars)


def _is_open(atom: Any) -> bool:
    return any(map(is_symbolic, shape_of(atom)))


def _mentions_size(value: Any) -> bool:
    """Whether a parameter holds a size, in tuples and in programs too."""
    if is_jaxpr(value):
        inner = open_jaxpr(value)[0]
        return any(
            any(map(_is_open, (*eqn.invars, *eqn.outvars)))
            or _mentions_size(list(eqn.params.values()))
            for eqn in inner.eqns
        )
    if isinstance(value, tuple | list):
        return any(map(_mentions_size, value))
    if is_symbolic(value):
        return True
    leaves = jax.tree_util.tree_leaves(value)
    return len(leaves) > 1 and any(map(_mentions_size, leaves))
