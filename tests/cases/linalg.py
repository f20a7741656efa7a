"""Factorisations and solves over open batch axes and open matrix axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax import lax

from bucketjit._jax.jaxprs import primitive
from tests.harness import Arg, family

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

CASES = [
    # cholesky
    cholesky("cholesky_batch", jnp.linalg.cholesky, spd("b, 3, 3"), grad=True),
    cholesky("cholesky", jnp.linalg.cholesky, spd(), grad=True),
    cholesky("cholesky_complex", jnp.linalg.cholesky, spd("n, n", "complex64")),
    cholesky("cholesky_not_positive", jnp.linalg.cholesky, "b, n, n"),
    cholesky("cholesky_raw", lambda x: la.cholesky(x, symmetrize_input=False), spd()),
    case(
        "cholesky_update",
        lambda a, w: la.cholesky_update(jnp.linalg.cholesky(a).T, w),
        spd("n, n"),
        "n",
        covers="cholesky_update",
    ),
    case("gaussian", gaussian, "n; n", spd("n, n"), covers="cholesky triangular_solve", grad=True),
    cholesky("kernel_regression", kernel_regression, "n; n", grad=True),
    # triangular solves
    triangular("triangular", triangle(left_side=True), spd(), "b, n, m", grad=True),
    triangular("triangular_right", triangle(lower=True), spd(), "b, m, n", grad=True),
    triangular(
        "triangular_transposed",
        triangle(left_side=True, lower=True, transpose_a=True, conjugate_a=True),
        spd("b, n, n", "complex64"),
        "complex64[b, n, 2]",
    ),
    triangular(
        "triangular_unit",
        triangle(left_side=True, unit_diagonal=True),
        Arg("n, n", make=small),
        "n, m",
    ),
    triangular("triangular_batch", triangle(left_side=True), spd("b, 3, 3"), "b, 3, 2"),
    # lu
    lu("lu", la.lu, square()),
    lu("lu_batch", la.lu, square("b, 3, 3")),
    lu("lu_rows", la.lu, "b, n, 3"),
    lu("lu_columns", la.lu, "b, 3, n"),
    lu("lu_both", la.lu, "n, m"),
    lu("lu_singular", la.lu, Arg("b, n, n", make=singular)),
    lu("lu_complex", la.lu, square("n, n", "complex64")),
    lu("lu_gradient", lambda x: la.lu(x)[0], square("b, n, n"), grad=True),
    case(
        "lu_permutation",
        lambda x: la.lu_pivots_to_permutation(la.lu(x)[1], x.shape[-1]),
        square(),
        covers="lu_pivots_to_permutation",
    ),
    case(
        "lu_permutation_of_static_size",
        lambda x: la.lu_pivots_to_permutation(x, 9),
        "int32[b, n] 0:9",
        covers="lu_pivots_to_permutation",
    ),
    lu("lu_scipy", jsl.lu, square("n, n")),
    lu("lu_solve", lambda a, b: jsl.lu_solve(jsl.lu_factor(a), b), square("n, n"), "n, m"),
    lu("solve", jnp.linalg.solve, square(), "b, n, m", sizes=FEW, grad=True),
    lu("solve_vector", jnp.linalg.solve, square("n, n"), "n", grad=True),
    lu("solve_batch", jnp.linalg.solve, square("b, 3, 3"), "b, 3, 2", grad=True),
    cholesky("solve_positive", lambda a, b: jsl.solve(a, b, assume_a="pos"), spd("n, n"), "n"),
    lu("inv", jnp.linalg.inv, square(), sizes=FEW, grad=True),
    lu("det", jnp.linalg.det, square(), sizes=FEW, grad=True),
    case("det_batch_2", jnp.linalg.det, square("b, 2, 2")),
    lu("slogdet", jnp.linalg.slogdet, square(), sizes=FEW, grad=True),
    lu("slogdet_singular", jnp.linalg.slogdet, Arg("b, n, n", make=singular)),
    lu("ridge", ridge, "n, 3; n", grad=True),
    lu("expm", jsl.expm, "n, n", grad=True, sizes=({"n": 1}, {"n": 5})),
    case("matrix_power", lambda x: jnp.linalg.matrix_power(x, 5), Arg("b, n, n", make=small)),
    lu("matrix_power_inverse", lambda x: jnp.linalg.matrix_power(x, -3), square("n, n")),
    # qr
    qr("qr_batch", jnp.linalg.qr, "b, 4, 3", grad=True),
    qr("qr_rows", jnp.linalg.qr, "b, n, 3"),
    qr("qr_columns", jnp.linalg.qr, "b, 3, n"),
    qr("qr_both", jnp.linalg.qr, "n, m"),
    qr("qr_square", jnp.linalg.qr, "b, n, n", grad=True),
    qr("qr_complex", jnp.linalg.qr, "complex64[n, 3]"),
    qr("qr_full", lambda x: jnp.linalg.qr(x, mode="complete"), "n, 3"),
    qr("qr_full_columns", lambda x: jnp.linalg.qr(x, mode="complete"), "3, n"),
    qr("qr_r", lambda x: jnp.linalg.qr(x, mode="r"), "n, 3"),
    qr(
        "qr_tall_gradient",
        jnp.linalg.qr,
        "n, 3",
        grad=True,
        sizes=({"n": 3}, {"n": 5}, {"n": 6}),
        constraints=("n >= 3",),
    ),
    qr("qr_reconstructed", reconstruct, "n, m"),
    qr("qr_pivoted", lambda x: jsl.qr(x, pivoting=True, mode="economic"), "n, 3"),
    qr("qr_pivoted_columns", lambda x: jsl.qr(x, pivoting=True, mode="economic"), "3, n"),
    case(
        "reflectors",
        reflect,
        "b, n, 3",
        covers="geqrf householder_product",
        sizes=({"b": 1, "n": 3}, {"b": 4, "n": 6}, {"b": 3, "n": 5}),
        constraints=("n >= 3",),
    ),
    case(
        "apply_reflectors",
        apply_reflectors,
        "b, n, 3; b, n, m",
        covers="ormqr",
        sizes=({"b": 1, "n": 3, "m": 5}, {"b": 4, "n": 6, "m": 1}, {"b": 3, "n": 5, "m": 2}),
        constraints=("n >= 3",),
    ),
    case(
        "pivoted",
        lambda x: primitive("geqp3").bind(x, jnp.zeros(x.shape[1], jnp.int32), use_magma=None),
        "n, m",
        covers="geqp3",
    ),
    case("reflectors_square", reflect, "n, n", covers="geqrf householder_product"),
    case("reflectors_batch", reflect, "b, 4, 3", covers="geqrf householder_product"),
    # spectra
    eigh("eigh_batch", absolute_vectors(jnp.linalg.eigh), spd("b, 3, 3")),
    eigh("eigvalsh", jnp.linalg.eigvalsh, "b, n, n"),
    eigh("eigvalsh_negative", lambda x: jnp.linalg.eigvalsh(-x), spd()),
    eigh("eigvalsh_upper", lambda x: jnp.linalg.eigvalsh(x, UPLO="U"), "n, n"),
    eigh("eigvalsh_complex", jnp.linalg.eigvalsh, spd("n, n", "complex64")),
    eigh("eigvalsh_gradient", lambda x: jnp.linalg.eigvalsh(x), spd("b, 3, 3"), grad=True),
    case("eig_batch", lambda x: spread(jnp.linalg.eigvals(x)), "b, 3, 3", covers="eig"),
    case(
        "schur_batch", jax.vmap(lambda x: jnp.abs(jsl.schur(x)[0])), spd("b, 3, 3"), covers="schur"
    ),
    svd("svd_batch", absolute_vectors(lambda x: jnp.linalg.svd(x, full_matrices=False)), "b, 3, 2"),
    svd("svdvals", jnp.linalg.svdvals, "b, n, m"),
    svd("svdvals_rows", lambda x: jnp.linalg.svd(x, compute_uv=False), "b, n, 3"),
    svd("norm_2", lambda x: jnp.linalg.norm(x, 2), "n, 3"),
    svd("norm_nuclear", lambda x: jnp.linalg.norm(x, "nuc"), "n, 3"),
    svd("matrix_rank", lambda x: jnp.linalg.matrix_rank(x, rtol=1e-3), "n, 3"),
    svd("cond", jnp.linalg.cond, square("n, n")),
    svd("pinv_batch", jnp.linalg.pinv, "b, 4, 2", grad=True),
    svd("lstsq_batch", jax.vmap(lambda a, b: jnp.linalg.lstsq(a, b)[0]), "b, 4, 2; b, 4"),
    # vectors that occur twice, so that their signs do not matter
    eigh("function_of_a_matrix", exponential, spd()),
    eigh("eigenvalues_gradient", lambda x: jnp.log(jnp.linalg.eigvalsh(x)), spd("n, n"), grad=True),
    svd(
        "pinv_rows",
        jnp.linalg.pinv,
        "b, n, 2",
        sizes=({"b": 1, "n": 2}, {"b": 4, "n": 4}, {"b": 3, "n": 3}),
        constraints=("n >= 2",),
        grad=True,
    ),
    svd(
        "pinv_columns",
        jnp.linalg.pinv,
        "2, n",
        sizes=({"n": 2}, {"n": 4}, {"n": 3}),
        constraints=("n >= 2",),
    ),
    svd("pinv_square", jnp.linalg.pinv, square()),
    svd("singular_values_gradient", jnp.linalg.svdvals, square("n, n"), grad=True),
    # reductions to simpler forms
    case(
        "hessenberg",
        la.hessenberg,
        "b, n, n",
        covers="hessenberg",
        sizes=({"b": 1, "n": 3}, {"b": 4, "n": 6}, {"b": 3, "n": 5}, {"b": 2, "n": 2}),
        constraints=("n >= 2",),
    ),
    case(
        "hessenberg_complex",
        la.hessenberg,
        "complex64[n, n]",
        covers="hessenberg",
        sizes=({"n": 3}, {"n": 6}, {"n": 5}),
        constraints=("n >= 2",),
    ),
    case("hessenberg_batch", la.hessenberg, "b, 3, 3", covers="hessenberg"),
    case(
        "tridiagonal",
        la.tridiagonal,
        spd(),
        covers="tridiagonal",
        sizes=({"b": 1, "n": 3}, {"b": 4, "n": 6}, {"b": 3, "n": 5}, {"b": 2, "n": 2}),
        constraints=("n >= 2",),
    ),
    case(
        "tridiagonal_batch",
        lambda x: la.tridiagonal(x, lower=False),
        spd("b, 3, 3"),
        covers="tridiagonal",
    ),
    case(
        "tridiagonal_solve",
        tridiagonal_solve,
        "b, n; b, n; b, n; b, n, m",
        covers="tridiagonal_solve",
        grad=True,
    ),
    case(
        "tridiagonal_solve_batch",
        tridiagonal_solve,
        "b, 4; b, 4; b, 4; b, 4, 2",
        covers="tridiagonal_solve",
    ),
    case(
        "symmetric_product",
        lambda a, c: la.symmetric_product(a, c, alpha=2.0, beta=3.0),
        "b, n, m",
        spd(),
        covers="symmetric_product",
    ),
]
