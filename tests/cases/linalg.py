"""Factorisations and solves over open batch axes and open matrix axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax import lax

from bucketjit._jax.jaxprs import primitive
from tests.harness import Arg, cases, family

la = lax.linalg


def positive(x: Any, rng: np.random.Generator) -> Any:
    """Symmetric positive definite, with eigenvalues well apart."""
    n = x.shape[-1]
    return (x @ np.conj(np.swapaxes(x, -1, -2)) + np.diag(np.arange(n) + n)).astype(x.dtype)


def regular(x: Any, rng: np.random.Generator) -> Any:
    """Well conditioned, and in need of pivoting."""
    n = x.shape[-1]
    return (x + 4 * np.eye(n)[rng.permutation(n)]).astype(x.dtype)


def small(x: Any, rng: np.random.Generator) -> Any:
    return (x / 4).astype(x.dtype)


def singular(x: Any, rng: np.random.Generator) -> Any:
    """A row and a column of zeros."""
    x = np.array(x)
    x[..., x.shape[-2] // 2, :] = 0
    x[..., :, 0] = 0
    return x


def spd(shape: str = "b, n, n", dtype: str = "float32") -> Arg:
    return Arg(shape, dtype, make=positive)


def square(shape: str = "b, n, n", dtype: str = "float32") -> Arg:
    return Arg(shape, dtype, make=regular)


def triangle(**options: Any) -> Callable[[Any, Any], Any]:
    return lambda a, b: la.triangular_solve(a, b, **options)


def tridiagonal_solve(dl: Any, d: Any, du: Any, b: Any) -> Any:
    return la.tridiagonal_solve(dl / 4, d + 4 * jnp.sign(d), du / 4, b)


def exponential(x: Any) -> Any:
    w, v = jnp.linalg.eigh(x)
    return (v * jnp.exp(-w)[..., None, :]) @ v.mT


def absolute_vectors(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Eigenvectors up to sign."""
    return lambda x: jax.tree.map(jnp.abs, fn(x))


def reconstruct(x: Any) -> Any:
    q, r = jnp.linalg.qr(x)
    return q @ r


def reflect(a: Any) -> Any:
    """``q`` from its reflectors, and ``q`` applied without being formed."""
    packed, taus = primitive("geqrf").bind(a)
    return la.householder_product(packed, taus), packed, taus


def apply_reflectors(a: Any, c: Any) -> Any:
    packed, taus = primitive("geqrf").bind(a)
    return primitive("ormqr").bind(packed, taus, c, left=True, transpose=True)


def spread(x: Any) -> Any:
    """Sorted real parts: the order of eigenvalues is the algorithm's own."""
    return jnp.sort(jnp.real(x), axis=-1)


def gaussian(x: Any, mean: Any, root: Any) -> Any:
    """The log density of a normal distribution."""
    cholesky = jnp.linalg.cholesky(root)
    y = jsl.solve_triangular(cholesky, x - mean, lower=True)
    return -0.5 * jnp.sum(y**2) - jnp.sum(jnp.log(jnp.diagonal(cholesky)))


def ridge(x: Any, y: Any) -> Any:
    """A regression with as many rows as there are data."""
    return jnp.linalg.solve(x.T @ x + jnp.eye(x.shape[1]), x.T @ y)


def kernel_regression(x: Any, y: Any) -> Any:
    """A Gaussian process: a matrix as large as the data."""
    kernel = jnp.exp(-0.5 * (x[:, None] - x[None, :]) ** 2) + jnp.eye(x.shape[0])
    factor = jsl.cho_factor(kernel)
    return kernel @ jsl.cho_solve(factor, y), 2 * jnp.sum(jnp.log(jnp.diagonal(factor[0])))


N = {"n": 6, "m": 5}
FEW = (
    {"b": 2, "n": 4, "m": 1},
    {"b": 3, "n": 5, "m": 3},
    {"b": 4, "n": 6, "m": 5},
    {"b": 1, "n": 1, "m": 2},
)

USUAL: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-4, "buckets": N, "domains": ("mixed",)}
case = family(prefix="linalg_", **USUAL)
lu, qr, svd, eigh, cholesky, triangular = (
    family(name, "linalg_", **USUAL)
    for name in ("lu", "qr", "svd", "eigh", "cholesky", "triangular_solve")
)


CHOL, SOLVE, LU, QR = ("cholesky",), ("triangular_solve",), ("lu",), ("qr",)

TABLE = {
    # cholesky
    "cholesky_batch": cholesky(jnp.linalg.cholesky, spd("b, 3, 3"), grad=True),
    "cholesky": cholesky(jnp.linalg.cholesky, spd(), grad=True),
    "cholesky_complex": cholesky(jnp.linalg.cholesky, spd("n, n", "complex64")),
    "cholesky_not_positive": cholesky(jnp.linalg.cholesky, "b, n, n"),
    "cholesky_raw": cholesky(lambda x: la.cholesky(x, symmetrize_input=False), spd()),
    "cholesky_update": case(
        lambda a, w: la.cholesky_update(jnp.linalg.cholesky(a).T, w),
        spd("n, n"),
        "n",
        covers="cholesky_update",
    ),
    "gaussian": case(gaussian, "n; n", spd("n, n"), covers="cholesky triangular_solve", grad=True),
    "kernel_regression": cholesky(kernel_regression, "n; n", grad=True),
    # triangular solves
    "triangular": triangular(triangle(left_side=True), spd(), "b, n, m", grad=True),
    "triangular_right": triangular(triangle(lower=True), spd(), "b, m, n", grad=True),
    "triangular_transposed": triangular(
        triangle(left_side=True, lower=True, transpose_a=True, conjugate_a=True),
        spd("b, n, n", "complex64"),
        "complex64[b, n, 2]",
    ),
    "triangular_unit": triangular(
        triangle(left_side=True, unit_diagonal=True), Arg("n, n", make=small), "n, m"
    ),
    "triangular_batch": triangular(triangle(left_side=True), spd("b, 3, 3"), "b, 3, 2"),
    # lu
    "lu": lu(la.lu, square()),
    "lu_batch": lu(la.lu, square("b, 3, 3")),
    "lu_rows": lu(la.lu, "b, n, 3"),
    "lu_columns": lu(la.lu, "b, 3, n"),
    "lu_both": lu(la.lu, "n, m"),
    "lu_singular": lu(la.lu, Arg("b, n, n", make=singular)),
    "lu_complex": lu(la.lu, square("n, n", "complex64")),
    "lu_gradient": lu(lambda x: la.lu(x)[0], square("b, n, n"), grad=True),
    "lu_permutation": case(
        lambda x: la.lu_pivots_to_permutation(la.lu(x)[1], x.shape[-1]),
        square(),
        covers="lu_pivots_to_permutation",
    ),
    "lu_permutation_of_static_size": case(
        lambda x: la.lu_pivots_to_permutation(x, 9),
        "int32[b, n] 0:9",
        covers="lu_pivots_to_permutation",
    ),
    "lu_scipy": lu(jsl.lu, square("n, n")),
    "lu_solve": lu(lambda a, b: jsl.lu_solve(jsl.lu_factor(a), b), square("n, n"), "n, m"),
    "solve": lu(jnp.linalg.solve, square(), "b, n, m", sizes=FEW, grad=True),
    "solve_vector": lu(jnp.linalg.solve, square("n, n"), "n", grad=True),
    "solve_batch": lu(jnp.linalg.solve, square("b, 3, 3"), "b, 3, 2", grad=True),
    "solve_positive": cholesky(lambda a, b: jsl.solve(a, b, assume_a="pos"), spd("n, n"), "n"),
    "inv": lu(jnp.linalg.inv, square(), sizes=FEW, grad=True),
    "det": lu(jnp.linalg.det, square(), sizes=FEW, grad=True),
    "det_batch_2": case(jnp.linalg.det, square("b, 2, 2")),
    "slogdet": lu(jnp.linalg.slogdet, square(), sizes=FEW, grad=True),
    "slogdet_singular": lu(jnp.linalg.slogdet, Arg("b, n, n", make=singular)),
    "ridge": lu(ridge, "n, 3; n", grad=True),
    "expm": lu(jsl.expm, "n, n", grad=True, sizes=({"n": 1}, {"n": 5})),
    "matrix_power": case(lambda x: jnp.linalg.matrix_power(x, 5), Arg("b, n, n", make=small)),
    "matrix_power_inverse": lu(lambda x: jnp.linalg.matrix_power(x, -3), square("n, n")),
    # qr
    "qr_batch": qr(jnp.linalg.qr, "b, 4, 3", grad=True),
    "qr_rows": qr(jnp.linalg.qr, "b, n, 3"),
    "qr_columns": qr(jnp.linalg.qr, "b, 3, n"),
    "qr_both": qr(jnp.linalg.qr, "n, m"),
    "qr_square": qr(jnp.linalg.qr, "b, n, n", grad=True),
    "qr_complex": qr(jnp.linalg.qr, "complex64[n, 3]"),
    "qr_full": qr(lambda x: jnp.linalg.qr(x, mode="complete"), "n, 3"),
    "qr_full_columns": qr(lambda x: jnp.linalg.qr(x, mode="complete"), "3, n"),
    "qr_r": qr(lambda x: jnp.linalg.qr(x, mode="r"), "n, 3"),
    "qr_tall_gradient": qr(
        jnp.linalg.qr,
        "n, 3",
        grad=True,
        sizes=({"n": 3}, {"n": 5}, {"n": 6}),
        constraints=("n >= 3",),
    ),
    "qr_reconstructed": qr(reconstruct, "n, m"),
    "qr_pivoted": qr(lambda x: jsl.qr(x, pivoting=True, mode="economic"), "n, 3"),
    "qr_pivoted_columns": qr(lambda x: jsl.qr(x, pivoting=True, mode="economic"), "3, n"),
    "reflectors": case(
        reflect,
        "b, n, 3",
        covers="geqrf householder_product",
        sizes=({"b": 1, "n": 3}, {"b": 4, "n": 6}, {"b": 3, "n": 5}),
        constraints=("n >= 3",),
    ),
    "apply_reflectors": case(
        apply_reflectors,
        "b, n, 3; b, n, m",
        covers="ormqr",
        sizes=({"b": 1, "n": 3, "m": 5}, {"b": 4, "n": 6, "m": 1}, {"b": 3, "n": 5, "m": 2}),
        constraints=("n >= 3",),
    ),
    "pivoted": case(
        lambda x: primitive("geqp3").bind(x, jnp.zeros(x.shape[1], jnp.int32), use_magma=None),
        "n, m",
        covers="geqp3",
    ),
    "reflectors_square": case(reflect, "n, n", covers="geqrf householder_product"),
    "reflectors_batch": case(reflect, "b, 4, 3", covers="geqrf householder_product"),
    # spectra
    "eigh_batch": eigh(absolute_vectors(jnp.linalg.eigh), spd("b, 3, 3")),
    "eigvalsh": eigh(jnp.linalg.eigvalsh, "b, n, n"),
    "eigvalsh_negative": eigh(lambda x: jnp.linalg.eigvalsh(-x), spd()),
    "eigvalsh_upper": eigh(lambda x: jnp.linalg.eigvalsh(x, UPLO="U"), "n, n"),
    "eigvalsh_complex": eigh(jnp.linalg.eigvalsh, spd("n, n", "complex64")),
    "eigvalsh_gradient": eigh(lambda x: jnp.linalg.eigvalsh(x), spd("b, 3, 3"), grad=True),
    "eig_batch": case(lambda x: spread(jnp.linalg.eigvals(x)), "b, 3, 3", covers="eig"),
    "schur_batch": case(
        jax.vmap(lambda x: jnp.abs(jsl.schur(x)[0])), spd("b, 3, 3"), covers="schur"
    ),
    "svd_batch": svd(absolute_vectors(lambda x: jnp.linalg.svd(x, full_matrices=False)), "b, 3, 2"),
    "svdvals": svd(jnp.linalg.svdvals, "b, n, m"),
    "svdvals_rows": svd(lambda x: jnp.linalg.svd(x, compute_uv=False), "b, n, 3"),
    "norm_2": svd(lambda x: jnp.linalg.norm(x, 2), "n, 3"),
    "norm_nuclear": svd(lambda x: jnp.linalg.norm(x, "nuc"), "n, 3"),
    "matrix_rank": svd(lambda x: jnp.linalg.matrix_rank(x, rtol=1e-3), "n, 3"),
    "cond": svd(jnp.linalg.cond, square("n, n")),
    "pinv_batch": svd(jnp.linalg.pinv, "b, 4, 2", grad=True),
    "lstsq_batch": svd(jax.vmap(lambda a, b: jnp.linalg.lstsq(a, b)[0]), "b, 4, 2; b, 4"),
    # vectors that occur twice, so that their signs do not matter
    "function_of_a_matrix": eigh(exponential, spd()),
    "eigenvalues_gradient": eigh(lambda x: jnp.log(jnp.linalg.eigvalsh(x)), spd("n, n"), grad=True),
    "pinv_rows": svd(
        jnp.linalg.pinv,
        "b, n, 2",
        sizes=({"b": 1, "n": 2}, {"b": 4, "n": 4}, {"b": 3, "n": 3}),
        constraints=("n >= 2",),
        grad=True,
    ),
    "pinv_columns": svd(
        jnp.linalg.pinv, "2, n", sizes=({"n": 2}, {"n": 4}, {"n": 3}), constraints=("n >= 2",)
    ),
    "pinv_square": svd(jnp.linalg.pinv, square()),
    "singular_values_gradient": svd(jnp.linalg.svdvals, square("n, n"), grad=True),
    # reductions to simpler forms
    "hessenberg": case(
        la.hessenberg,
        "b, n, n",
        covers="hessenberg",
        sizes=({"b": 1, "n": 3}, {"b": 4, "n": 6}, {"b": 3, "n": 5}, {"b": 2, "n": 2}),
        constraints=("n >= 2",),
    ),
    "hessenberg_complex": case(
        la.hessenberg,
        "complex64[n, n]",
        covers="hessenberg",
        sizes=({"n": 3}, {"n": 6}, {"n": 5}),
        constraints=("n >= 2",),
    ),
    "hessenberg_batch": case(la.hessenberg, "b, 3, 3", covers="hessenberg"),
    "tridiagonal": case(
        la.tridiagonal,
        spd(),
        covers="tridiagonal",
        sizes=({"b": 1, "n": 3}, {"b": 4, "n": 6}, {"b": 3, "n": 5}, {"b": 2, "n": 2}),
        constraints=("n >= 2",),
    ),
    "tridiagonal_batch": case(
        lambda x: la.tridiagonal(x, lower=False), spd("b, 3, 3"), covers="tridiagonal"
    ),
    "tridiagonal_solve": case(
        tridiagonal_solve, "b, n; b, n; b, n; b, n, m", covers="tridiagonal_solve", grad=True
    ),
    "tridiagonal_solve_batch": case(
        tridiagonal_solve, "b, 4; b, 4; b, 4; b, 4, 2", covers="tridiagonal_solve"
    ),
    "symmetric_product": case(
        lambda a, c: la.symmetric_product(a, c, alpha=2.0, beta=3.0),
        "b, n, m",
        spd(),
        covers="symmetric_product",
    ),
}
CASES = cases(TABLE)
