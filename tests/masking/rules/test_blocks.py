"""Large arrays are moved by blocks and rows on CPU: the same results, whatever the sizes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._masking import array_ops
from bucketjit._masking.rules import shapes
from tests.cases import fft, reshape, slicing
from tests.cases import shapes as shape_cases
from tests.harness import Case, check, gradient_of
from tests.masking.rules.test_vmapped_sizes import check_rows

CASES = [c for c in (*slicing.CASES, *reshape.CASES, *shape_cases.CASES, *fft.CASES) if not c.slow]

# Cases that are defined at sizes of 1, too.
ROWS = [
    c for c in CASES if c.name.startswith(("merge", "rev", "flip", "roll", "swap", "concat", "fft"))
]


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array counts as large, a block holds a few elements, and every row is long."""
    monkeypatch.setattr(array_ops, "_LARGE", 1)
    monkeypatch.setattr(array_ops, "_BLOCK", 12)
    monkeypatch.setattr(shapes, "_ROW", 1)


@pytest.mark.sampled(
    5, "lax_slice_by_size", "delete", "roll", "kv_cache_per_row", "fft_two_axes_inverse_real"
)
@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_blocks_of_a_few_elements(case: Case) -> None:
    if not (case.grad and set(case.covers) <= check(case, fn=gradient_of(case))):
        check(case)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("case", ROWS, ids=lambda c: c.name)
def test_rows_of_a_batch(case: Case) -> None:
    check_rows(case)


LARGE = {
    "reverse": (lambda x: x[::-1], "n", [(33_000,), (40_000,), (65_536,), (5,)]),
    "reverse columns": (lambda x: x[:, ::-1], "n, m", [(300, 150), (257, 256), (3, 2)]),
    "flip both": (lambda x: jnp.flip(x), "n, m", [(300, 150), (512, 129)]),
    "roll": (lambda x: jnp.roll(x, 7), "n", [(65_536,), (40_000,), (3,)]),
    "join": (lambda x: jnp.concatenate([x, x[::-1], x]), "n", [(40_000,), (65_535,)]),
    "last half": (lambda x: x[x.shape[0] // 2 :] * 2, "n", [(40_001,), (65_536,), (2,)]),
    "merge": (lambda x: x.reshape(-1), "n, m", [(300, 150), (512, 256), (1, 2)]),
    "merge three": (lambda x: (x + 1).reshape(-1), "n, m, k", [(20, 30, 90), (32, 17, 128)]),
    "split": (lambda x: x.reshape(-1).reshape(x.shape[::-1]), "n, m", [(300, 150), (257, 256)]),
    "transpose": (lambda x: (x.T, jnp.exp(x).T), "n, m", [(300, 150), (512, 256)]),
    "triangle": (lambda x: jnp.tril(x) + 1, "n, m", [(300, 150), (257, 256)]),
    "spectrum": (lambda x: jnp.fft.rfft2(x), "n, m", [(300, 250), (257, 256), (2, 3)]),
    "columns": (lambda x: x + 1, "3, n", [(3, 33_000), (3, 65_536)]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LARGE)
def test_large_arrays(name: str) -> None:
    """Padding that is poisoned changes nothing, and results with their padding end in zeros."""
    fn, axes, sizes = LARGE[name]
    executor = BucketedExec(fn, dynamic_axes=(axes,), check="poison").with_pow2(min=2)
    padded = BucketedExec(fn, dynamic_axes=(axes,), out="padded").with_pow2(min=sizes[0][-1])
    for shape in sizes:
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        _compare(executor(x), padded(x), jax.jit(fn)(x))


def _compare(got: Any, padded: Any, want: Any) -> None:
    for a, p, b in zip(*map(jax.tree.leaves, (got, padded, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
        np.testing.assert_allclose(p, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
        assert np.count_nonzero(p.array) == np.count_nonzero(b)


def test_gradients_of_large_arrays() -> None:
    def loss(x: Any) -> Any:
        y = x[::-1] * jnp.arange(x.shape[0])[:, None]
        return jnp.sum(y.reshape(-1)[5:] ** 2)

    gradient: Callable[..., Any] = jax.grad(loss)
    executor = BucketedExec(gradient, dynamic_axes=("n, m",), check="poison").with_pow2()
    x = np.random.default_rng(0).standard_normal((300, 150)).astype(np.float32)
    np.testing.assert_allclose(executor(x), jax.jit(gradient)(x), rtol=1e-5)
