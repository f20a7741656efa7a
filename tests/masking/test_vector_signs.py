"""Where signs of eigenvectors and singular vectors cannot be seen in a program's results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Fallback
from bucketjit._masking.vector_signs import hidden_signs
from bucketjit.errors import FallbackError
from tests.harness import traced


def hidden(fn: Callable[[Any], Any]) -> list[str]:
    """The factorisations of a function of one open array whose signs its results do not show."""
    program = traced(fn, "n, n", n=5)
    return [eqn.primitive.name for eqn in hidden_signs(program.jaxpr).values()]


def vectors(x: Any) -> Any:
    return jnp.linalg.eigh(x)[1]


def of_matrix(x: Any) -> Any:
    w, v = jnp.linalg.eigh(x)
    return (v * jnp.exp(w)) @ v.T


def factors(x: Any) -> Any:
    return jnp.linalg.svd(x, full_matrices=False)


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "function of a matrix": of_matrix,
    "with itself, scaled": lambda x: (
        lambda v: jnp.einsum("ij,kj->ki", -v / 3, jnp.where(x > 0, v, 0.0))
    )(vectors(x)),
    "unused": lambda x: jnp.linalg.eigvalsh(x),
    "derivative of eigenvalues": jax.grad(lambda x: jnp.linalg.eigvalsh(x)[0]),
    "derivative of singular values": jax.grad(lambda x: jnp.linalg.svdvals(x).sum()),
    "reconstruction": lambda x: (lambda u, s, v: (u * s) @ v)(*factors(x)),
    "inside a loop": lambda x: lax.fori_loop(0, 3, lambda _, y: of_matrix(y), x),
    "in a branch": lambda x: lax.cond(x.sum() > 0, of_matrix, jnp.negative, x),
    "inside calls": lambda x: jax.checkpoint(jax.jit(of_matrix))(x),
    "every vector": lambda x: (lambda v: jnp.squeeze(v[:, None, :] * 2.0, 1) @ v.T)(vectors(x)),
}

SHOWN: dict[str, Callable[[Any], Any]] = {
    "vectors": vectors,
    "absolute values": lambda x: jnp.abs(vectors(x)),
    "squares": lambda x: (lambda v: v * v)(vectors(x)),
    "one vector": lambda x: vectors(x)[:, 0],
    "a sum over vectors": lambda x: vectors(x).sum(1),
    "a product over the other axis": lambda x: (lambda v: v.T @ v)(vectors(x)),
    "turned over": lambda x: (lambda v: v @ v[:, ::-1].T)(vectors(x)),
    "two matrices": lambda x: vectors(x) @ vectors(2 * x).T,
    "one call, two matrices": lambda x: (lambda f: f(x) @ f(x + 1).T)(jax.jit(vectors)),
    "plus something": lambda x: (lambda v: (v + 1) @ v.T)(vectors(x)),
    "a condition": lambda x: (lambda v: jnp.where(v > 0, 1.0, 2.0))(vectors(x)),
    "the other factor": lambda x: (lambda u, s, v: u @ v.T)(*factors(x)),
    "out of a loop": lambda x: lax.fori_loop(0, 3, lambda _, y: vectors(y), x),
    "carried through a loop": lambda x: lax.fori_loop(0, 3, lambda _, y: -y, vectors(x)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden(name: str) -> None:
    assert hidden(HIDDEN[name])


@pytest.mark.parametrize("name", SHOWN)
def test_shown(name: str) -> None:
    assert not hidden(SHOWN[name])


def test_shown_in_one_call_is_shown_in_all() -> None:
    shared = jax.jit(lambda x: jnp.linalg.eigh(x)[1])

    def fn(x: Any) -> Any:
        v = shared(x)
        return v @ v.T, shared(x + 1)

    assert not hidden(fn)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_null_spaces_do_not_mix_with_padding(rank: int) -> None:
    """The least-norm solution of a system of deficient rank."""
    rng = np.random.default_rng(rank)
    executor = BucketedExec(jnp.linalg.pinv, dynamic_axes="n, m", fallback=Fallback.ERROR)
    executor = executor.with_pow2()
    for n, m in ((5, 3), (3, 5), (7, 6), (8, 8), (9, 3), (5, 5)):
        x = (rng.standard_normal((n, rank)) @ rng.standard_normal((rank, m))).astype("f4")
        np.testing.assert_allclose(executor(x), np.linalg.pinv(x, rcond=1e-5), atol=1e-4)


def test_phases_of_complex_vectors_are_no_signs() -> None:
    executor = BucketedExec(of_matrix, dynamic_axes="n, n", fallback=Fallback.ERROR).with_pow2()
    with pytest.raises(FallbackError, match="eigenvectors of a matrix of symbolic size n"):
        executor(np.eye(3, dtype=np.complex64))


def test_all_vectors_of_a_tall_matrix_are_refused() -> None:
    def fn(x: Any) -> Any:
        u, s, v = jnp.linalg.svd(x)
        return u[:, :3] @ jnp.diag(s) @ v

    def projected(x: Any) -> Any:
        u = jnp.linalg.svd(x)[0] * (2 if x.shape[0] >= 3 else 3)
        return u @ u.T

    for each, said in ((fn, "their signs"), (projected, "null space")):
        executor = BucketedExec(each, dynamic_axes="n, _", fallback=Fallback.ERROR).with_pow2()
        with pytest.raises(FallbackError, match=said):
            executor(np.ones((5, 3), np.float32))
