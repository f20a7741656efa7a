"""Which results of a program are the same on all shards, though each shard has rows of its own.

    a:f32[n, 3]                             rows of a shard: differs
    b:f32[3] = reduce_sum a                 differs
    c:f32[3] = psum[axes=('d',)] b          the same
    d:f32[3] = mul c lr                     the same, as both are

Arguments without open axes are the same on all shards. A branch or a loop whose condition differs
has results that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from bucketjit._ir.dataflow import Analysis, follow, table, through
from bucketjit._ir.shard_reductions import COMBINED
from bucketjit._jax.jaxprs import all_equations, bodies, is_jaxpr, open_jaxpr, shape_of
from bucketjit._jax.primitives import CALLBACKS
from bucketjit._jax.user_code import source_line
from bucketjit._sizes.expressions import is_symbolic
from bucketjit._tracing.program import Program
from bucketjit.errors import MaskingError


def is_same_on_all(program: Program, axis: Any) -> list[bool]:
    """For each result of a program, whether all shards have the same."""
    jaxpr = program.jaxpr
    analysis = _SameOnAll(axis)
    constants = {var: analysis.unknown(var) for var in jaxpr.constvars}
    found = follow(analysis, jaxpr, list(map(analysis.unknown, jaxpr.invars)), constants)
    return found[: len(program.out_shapes)]


class _SameOnAll(Analysis[bool]):
    """Whether a value is the same on all shards."""

    def __init__(self, axis: Any) -> None:
        self._axis = axis
        self.table = {
            **table(
                {
                    "psum pmax pmin": self._combined,
                    "all_gather": self._gathered,
                    "axis_index ppermute all_to_all reduce_scatter pbroadcast": _differs,
                    " ".join(CALLBACKS): _differs,
                    "cond": self._branches,
                    "while": self._while_loop,
                    "scan": self._scan,
                }
            ),
        }

    def unknown(self, atom: Any) -> bool:
        return not _is_open(atom)

    def literal(self, atom: Literal) -> bool:
        return True

    def join(self, one: bool, other: bool) -> bool:
        return one and other

    def row(self, value: bool, var: Var) -> bool:
        return value and not _is_open(var)

    def stacked(self, value: bool, var: Var) -> bool:
        return value and not _is_open(var)

    def default(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        if eqn.primitive in COMBINED:
            return [True]
        same = all(ins) and not _mentions_size(list(eqn.params.values()))
        return [same and not _is_open(var) for var in eqn.outvars]

    def _combined(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        over = self._axis in eqn.params["axes"] and not eqn.params.get("axis_index_groups")
        return [
            (over or same) and not _is_open(v) for same, v in zip(ins, eqn.outvars, strict=True)
        ]

    def _gathered(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        names = eqn.params["axis_name"]
        names = names if isinstance(names, tuple | list) else (names,)
        over = self._axis in names and not eqn.params.get("axis_index_groups")
        return [
            (over or same) and not _is_open(v) for same, v in zip(ins, eqn.outvars, strict=True)
        ]

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
        for body in bodies(eqn):
            for inner in all_equations(body):
                if self._combines(inner):
                    line = source_line(inner, (eqn,)) or source_line(eqn)
                    where = f" [{line}]" if line else ""
                    raise MaskingError(
                        f"{eqn.primitive.name}: it holds a collective, and its {what} differs from "
                        f"shard to shard, so shards would wait for each other for ever{where}",
                        "decide by a value that is the same on all shards, such as jax.lax.pmax "
                        "of it, or take the collective out",
                    )
        return _differs(eqn, ())

    def _combines(self, eqn: JaxprEqn) -> bool:
        """Whether an equation waits for other shards."""
        if eqn.primitive in COMBINED:
            return True
        names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        names = names if isinstance(names, tuple | list) else (names,)
        return self._axis in names and eqn.primitive.name != "axis_index"


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
