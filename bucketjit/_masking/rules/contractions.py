"""Contractions: both operands hold zero in the padding of every contracted axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax import Array, lax

from bucketjit._ir.expressions import Dim, is_symbolic
from bucketjit._jax.arrays import on_one_cpu
from bucketjit._masking.array_ops import crop
from bucketjit._masking.rule_context import Rule, RuleContext

# --- cpu contractions ---------------------------------------------------------------------------

# Contractions arranged so that XLA's CPU backend transposes least before it multiplies.
#
#     before   c = dot_general[contract=(0, 1), (0, 1)] a:f32[b,n,i] d:f32[b,n,o]
#     after    e = reshape a:f32[b*n,i]
#              f = reshape d:f32[b*n,o]
#              c = dot_general[contract=(0,), (0,)] e f
#
# The products are the same. `bucketjit._masking.rules.contractions` uses this on a CPU only,
# and not on several: a mesh could cut one of the axes that are merged.


class Numbers(NamedTuple):
    """The dimension numbers of a ``dot_general``, in pairs of left and right operand.

    Attributes:
        contract: The contracted axes of each operand.
        batch: The batch axes of each operand.
    """

    contract: tuple[Sequence[int], Sequence[int]]
    batch: tuple[Sequence[int], Sequence[int]]

    @property
    def exchanged(self) -> Numbers:
        """The same where the operands change sides."""
        return Numbers(self.contract[::-1], self.batch[::-1])


def _on_cpu(ctx: RuleContext, lhs: Array, rhs: Array) -> Any:
    """A ``dot_general`` of filled operands, arranged so that XLA's CPU backend transposes least.

    If operands are contracted along several axes, XLA transposes them. That is slow if the equation
    that computes or masks the operand is fused into the transpose. Padding may be on any axis, so
    adjacent contracted axes are merged into one before the contraction. (The gradient of a dense
    layer over batch and sequence takes 0.25 to 1.02 of the time, and of the time of plain ``jit``.)

    In a batch of matrices, XLA wants the contracted axis last on the left and first on the right,
    and writes computed operands in that layout. The operands change sides if fewer elements are
    transposed then. In attention, as ``jnp.einsum`` contracts it, the small result is then
    transposed in place of the weights of a masked softmax. (An encoder takes 0.94 to 0.98 of the
    time for a row of 34 to 212 tokens.)
    """
    numbers = Numbers(*ctx.params["dimension_numbers"])
    pairs = list(zip(*numbers.contract, strict=True))
    runs = _runs(pairs)
    may_exchange = _may_exchange(ctx.params, lhs, rhs)
    # Only if an open axis is contracted: without one there is no fill to fuse into a transpose.
    merges = len(runs) < len(pairs) and any(is_symbolic(ctx.in_shapes[0][a]) for a, _ in pairs)
    if merges:
        left, right = zip(*runs, strict=True)
        lhs = lax.reshape(lhs, _merged(lhs.shape, left))
        rhs = lax.reshape(rhs, _merged(rhs.shape, right))
        numbers = Numbers(
            (_after(left, [r.start for r in left]), _after(right, [r.start for r in right])),
            (_after(left, numbers.batch[0]), _after(right, numbers.batch[1])),
        )
    if not (may_exchange and _pays(lhs.shape, rhs.shape, numbers)):
        changed = {"dimension_numbers": tuple(numbers)} if merges else {}
        return ctx.bind(lhs, rhs, **changed)
    precision, exchanged = ctx.params["precision"], tuple(numbers.exchanged)
    precision = precision and precision[::-1]
    result = ctx.bind(rhs, lhs, dimension_numbers=exchanged, precision=precision)
    return lax.transpose(result, _rows_last(lhs.ndim, rhs.ndim, numbers))


def _may_exchange(params: Mapping[str, Any], lhs: Array, rhs: Array) -> bool:
    """Whether operands mean the same on either side.

    On CPU, XLA (jaxlib 0.10 to 0.12) accepts operands of one type with results of a wider type as
    JAX writes them. It fails on some of them if the operands change sides.
    """
    precision, result = params["precision"], params["preferred_element_type"]
    if precision is not None:
        # A dot algorithm is a tuple, too.
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
        axes = [a for a in order if shape[a] != 1]  # moving an axis of size 1 moves no element
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
    runs: list[tuple[range, range]] = []
    for a, b in sorted(pairs):
        left, right = range(a, a + 1), range(b, b + 1)
        if runs and (runs[-1][0].stop, runs[-1][1].stop) == (a, b):
            before, before_right = runs.pop()
            left, right = range(before.start, a + 1), range(before_right.start, b + 1)
        runs.append((left, right))
    return runs


def _after(runs: Sequence[range], axes: Sequence[int]) -> tuple[int, ...]:
    """Where axes are once each run is one axis."""
    return tuple(a - sum(len(run) - 1 for run in runs if run.stop <= a) for a in axes)


def _merged(shape: Sequence[int], runs: Sequence[range]) -> tuple[int, ...]:
    merged = list(shape)
    for run in sorted(runs, key=lambda run: run.start, reverse=True):
        merged[run.start : run.stop] = [math.prod(shape[run.start : run.stop])]
    return tuple(merged)


# --- contractions -------------------------------------------------------------------------------


def _matched(arrays: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> list[Any]:
    """Crop paired axes of two operands, equal at run time, to one padded size."""
    left, right = arrays
    for a, b in pairs:
        size = min(left.shape[a], right.shape[b])
        left, right = crop(left, a, size), crop(right, b, size)
    return [left, right]


def dot_general(ctx: RuleContext, lhs: Array, rhs: Array) -> Any:
    """Contracted padding adds nothing: it is zero on both sides, or known not to matter."""
    contract, batch = ctx.params["dimension_numbers"]
    lhs, rhs = ctx.fill_products(lhs, rhs)
    lhs, rhs = _matched((lhs, rhs), [*zip(*contract, strict=True), *zip(*batch, strict=True)])
    return _on_cpu(ctx, lhs, rhs) if on_one_cpu() else ctx.bind(lhs, rhs)


def ragged_dot_general(ctx: RuleContext, lhs: Array, rhs: Array, group_sizes: Array) -> Any:
    """As `dot_general`; padded groups have no rows and meet zeros.

    Groups are laid out from the front of the ragged axis, so its padding stays at its end.
    """
    numbers = ctx.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    lhs = ctx.fill(lhs, axes=contract[0], value=0)
    rhs = ctx.fill(rhs, axes=(*contract[1], *numbers.rhs_group_dimensions), value=0)
    group_sizes = ctx.fill(group_sizes, value=0)
    pairs = [*zip(*contract, strict=True), *zip(*batch, strict=True)]
    lhs, rhs = _matched((lhs, rhs), pairs)
    return ctx.bind(lhs, rhs, group_sizes)


def scaled_dot(ctx: RuleContext, *operands: Array) -> Any:
    """As `dot_general`; padded scales are one, since a scale type need not have a zero."""
    contract, batch = ctx.params["dimension_numbers"]
    filled = []
    for position, operand in enumerate(operands):
        axes = contract[position % 2]
        filled.append(ctx.fill(operand, axes=axes, value=0 if position < 2 else 1))
    pairs = [*zip(*contract, strict=True), *zip(*batch, strict=True)]
    sides, scales = _matched(filled[:2], pairs), filled[2:]
    for side, axes in enumerate(contract):
        for axis in axes:
            size, count = ctx.in_shapes[side][axis], ctx.in_shapes[2 + side][axis]
            if not _whole_blocks(size, count, sides[side].shape[axis], scales[side].shape[axis]):
                ctx.refuse(
                    "a padded axis would not consist of whole blocks of one scale", in_bucket=True
                )
    return ctx.bind(*sides, *scales)


def _whole_blocks(size: Dim, count: Dim, padded_size: int, padded_count: int) -> bool:
    """Whether padding leaves the blocks that share a scale as they are."""
    if not is_symbolic(size) or (isinstance(count, int) and count == 1):
        return True
    block = size // count
    # `size // count` is an int only if the block size is the same at all logical sizes.
    return isinstance(block, int) and padded_size == block * padded_count


TABLE: dict[Any, Rule] = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "scaled_dot": scaled_dot,
}
