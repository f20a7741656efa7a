"""Numbers near the end of their dtype: what masks compute on the way must not overflow first."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Fallback


def symmetric(n: int) -> Any:
    x = np.clip(np.random.default_rng(n).standard_normal((n, n)), -1, 1)
    return (x + x.T) / 2


def row(n: int) -> Any:
    return symmetric(n)[0]


def rebuilt(x: Any) -> Any:
    u, s, vt = jnp.linalg.svd(x)
    return (u * s) @ vt


@pytest.mark.parametrize(
    ("fn", "axes", "make"),
    [
        (jnp.fft.fft, "n", row),
        (jnp.fft.rfft, "n", row),
        (lambda x: jnp.fft.ifft(x + 1j * x), "n", row),
        (jnp.linalg.eigvalsh, "n, n", symmetric),
        (rebuilt, "n, n", symmetric),
        (lambda x: jnp.linalg.svd(x, compute_uv=False), "n, n", symmetric),
    ],
    ids=["fft", "rfft", "ifft", "eigvalsh", "svd", "singular values"],
)
def test_huge_numbers(fn: Callable[..., Any], axes: str, make: Any) -> None:
    bucketed = BucketedExec(fn, dynamic_axes=axes, fallback=Fallback.ERROR).with_pow2()
    exact = jax.jit(fn)
    for n, scale in itertools.product((5, 8), (1e37, 3e37, 7e37, np.inf)):
        with np.errstate(invalid="ignore"):
            x = np.asarray(make(n) * scale, np.float32)
        expected, found = np.asarray(exact(x)), np.asarray(bucketed(x))
        if scale == np.inf:
            assert not np.isfinite(expected).any() and not np.isfinite(found).any()
        else:
            assert np.isfinite(expected).all()
            np.testing.assert_allclose(found / 1e37, expected / 1e37, rtol=1e-3, atol=scale * 1e-41)
