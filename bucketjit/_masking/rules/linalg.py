"""Matrix factorisations and solves.

The padding of a batch axis consists of whole matrices. They are filled so that nothing overflows
and no iteration runs for ever. An axis of the matrix itself is extended by a block of zeros or an
identity block, if the algorithm then computes for the real part exactly what it would compute
without the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from bucketjit._ir.expressions import is_symbolic
from bucketjit._masking.array_ops import crop, window, without_overflow
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules.convolution import fit, fit_all

#: From a context, an operand and its position to the operand with its padding filled.
Fill = Callable[[RuleContext, Any, int], Any]


# --- what padding holds ---------------------------------------------------------------------


def zero(ctx: RuleContext, operand: Array, position: int) -> Any:
    """Zeros in all padding."""
    return ctx.fill(operand, value=0, shape=ctx.in_shapes[position])


def identity(ctx: RuleContext, operand: Array, position: int) -> Any:
    """The matrix with an identity block after it; identity matrices in padded rows."""
    rows, columns = operand.shape[-2:]
    eye = jnp.eye(rows, columns, dtype=operand.dtype)
    return ctx.fill(operand, value=eye, shape=ctx.in_shapes[position])


def _open_matrix(ctx: RuleContext) -> list[Any]:
    return [d for d in ctx.in_shapes[0][-2:] if is_symbolic(d)]


# --- rules ----------------------------------------------------------------------------------


def extended(*fills: Fill) -> Rule:
    """Fill each operand's padding and run: exact over batch axes and matrix axes alike."""

    def rule(ctx: RuleContext, *operands: Array) -> Any:
        filled = [f(ctx, x, i) for i, (f, x) in enumerate(zip(fills, operands, strict=True))]
        return fit_all(ctx, ctx.bind(*filled))

    return rule


def batched(ctx: RuleContext, operand: Array) -> Any:
    """Open batch axes only."""
    if sizes := _open_matrix(ctx):
        ctx.refuse(
            f"a matrix of symbolic size {sizes[0]}: padding would mix its eigenvalues with those "
            "of the matrix"
        )
    return fit_all(ctx, ctx.bind(identity(ctx, operand, 0)))


def lu(ctx: RuleContext, operand: Array) -> Any:
    """A square matrix gets an identity block, any other zeros.

    A row of zeros is never the pivot of a real column: the first of equal candidates is chosen.
    Columns of zeros come after the real columns and move no rows. If there is a NaN, no candidate
    is chosen, and the pivots differ from those without padding.
    """
    rows, columns = ctx.in_shapes[0][-2:]
    return fit_all(ctx, ctx.bind((identity if rows == columns else zero)(ctx, operand, 0)))


def lu_pivots_to_permutation(ctx: RuleContext, pivots: Array) -> Any:
    """Padding swaps nothing."""
    last, size = pivots.ndim - 1, min(pivots.shape[-1], ctx.params["permutation_size"])
    # Each index itself is a step of a permutation that moves nothing.
    filled = ctx.fill(pivots, value=lax.broadcasted_iota(pivots.dtype, pivots.shape, last))
    return fit(ctx, ctx.bind(crop(filled, last, size)))


def reflectors(ctx: RuleContext, *operands: Array) -> Any:
    """Householder reflectors: zeros after a reflector and a factor 0 leave everything as it is."""
    rows = operands[0].shape[-2]
    a, taus, *rest = (zero(ctx, x, i) for i, x in enumerate(operands))
    a = crop(a, a.ndim - 1, min(rows, a.shape[-1]))
    taus = crop(taus, taus.ndim - 1, min(a.shape[-1], taus.shape[-1]))
    return fit(ctx, ctx.bind(a, taus, *rest))


def tridiagonal(ctx: RuleContext, operand: Array) -> Any:
    """The lower form works from the first column on, so zeros after the matrix stay zeros."""
    if (sizes := _open_matrix(ctx)) and not ctx.params["lower"]:
        ctx.refuse(
            f"a matrix of symbolic size {sizes[0]} with lower=False: "
            "the reduction starts at its last column",
            "use lower=True",
        )
    return fit_all(ctx, ctx.bind(zero(ctx, operand, 0)))


def triangular_solve(ctx: RuleContext, matrix: Array, rhs: Array) -> Any:
    """An identity block after the matrix, nothing after the right-hand side."""
    ctx.require_equal(ctx.in_shapes[0][:-2], ctx.in_shapes[1][:-2])
    return fit_all(ctx, ctx.bind(identity(ctx, matrix, 0), zero(ctx, rhs, 1)))


def tridiagonal_solve(ctx: RuleContext, lower: Array, main: Array, upper: Array, rhs: Array) -> Any:
    """An identity block after the system, not coupled to it by what lies off its diagonals."""
    lower, rhs = zero(ctx, lower, 0), zero(ctx, rhs, 3)
    main = ctx.fill(main, value=1, shape=ctx.in_shapes[1])
    upper = zero(ctx, upper, 2)
    size = ctx.in_shapes[2][-1]
    if is_symbolic(size):  # the last entry lies outside of the matrix and would couple the block
        index = lax.broadcasted_iota(jnp.int32, upper.shape, upper.ndim - 1)
        upper = jnp.where(index < ctx.logical(size) - 1, upper, jnp.zeros((), upper.dtype))
    return fit(ctx, ctx.bind(lower, main, upper, rhs))


def eigh(ctx: RuleContext, operand: Array) -> Any:
    """Eigenvalues of a matrix of symbolic size: padding adds some that sort after all of them.

    The eigenvectors of a matrix with a block added are those of the matrix, up to their signs. The
    eigenvectors of equal eigenvalues are any basis of a space, and the basis that LAPACK picks
    depends on the padded size. A program that treats such vectors one by one therefore gets other
    numbers than without padding.

    For a matrix that is not finite, all results are NaN. (LAPACK on CPU returns some numbers
    nevertheless; which ones depends on the places of the NaNs and on the size.) A matrix of a
    single row is its own eigenvalue, and its eigenvector is 1, whatever it holds.
    """
    sizes = _open_matrix(ctx)
    matrix = zero(ctx, operand, 0)
    if not sizes:
        return fit_all(ctx, ctx.bind(matrix))
    if ctx.is_read(0) and not _up_to_sign(ctx):
        ctx.refuse(
            f"eigenvectors of a matrix of symbolic size {sizes[0]}: their signs depend on "
            "the padded size",
            "use eigvalsh, or leave the axis static",
        )
    if ctx.params.get("subset_by_index") is not None:
        ctx.refuse(
            f"a subset of the eigenvalues of a matrix of symbolic size {sizes[0]}",
            "compute all of them and slice, or leave the axis static",
        )
    if not ctx.params["sort_eigenvalues"]:
        ctx.refuse(
            f"unsorted eigenvalues of a matrix of symbolic size {sizes[0]}",
            "use sort_eigenvalues=True, or leave the axis static",
        )
    # Only the triangle that `eigh` reads counts for the scale, the bound and the NaN check.
    half = jnp.tril(matrix) if ctx.params["lower"] else jnp.triu(matrix)
    matrix, back = without_overflow(half, (-2, -1), 16 * matrix.shape[-1])
    vectors, values = ctx.bind(_with_large_eigenvalues(ctx, matrix))
    is_finite = jnp.isfinite(half).all((-2, -1))[..., None]
    values = jnp.where(is_finite, values * back[..., 0], jnp.nan)
    vectors = jnp.where(is_finite[..., None], vectors, jnp.nan)
    is_single = ctx.logical(sizes[0]) == 1
    values = jnp.where(is_single, jnp.real(jnp.diagonal(half, 0, -2, -1)), values)
    vectors = jnp.where(is_single, jnp.eye(half.shape[-1], dtype=half.dtype), vectors)
    return fit_all(ctx, [vectors, values])


def _up_to_sign(ctx: RuleContext) -> bool:
    """Whether vectors will do whose signs are others: those of complex ones are any phases.

    The signs of real vectors can be followed. Complex vectors are determined up to a phase.
    """
    real = jnp.issubdtype(ctx.in_avals[0].dtype, jnp.floating)
    return bool(real) and ctx.signs_are_hidden()


def _with_large_eigenvalues(ctx: RuleContext, matrix: Array) -> Any:
    """Put a bound of the eigenvalues (Gershgorin's, doubled) on the padded diagonal.

    Twice Gershgorin's bound is larger than every eigenvalue of the matrix, so the eigenvalues of
    the padding sort after them.
    """
    half = jnp.abs(matrix)
    bound = 2 * jnp.max(jnp.sum(half, -1) + jnp.sum(half, -2), -1, initial=0)[..., None, None]
    bound = jnp.where(bound == 0, jnp.ones_like(bound), bound)
    diagonal = bound.astype(matrix.dtype) * jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    return ctx.fill(matrix, axes=(-2, -1), value=diagonal, shape=ctx.in_shapes[0])


def svd(ctx: RuleContext, operand: Array) -> Any:
    """Rows and columns of zeros add singular values of 0, which come last.

    Singular vectors are those of the matrix up to their signs. Those of equal singular values are
    any basis, as in `eigh`.
    """
    if sizes := _open_matrix(ctx):
        if ctx.params.get("subset_by_index") is not None:
            ctx.refuse(
                f"a subset of the singular values of a matrix of symbolic size {sizes[0]}",
                "compute all of them and slice, or leave the axis static",
            )
        if any(map(ctx.is_read, range(1, len(ctx.out_shapes)))):
            if not _up_to_sign(ctx):
                ctx.refuse(
                    f"singular vectors of a matrix of symbolic size {sizes[0]}: their signs depend "
                    "on the padded size",
                    "use compute_uv=False, or leave the axis static",
                )
            return _singular_vectors(ctx, zero(ctx, operand, 0))
    return fit_all(ctx, ctx.bind(zero(ctx, operand, 0)))


def _singular_vectors(ctx: RuleContext, matrix: Array) -> list[Any]:
    """Those of the square factor R of a tall matrix, which is ``Q @ R``, turned by Q.

    R gets a block with singular values larger than all singular values of R. So a singular value of
    0 does not mix with those of the padding. The larger ones come first, and the results are
    read from there.
    """
    rows, columns = ctx.in_shapes[0][-2:]
    count = ctx.out_shapes[0][-1]
    wide = str(count) == str(rows)
    if not wide and str(count) != str(columns):
        ctx.refuse(f"singular vectors of a matrix whose smaller size is not known: {count}")
    if ctx.params["full_matrices"] and str(rows) != str(columns):
        ctx.refuse(
            f"all singular vectors of a matrix of symbolic size {rows} x {columns}: those of its "
            "null space are any",
            "use full_matrices=False, or leave the axis static",
        )
    if wide:
        matrix = matrix.mT
    size = ctx.padded(count)
    matrix, back = without_overflow(matrix, (-2, -1), 16 * matrix.shape[-1] * matrix.shape[-2])
    tall = crop(matrix, matrix.ndim - 2, max(size, matrix.shape[-2]))
    q, r = lax.linalg.qr(tall, full_matrices=False)
    square = (*ctx.in_shapes[0][:-2], count, count)
    if is_symbolic(count):
        r = ctx.fill(r, value=0, shape=square)
        largest = jnp.max(jnp.abs(r), (-2, -1), keepdims=True)
        largest = jnp.where(largest == 0, jnp.ones_like(largest), largest)
        bound = 2 * largest * jnp.sqrt(jnp.sum((r / largest) ** 2, (-2, -1), keepdims=True) + 1)
        block = bound * jnp.eye(size, dtype=r.dtype)
        r = ctx.fill(r, value=block, shape=square)
    s, u, vt = ctx.bind(r, full_matrices=False)
    s = s * back[..., 0]
    # The singular values of the block are the largest, so they come first: shift them out.
    if is_symbolic(count):
        added = size - ctx.logical(count)
        s = window(s, s.ndim - 1, added, size, last=size)
        u = window(u, u.ndim - 1, added, size, last=size)
        vt = window(vt, vt.ndim - 2, added, size, last=size)
        u = ctx.fill(u, value=0, shape=square)
        vt = ctx.fill(vt, value=0, shape=square)
    u = jnp.matmul(q, u, precision=lax.Precision.HIGHEST)
    return fit_all(ctx, [s, vt.mT, u.mT] if wide else [s, u, vt])


TABLE: dict[Any, Rule] = {
    "cholesky": extended(identity),
    "cholesky_update": extended(identity, zero),
    "triangular_solve": triangular_solve,
    "lu": lu,
    "lu_pivots_to_permutation": lu_pivots_to_permutation,
    "qr": extended(zero),
    "geqrf": extended(zero),
    "geqp3": extended(zero, zero),
    "householder_product": reflectors,
    "ormqr": reflectors,
    "hessenberg": extended(zero),
    "tridiagonal": tridiagonal,
    "tridiagonal_solve": tridiagonal_solve,
    "symmetric_product": extended(zero, zero),
    "eigh": eigh,
    "svd": svd,
    **dict.fromkeys(("eig", "schur"), batched),
}
