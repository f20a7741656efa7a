"""Contractions as XLA's CPU backend transposes least for them: the same products, arranged anew."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax import Array, lax

from bucketjit._masking.rule_context import RuleContext
from bucketjit._sizes.expressions import is_symbolic


class Numbers(NamedTuple):
    """The axes of both operands that are contracted, and those of the batch, in pairs."""

    contract: tuple[Sequence[int], Sequence[int]]
    batch: tuple[Sequence[int], Sequence[int]]

    @property
    def exchanged(self) -> Numbers:
        """The same where the operands change sides."""
        return Numbers(self.contract[::-1], self.batch[::-1])


class Arranged(NamedTuple):
    """How a contraction is given to XLA's CPU backend.

    Attributes:
        runs: Contracted axes that become one, in pairs; None if they stay as they are.
        numbers: The dimension numbers after that.
        exchanged: Whether the operands change sides.
    """

    runs: Sequence[tuple[range, range]] | None
    numbers: Numbers
    exchanged: bool


def arranged(ctx: RuleContext, lhs: Array, rhs: Array) -> Arranged | None:
    """How XLA's CPU backend has least to transpose for a ``dot_general``; None if as it stands.

    XLA transposes operands that are contracted along several axes, and slowly where what makes or
    masks them is fused into that. Padding does not care which axis it is on: open axes that lie
    side by side are contracted as one. (The gradient of a dense layer over batch and sequence takes
    0.25 to 1.02 of the time, and of that of plain ``jit``.)

    In a batch of matrices it wants the contracted axis last on the left and first on the right, and
    has what is computed for it written so. The operands change sides where less is transposed then:
    in attention, as ``jnp.einsum`` contracts it, the small result in place of the weights that a
    masked softmax has made. (An encoder takes 0.94 to 0.98 of the time for a row of 34 to 212
    tokens.)

    Args:
        ctx: The equation.
        lhs: Its left operand, filled.
        rhs: Its right one.
    """
    numbers = Numbers(*ctx.params["dimension_numbers"])
    pairs = list(zip(*numbers.contract, strict=True))
    runs, left_shape, right_shape = _runs(pairs), lhs.shape, rhs.shape
    merges = len(runs) < len(pairs) and any(is_symbolic(ctx.in_shapes[0][a]) for a, _ in pairs)
    if merges:
        left, right = zip(*runs, strict=True)
        left_shape, right_shape = _merged(lhs.shape, left), _merged(rhs.shape, right)
        numbers = Numbers(
            (_after(left, [r.start for r in left]), _after(right, [r.start for r in right])),
            (_after(left, numbers.batch[0]), _after(right, numbers.batch[1])),
        )
    exchanged = _may_exchange(ctx.params, lhs, rhs) and _pays(left_shape, right_shape, numbers)
    if not merges and not exchanged:
        return None
    return Arranged(runs if merges else None, numbers, exchanged)


def contracted(ctx: RuleContext, way: Arranged, lhs: Array, rhs: Array) -> Any:
    """A ``dot_general`` of filled operands, arranged so."""
    if way.runs is not None:
        left, right = zip(*way.runs, strict=True)
        lhs = lax.reshape(lhs, _merged(lhs.shape, left))
        rhs = lax.reshape(rhs, _merged(rhs.shape, right))
    if not way.exchanged:
        return ctx.bind(lhs, rhs, dimension_numbers=tuple(way.numbers))
    precision = ctx.params["precision"]
    result = ctx.bind(
        *(rhs, lhs),
        dimension_numbers=tuple(way.numbers.exchanged),
        precision=precision and precision[::-1],
    )
    return lax.transpose(result, _rows_last(lhs.ndim, rhs.ndim, way.numbers))


def _may_exchange(params: Mapping[str, Any], lhs: Array, rhs: Array) -> bool:
    """Whether operands mean the same on either side.

    XLA's CPU backend (jaxlib 0.10 to 0.12) takes operands of one type and results of a wider one on
    the sides that they are on, and fails on some of them where they change.
    """
    precision, result = params["precision"], params["preferred_element_type"]
    if precision is not None:
        # An algorithm is a tuple, too.
        pair = precision if isinstance(precision, tuple) else ()
        if len(pair) != 2 or not all(isinstance(p, lax.Precision) for p in pair):
            return False
    if params["out_sharding"] is not None or lhs.dtype != rhs.dtype:
        return False
    return result is None or result == lhs.dtype


def _pays(lhs: Sequence[int], rhs: Sequence[int], numbers: Numbers) -> bool:
    """Whether less is transposed where operands of these shapes change sides, result included."""
    if not numbers.batch[0]:  # XLA multiplies two matrices as they lie
        return False
    free = math.prod(lhs[a] for a in _free(len(lhs), numbers, 0))
    # The result has what is free on the left in place of what is contracted on the right.
    result = math.prod(rhs) // max(1, math.prod(rhs[a] for a in numbers.contract[1])) * free
    exchanged = _transposed(rhs, lhs, numbers.exchanged)
    return result + exchanged < _transposed(lhs, rhs, numbers)


def _transposed(lhs: Sequence[int], rhs: Sequence[int], numbers: Numbers) -> int:
    """How many elements XLA transposes before it multiplies."""
    left = (*numbers.batch[0], *_free(len(lhs), numbers, 0), *numbers.contract[0])
    right = (*numbers.batch[1], *numbers.contract[1], *_free(len(rhs), numbers, 1))
    moved = 0
    for shape, order in ((lhs, left), (rhs, right)):
        axes = [a for a in order if shape[a] != 1]
        moved += math.prod(shape) if axes != sorted(axes) else 0
    return moved


def _free(rank: int, numbers: Numbers, side: int) -> list[int]:
    """The axes of an operand that are neither contracted nor of the batch."""
    return [a for a in range(rank) if a not in (*numbers.contract[side], *numbers.batch[side])]


def _rows_last(lhs: int, rhs: int, numbers: Numbers) -> list[int]:
    """How to transpose the result of exchanged operands, of ranks ``lhs`` and ``rhs``."""
    batch = len(numbers.batch[0])
    columns = len(_free(rhs, numbers, 1))
    rows = len(_free(lhs, numbers, 0))
    first = batch + columns
    return [*range(batch), *range(first, first + rows), *range(batch, first)]


def _runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[range, range]]:
    """Paired axes of two operands by runs that lie side by side, in one order, on both sides."""
    found: list[tuple[range, range]] = []
    for a, b in sorted(pairs):
        left, right = range(a, a + 1), range(b, b + 1)
        if found and (found[-1][0].stop, found[-1][1].stop) == (a, b):
            before, before_right = found.pop()
            left, right = range(before.start, a + 1), range(before_right.start, b + 1)
        found.append((left, right))
    return found


def _after(runs: Sequence[range], axes: Sequence[int]) -> tuple[int, ...]:
    """Where axes are once each run is one axis."""
    return tuple(a - sum(len(run) - 1 for run in runs if run.stop <= a) for a in axes)


def _merged(shape: Sequence[int], runs: Sequence[range]) -> tuple[int, ...]:
    """A shape once each run is one axis."""
    merged = list(shape)
    for run in sorted(runs, key=lambda run: run.start, reverse=True):
        merged[run.start : run.stop] = [math.prod(shape[run.start : run.stop])]
    return tuple(merged)
