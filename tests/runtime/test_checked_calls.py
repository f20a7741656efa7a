"""Checked execution catches planted mistakes, names the culprit, and passes what is right."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Check
from bucketjit.errors import MaskingError, SpecError
from tests.comparison import floats


def pooled(x: Any, w: Any) -> Any:
    h = jnp.exp(x @ w)
    return h.sum(axis=0), jnp.sort(h, axis=0)


def data(n: int) -> tuple[np.ndarray, np.ndarray]:
    return floats(n, 4), floats(4, 4)


def no_fill(ctx: Any, operand: Any) -> Any:
    return ctx.bind(operand)


CHECKS = [Check.POISON, Check.EXACT, Check.EXACT_ALWAYS]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.name)
def test_right_masks_pass(check: Check) -> None:
    checked = BucketedExec(pooled, dynamic_axes=("b, _", None), check=check).with_pow2()
    for n in (5, 6, 8, 3):
        for got, want in zip(checked(*data(n)), pooled(*data(n)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
    assert checked.stats().fallback_calls == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.name)
def test_a_missing_fill_is_found_and_named(check: Check) -> None:
    checked = (
        BucketedExec(pooled, dynamic_axes=("b, _", None), check=check)
        .with_pow2()
        .with_rules({lax.reduce_sum_p: no_fill})
    )
    with pytest.raises(MaskingError, match=r"pooled: output\[0\] differs.*reduce_sum"):
        checked(*data(5))
    # A size that fills its bucket has no padding to be wrong about.
    np.testing.assert_allclose(checked(*data(8))[0], pooled(*data(8))[0], rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_a_missing_fill_is_found_in_every_precision(dtype: Any) -> None:
    def pool(x: Any) -> Any:
        return jnp.exp(x).sum(0)

    right = BucketedExec(pool, check=Check.EXACT).with_pow2()
    wrong = BucketedExec(pool, check=Check.EXACT).with_pow2()
    wrong = wrong.with_rules({lax.reduce_sum_p: no_fill})
    for n in (5, 9, 100):
        x = np.random.default_rng(n).normal(size=(n, 4)).astype(dtype)
        assert right(x).shape == (4,)
        with pytest.raises(MaskingError, match="differs from the unpadded run"):
            wrong(x)


def test_exact_checks_the_first_call_of_a_bucket_only() -> None:
    def sometimes(ctx: Any, operand: Any) -> Any:  # wrong below five rows only
        filled = ctx.bind(ctx.fill(operand, axes=ctx.params["axes"], value=0))
        return jnp.where(ctx.logical(ctx.in_shapes[0][0]) < 5, filled + 1, filled)

    rules = {lax.reduce_sum_p: sometimes}
    total = BucketedExec(lambda x: x.sum(), check=Check.EXACT).with_buckets([8]).with_rules(rules)
    assert float(total(np.ones(6, np.float32))) == 6
    assert float(total(np.ones(3, np.float32))) == 4  # unchecked, and wrong as planted
    always = BucketedExec(lambda x: x.sum(), check=Check.EXACT_ALWAYS)
    always = always.with_buckets([8]).with_rules(rules)
    assert float(always(np.ones(6, np.float32))) == 6
    with pytest.raises(MaskingError, match="differs from the unpadded run"):
        always(np.ones(3, np.float32))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["ahead", "warm-up", "background"])
@pytest.mark.parametrize("right", [True, False])
def test_the_first_call_of_what_is_there_already_is_checked(way: str, right: bool) -> None:
    def cosines(x: Any) -> Any:
        return jnp.cos(x).sum(1)

    executor = BucketedExec(cosines, dynamic_axes="b, s", check=Check.EXACT)
    executor = executor.with_buckets([8], "b").with_buckets([9, 31], "s")
    if not right:
        executor = executor.with_rules({lax.reduce_sum_p: no_fill})

    def call(n: int) -> None:
        x = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)
        with contextlib.nullcontext() if right else pytest.raises(MaskingError, match="unpadded"):
            np.testing.assert_allclose(executor(x), cosines(x), rtol=1e-5, atol=1e-5)

    if way == "ahead":
        executor = executor.with_ahead_compile()
    elif way == "warm-up":
        like = jax.ShapeDtypeStruct((3, 4), np.float32)
        assert executor.warmup(like, progress=False).compiled
    else:
        executor = executor.with_background_compile()
        call(30)
        call(4)  # by the bucket of 31, while that of 9 compiles
        assert executor.wait_for_compiles(60)
    call(4)
    call(4)
    made = {b.sizes["s"] for b in executor.stats().buckets if not b.exact}
    assert made == ({9} if way == "warm-up" else {9, 31})


def test_check_must_be_a_check() -> None:
    with pytest.raises(SpecError, match="check must be one of"):
        BucketedExec(pooled, check="poisoned")  # type: ignore[arg-type]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.name)
def test_checked_calls_donate_nothing(check: Check) -> None:
    checked = BucketedExec(lambda s, x: s + x.sum(), check=check, donate_argnums=0).with_pow2()
    total = jnp.zeros(())
    for n in (3, 4, 3):
        assert checked(total, np.ones(n, np.float32)) == n
