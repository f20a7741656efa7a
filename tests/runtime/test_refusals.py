"""What is refused in one bucket is masked in others; and sizes that int32 does not hold."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Check, Fallback
from bucketjit._jax.compiler import is_defect_of_xla
from bucketjit.errors import FallbackError, FallbackWarning
from tests.comparison import ones


def by_square(x: Any) -> Any:
    """Its program holds the square of a size, which is no int32 from 46,341 on."""
    return x.sum() / jnp.float32(x.shape[0] * x.shape[0])


def test_calls_in_other_buckets_are_masked() -> None:
    fn = BucketedExec(by_square).with_pow2()
    for n in (100, 50_000, 101, 60_000, 120):
        if n == 50_000:
            with pytest.warns(FallbackWarning, match=r"batch\^2 does not fit into int32 in this"):
                got = fn(ones(n))
        else:
            got = fn(ones(n))
        np.testing.assert_allclose(got, 1 / n, rtol=1e-6)
    stats = fn.stats()
    assert [b.sizes["batch"] for b in stats.buckets if not b.exact] == [128]
    assert sorted(b.sizes["batch"] for b in stats.buckets if b.exact) == [50_000, 60_000]
    assert (stats.compiles, stats.fallback_calls) == (3, 2)
    assert list(stats.fallback_reasons.values()) == [2]


def test_the_error_is_of_that_bucket() -> None:
    fn = BucketedExec(by_square, fallback=Fallback.ERROR).with_pow2()
    for _ in range(2):
        with pytest.raises(FallbackError, match=r"does not fit into int32 .*by_square"):
            fn(ones(50_000))
        np.testing.assert_allclose(fn(ones(101)), 1 / 101, rtol=1e-6)
    assert fn.stats().compiles == 1


def test_a_plan_is_compiled_ahead_but_for_one_bucket() -> None:
    fn = BucketedExec(by_square).with_buckets([128, 256, 65_536]).with_ahead_compile()
    np.testing.assert_allclose(fn(ones(100)), 0.01, rtol=1e-6)
    assert sorted(b.sizes["batch"] for b in fn.stats().buckets) == [128, 256]
    with pytest.warns(FallbackWarning):
        fn(ones(50_000))
    assert fn.stats().fallback_calls == 1


def test_it_is_explained() -> None:
    fn = BucketedExec(by_square).with_pow2()
    assert fn.explain(ones(100)).kind == "masked"
    told = fn.explain(ones(50_000))
    assert (told.kind, "does not fit into int32" in told.reason) == ("exact", True)


def test_gradients_in_other_buckets_are_masked() -> None:
    fn = BucketedExec(by_square).with_pow2()
    with pytest.warns(FallbackWarning):
        got = jax.grad(fn)(ones(50_000))
    np.testing.assert_allclose(got, np.full(50_000, 1 / 50_000**2), rtol=1e-6)
    before = fn.stats().fallback_calls
    np.testing.assert_allclose(jax.grad(fn)(ones(100)), np.full(100, 1e-4), rtol=1e-6)
    assert fn.stats().fallback_calls == before


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x: x.sum() / jnp.float32(len(x) * (len(x) - 1) * (len(x) - 2) // 6), (1200, 1900)),
        (lambda x: x[: x.shape[0] * 750_000 // 1_000_000].sum(), (2000, 3000, 4000)),
        (lambda x: x[: x.shape[0] * 750_000 // 1_000_000], (2000, 3000, 4000)),
        (lambda x: jnp.sort(x[: x.shape[0] * 750_000 // 1_000_000])[-1], (2000, 3000)),
        (lambda x: jnp.ones(x.shape[0] ** 3 % 7 + 1).sum() + x.max(), (1999, 3001)),
        (lambda x: jnp.roll(x, (x.shape[0] * 1_000_003) % 11), (2500, 3001)),
        (lambda x: (x * (jnp.arange(len(x)) < len(x) * 3_000_000 // 4_000_000)).sum(), (2500, 900)),
    ],
)
def test_sizes_computed_by_way_of_numbers_beyond_int32(function: Any, sizes: Any) -> None:
    for check in (Check.OFF, Check.EXACT):
        fn = BucketedExec(function, dynamic_axes="n", check=check).with_pow2()
        for n in sizes:
            x = np.random.default_rng(n).normal(size=n).astype(np.float32)
            want = jax.jit(function)(x)
            got = fn(x)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert not fn.stats().fallback_calls


def test_a_gradient_through_them() -> None:
    fn = BucketedExec(lambda x: (x[: x.shape[0] * 750_000 // 1_000_000] ** 2).sum()).with_pow2()
    got = jax.grad(fn)(ones(3000))
    np.testing.assert_array_equal(got, np.where(np.arange(3000) < 2250, 2, 0))


def test_what_was_refused_is_explained_so() -> None:
    fn = BucketedExec(lambda x: x.sum() + x.shape[0] ** 7 % 5, dynamic_axes="n").with_pow2()
    fn.warmup(ones(1), sizes={"n": [4000]}, progress=False)
    assert fn.explain(ones(4000)).kind == "exact"
    assert fn.explain(ones(40)).kind == "masked"


@pytest.mark.parametrize("reverse", [False, True])
def test_what_xla_does_not_compile_runs_exact(reverse: bool) -> None:
    """XLA's backend for CPU fails with some gradients of reverse products as they are masked."""

    def loss(x: Any) -> Any:
        return lax.cumprod(x, reverse=reverse).sum()

    grad = BucketedExec(jax.grad(loss), dynamic_axes="b, _").with_pow2()
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for n in (5, 2, 6):
            x = np.random.default_rng(n).uniform(0.5, 1.5, (n, 3)).astype(np.float32)
            np.testing.assert_allclose(grad(x), jax.jit(jax.grad(loss))(x), rtol=1e-4)
    assert all("does not compile: JaxRuntimeError" in r for r in grad.stats().fallback_reasons)


def test_errors_of_the_arguments_are_not_taken_for_defects_of_xla() -> None:
    assert not is_defect_of_xla(ValueError("Received incompatible devices"))
    assert not is_defect_of_xla(jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such option"))
    assert not is_defect_of_xla(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory"))
    assert is_defect_of_xla(jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure"))
