"""Refuses programs that combine gradients over uneven shards in two ways at once.

    c:f32[] = shard_psum[is_transposed=True] b     the gradient of a psum
    d:f32[] = shard_mean[is_transposed=False] c    a pmean of it

A mean weighs shards by their rows, and a sum does not. A gradient that was taken through a sum is
right if it is summed in the end, and one that was taken through means if it is averaged. On shards
with equally many rows both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from bucketjit._ir.dataflow import Analysis, follow
from bucketjit._ir.shard_reductions import shard_mean_p, shard_psum_p
from bucketjit._jax.user_code import source_line
from bucketjit._tracing.program import Program
from bucketjit.errors import MaskingError

_Through = frozenset[Any]  # the primitives whose transposes a value was computed by

_NAMES = {shard_mean_p: "pmean", shard_psum_p: "psum"}


def refuse_two_weightings(program: Program) -> None:
    """Refuse a program that sums gradients of means, or averages gradients of sums."""
    jaxpr = program.jaxpr
    nothing: _Through = frozenset()
    constants = dict.fromkeys(jaxpr.constvars, nothing)
    follow(_OneWeighting(), jaxpr, [nothing] * len(jaxpr.invars), constants)


class _OneWeighting(Analysis[_Through]):
    """Which transposes a value was computed by."""

    table = {}

    def unknown(self, atom: Any) -> _Through:
        return frozenset()

    def literal(self, atom: Literal) -> _Through:
        return frozenset()

    def join(self, one: _Through, other: _Through) -> _Through:
        return one | other

    def row(self, value: _Through, var: Any) -> _Through:
        return value

    def stacked(self, value: _Through, var: Any) -> _Through:
        return value

    def default(self, eqn: JaxprEqn, ins: Sequence[_Through]) -> Sequence[_Through]:
        before = frozenset().union(*ins)
        primitive = eqn.primitive
        if primitive in _NAMES:
            if eqn.params["is_transposed"]:
                return [before | {primitive}]
            if others := sorted(_NAMES[p] for p in before - {primitive}):
                _refuse(eqn, others[0], _NAMES[primitive])
            return [frozenset()]
        return [before] * len(eqn.outvars)


def _refuse(eqn: JaxprEqn, taken: str, combined: str) -> None:
    line = source_line(eqn)
    where = f" [{line}]" if line else ""
    raise MaskingError(
        f"a gradient that was taken through {taken} is combined by {combined}, which weighs shards "
        f"of different sizes in another way{where}",
        "use jax.lax.pmean for both, or psum for both; or take the gradient of the sum of each "
        "shard, and divide its psum by the psum of what it counts",
    )
