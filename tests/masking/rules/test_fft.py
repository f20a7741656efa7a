"""What the transform of an open axis computes once, and what it keeps apart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Fallback


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
