"""`bucketjit.sized`: eagerly, in executors, and under a bare ``jit``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, sized
from bucketjit.errors import ArgumentError

X = np.arange(6, dtype=np.float32)


def test_outside_of_a_trace_it_is_a_slice() -> None:
    cut = sized({"a": X, "b": jnp.stack([X, X], 1)}, 2)
    assert cut["a"].tolist() == [0, 1] and cut["b"].shape == (2, 2)
    assert sized(jnp.stack([X, X]), np.int64(3), axis=-1).shape == (2, 3)
    assert sized(X, jnp.int32(0)).shape == (0,)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("n", range(7))
def test_in_an_executor(axis: int, n: int) -> None:
    def fn(x: Any, n: Any) -> Any:
        one, other = sized((x, 2 * x), n, axis)
        return one + other, jax.grad(lambda y: jnp.sum(sized(y, n, axis) ** 2))(x)

    spec = "n, _" if axis == 0 else "_, n"
    x = np.stack([X, X], 1 - axis)
    executor = BucketedExec(fn, dynamic_axes=(spec, None)).with_pow2()
    got, gradient = executor(x, np.int32(n))
    want = 3 * (x[:n] if axis == 0 else x[:, :n])
    np.testing.assert_allclose(got, want)
    mask = np.arange(6) < n
    np.testing.assert_allclose(gradient, 2 * x * (mask[:, None] if axis == 0 else mask))


@pytest.mark.parametrize(
    ("tree", "n", "axis", "message"),
    [
        (X, 2.0, 0, "expected an integer scalar n, got 2.0"),
        (X, True, 0, "expected an integer scalar n, got True"),
        (X, np.ones(1, np.int32), 0, r"expected an integer scalar n, got int32\[1\]"),
        (X, 2, 1, "no axis 1"),
        (np.float32(1), 0, 0, "no axis 0"),
        ((X, X[:3]), 2, 0, r"got shapes \(6,\) and \(3,\)"),
        ((), 2, 0, "without any"),
    ],
)
def test_wrong_arguments(tree: Any, n: Any, axis: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        sized(tree, n, axis)


def test_under_a_bare_jit() -> None:
    with pytest.raises(TypeError, match="BucketedExec"):
        jax.jit(sized)(X, 3)


def test_in_a_loop_its_size_cannot_be_checked() -> None:
    def fn(x: Any, n: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda i, c: c + sized(x, n - i).sum(), 0.0)

    executor = BucketedExec(fn, dynamic_axes=("n", None)).with_pow2()
    told = executor.explain(X, np.int32(2))
    assert told.kind == "exact" and "cannot be checked" in told.reason
