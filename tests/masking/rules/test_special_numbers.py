"""Rows of huge numbers and NaN: what masks compute on the way neither overflows nor loses them."""

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


def symmetric_with_nan(n: int, at: tuple[int, int]) -> Any:
    x = np.random.default_rng(n).standard_normal((n, n)).astype(np.float32)
    x += x.T
    x[at] = x[at[::-1]] = np.nan
    return x


@pytest.mark.parametrize(
    "fn",
    [
        jnp.linalg.eigvalsh,
        lambda x: jnp.linalg.eigvalsh(x, UPLO="U", symmetrize_input=False),
        jax.grad(lambda x: jnp.linalg.eigvalsh(x).sum()),
        lambda x: jnp.linalg.eigvalsh(x)[0] > 0,
    ],
    ids=["values", "one triangle", "gradient", "positive definite"],
)
def test_no_eigenvalue_of_nan_is_a_number(fn: Callable[..., Any]) -> None:
    # LAPACK makes numbers of NaN at 2 rows, and from 26 on.
    bucketed = BucketedExec(fn, dynamic_axes="n, n", fallback=Fallback.ERROR).with_pow2(min=32)
    exact = jax.jit(fn)
    for n in (3, 17, 25):
        for at in ((n - 1, 0), (0, 0), (n // 2, n // 2)):
            x = symmetric_with_nan(n, at)
            np.testing.assert_array_equal(bucketed(x), exact(x))


# Of 4,096 elements or more XLA's CPU backend loses a NaN, of 16 bits only in the minimum.
EXTREMA = {
    "all": lambda x: (x.max(), x.min()),
    "one axis": lambda x: (x.max(0), x.min(-1)),
    "inside": lambda x: jax.lax.fori_loop(0, 2, lambda _, y: jnp.maximum(y, x.max(0)), x[0]),
    "merged": lambda x: x.reshape(-1).max(),
    "own start": lambda x: (
        jax.lax.reduce(x, np.array(9, x.dtype), jax.lax.max, (0, 1)),
        jax.lax.reduce(x, np.array(-9, x.dtype), jax.lax.min, (1,)),
    ),
    "windows": lambda x: [
        jax.lax.reduce_window(x, np.array(start, x.dtype), choose, (2, 3), strides, "SAME")
        for start, choose in ((-np.inf, jax.lax.max), (np.inf, jax.lax.min))
        for strides in ((2, 3), (3, 3), (1, 1))
    ],
    "windows with a start": lambda x: [
        jax.lax.reduce_window(x, np.array(start, x.dtype), choose, (2, 3), (2, 3), "VALID")
        for start, choose in ((0.5, jax.lax.max), (-0.5, jax.lax.min))
    ],
    "one window": lambda x: jax.lax.reduce_window(
        x, np.array(-np.inf, x.dtype), jax.lax.max, x.shape, (1, 1), "VALID"
    ),
}


@pytest.mark.sampled(3, "bfloat16-one window")
@pytest.mark.parametrize("name", EXTREMA)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_an_extremum_of_many_elements_keeps_nan(name: str, dtype: Any) -> None:
    fn = EXTREMA[name]
    bucketed = BucketedExec(fn, dynamic_axes="a, b", fallback=Fallback.ERROR).with_pow2()

    def same(found: Any, wanted: Any) -> None:
        assert found.dtype == wanted.dtype == dtype
        np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))

    exact = jax.jit(fn)
    for shape in ((40, 65), (64, 63)):  # in buckets of 8,192 and 4,096
        x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
        jax.tree_util.tree_map(same, bucketed(x), exact(x))
        x[-1, 5], x[3, -1], x[0, 0] = np.nan, -np.nan, np.inf
        jax.tree_util.tree_map(same, bucketed(x), exact(x))


def test_no_extremum_of_very_many_elements_loses_nan() -> None:
    bucketed = BucketedExec(lambda x: (x.max(), x.min())).with_pow2()
    x = np.linspace(-1, 1, 20_000, dtype=np.float32)
    assert list(map(float, bucketed(x))) == [1, -1]
    x[7] = np.nan
    assert np.isnan(bucketed(x)).all()


def test_a_matrix_of_no_rows_has_no_eigenvalues() -> None:
    def values(x: Any) -> Any:
        return jnp.linalg.eigvalsh(x[1:, 1:])

    bucketed = BucketedExec(values, dynamic_axes="n, n", fallback=Fallback.ERROR).with_pow2()
    for n in (1, 2, 5):
        x = symmetric_with_nan(n, (0, 0))
        np.testing.assert_allclose(bucketed(x), jax.jit(values)(x), rtol=1e-4, atol=1e-5)


def test_nan_in_one_matrix_of_a_batch_stays_there() -> None:
    bucketed = BucketedExec(jnp.linalg.eigvalsh, dynamic_axes="b, n, n", fallback=Fallback.ERROR)
    x = np.stack([symmetric_with_nan(5, (4, 0)), np.eye(5, dtype=np.float32)])
    found = np.asarray(bucketed.with_pow2(min=32)(x))
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1], np.ones(5), rtol=1e-6)


def power(x: Any) -> Any:
    return (jnp.abs(jnp.fft.fft2(x)) ** 2).mean()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA's CPU backend fuses")
def test_the_sines_of_an_axis_are_computed_once_for_it() -> None:
    """Not in each kernel that reads them, for every row and in the gradient again."""
    executor = BucketedExec(jax.value_and_grad(power), dynamic_axes=("h, w",)).with_pow2()
    executor(np.ones((5, 13), np.float32))
    ((_, slot),) = executor._engine.cache.slots()
    assert slot.entry.compiled.as_text().count(" cosine(") == 2


@pytest.mark.parametrize("transform", [jnp.fft.fft2, jnp.fft.ifft2, jnp.fft.rfft2])
@pytest.mark.parametrize("axes", ["b, h, w", "b, h, _", "b, _, w"])
def test_rows_of_huge_numbers_leave_small_ones_as_they_are(transform: Any, axes: str) -> None:
    """Numbers are made smaller on the way for each batch row by itself, all axes of it together."""
    x = np.stack([np.ones((3, 5)), 1e-30 * np.ones((3, 5)), np.eye(3, 5)]).astype(np.float32)
    x[0] *= 1e37
    x[2] *= np.float32([1e37, 1e-3, 1e-3])[:, None]
    executor = BucketedExec(transform, dynamic_axes=(axes,), fallback=Fallback.ERROR).with_pow2()
    got, want = executor(x), transform(x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
