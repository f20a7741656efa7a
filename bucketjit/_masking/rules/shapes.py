"""Primitives that move whole axes, join and cut: broadcasts, transposes, concatenations.

Most keep the invariant by themselves: an axis that is carried over as a whole keeps its real data
at the front. Primitives that join or cut along a symbolic axis do so at logical offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from bucketjit._jax.primitives import primitive, primitives
from bucketjit._masking.array_ops import crop, take, window
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._sizes.expressions import Dim, is_symbolic


def carry(ctx: RuleContext, *operands: Array) -> Any:
    """Whole axes are kept, moved, or repeated from size 1: the front stays the front."""
    return ctx.bind(*operands)


def concatenate(ctx: RuleContext, *operands: Array) -> Any:
    """Every piece is written at the logical end of those before it, over their padding."""
    axis = ctx.params["dimension"]
    sizes = [shape[axis] for shape in ctx.in_shapes]
    runs = _runs(sizes)
    parts = [lax.concatenate([operands[i] for i in run], axis) for run in runs]
    offsets = [sum(sizes[: run[0]]) for run in runs]
    ends = [ctx.padded(o) + p.shape[axis] for o, p in zip(offsets, parts, strict=True)]
    out = crop(parts[0], axis, max(ends)) if len(parts) > 1 else parts[0]
    # In this order, so that each piece overwrites the padding of those before it.
    for offset, part in zip(offsets[1:], parts[1:], strict=True):
        out = lax.dynamic_update_slice_in_dim(out, part, ctx.logical(offset), axis)
    return crop(out, axis, ctx.padded(ctx.out_shapes[0][axis]))


def _runs(sizes: Sequence[Dim]) -> list[list[int]]:
    """Positions of the pieces that lie next to each other at padded sizes too.

    Only the last piece of a run may be symbolic: its padding is then the padding of the run.
    """
    runs: list[list[int]] = [[]]
    for i, size in enumerate(sizes):
        runs[-1].append(i)
        if is_symbolic(size) and i + 1 < len(sizes):
            runs.append([])
    return runs


def split(ctx: RuleContext, operand: Array) -> list[Any]:
    """Every piece is read from the logical end of those before it."""
    axis, sizes = ctx.symbolic_params["axis"], ctx.symbolic_params["sizes"]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        window(operand, axis, ctx.logical(offset), ctx.padded(size), last=ctx.padded(offset))
        for offset, size in zip(offsets, sizes, strict=True)
    ]


def tile(ctx: RuleContext, operand: Array) -> Any:
    """Copies of a symbolic axis follow each other at its logical size, by computed index."""
    reps = ctx.symbolic_params["reps"]
    dims = ctx.in_shapes[0]
    plain = [1 if is_symbolic(d) else ctx.padded(r) for d, r in zip(dims, reps, strict=True)]
    out = operand if all(r == 1 for r in plain) else ctx.bind(operand, reps=tuple(plain))
    for axis, (dim, rep) in enumerate(zip(dims, reps, strict=True)):
        size = ctx.padded(ctx.out_shapes[0][axis])
        if is_symbolic(dim) and (is_symbolic(rep) or rep != 1):
            positions = lax.iota(jnp.int32, size) % jnp.maximum(ctx.logical(dim), 1)
            out = take(out, positions, axis)
        else:
            out = crop(out, axis, size)
    return out


_CARRIED = ("broadcast_in_dim", "transpose", "squeeze", "iota", "empty", "stack", "unstack")

TABLE: dict[Any, Rule] = dict.fromkeys(primitives(*_CARRIED), carry)
TABLE |= {
    p: rule
    for name, rule in {"concatenate": concatenate, "split": split, "tile": tile}.items()
    if (p := primitive(name)) is not None
}
