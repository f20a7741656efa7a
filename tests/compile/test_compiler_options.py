"""Options of XLA: the user's, and those that bucketjit adds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Check
from bucketjit._compile import workarounds
from bucketjit.errors import SpecError
from tests.comparison import ramp

NO_LIBRARY = {"xla_cpu_experimental_ynn_fusion_type": ""}  # seen in what is compiled
WEIGHTS = ramp(64, 64)

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="options of XLA's CPU backend")


def layer(x: Any) -> Any:
    return jnp.tanh(x @ WEIGHTS)


def texts(executor: BucketedExec) -> list[str]:
    """What XLA made of each bucket."""
    entries = [slot.entry for _, slot in executor._engine.cache.slots()]
    return [entry.compiled.as_text() for entry in entries if entry is not None]


def calls_the_library(executor: BucketedExec) -> list[bool]:
    """Whether XLA's library YNN is in each executable."""
    return ["__ynn_fusion" in text for text in texts(executor)]


@on_cpu
@pytest.mark.parametrize("make", [BucketedExec, bucketjit.jit])
def test_they_reach_xla(make: Any) -> None:
    x = ramp(48, 64)
    for options, expected in ((None, True), ({}, True), (NO_LIBRARY, False)):
        made = make(layer, compiler_options=options)
        for executor in (made.with_pow2(), made.with_exact()):
            np.testing.assert_allclose(executor(x), layer(x), rtol=1e-5)
            assert calls_the_library(executor) == [expected]


@on_cpu
def test_the_options_of_another_jit_hold_there() -> None:
    executor = BucketedExec(layer, compiler_options=NO_LIBRARY).with_pow2()
    x = ramp(48, 64)
    outer = jax.jit(lambda x: executor(x) + 1)
    np.testing.assert_allclose(outer(x), layer(x) + 1, rtol=1e-5)
    assert "__ynn_fusion" in outer.lower(x).compile().as_text()


def test_derivatives_have_them_too() -> None:
    executor = BucketedExec(layer, compiler_options={"xla_backend_optimization_level": 1})
    x = jnp.asarray(ramp(5, 64))
    got = jax.grad(lambda x: executor.with_pow2()(x).sum())(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: layer(x).sum())(x), rtol=1e-4, atol=1e-6)
    refused = BucketedExec(layer, compiler_options={"xla_no_such": 1}).with_pow2()
    with pytest.raises(SpecError, match="'xla_no_such'"):
        jax.grad(lambda x: refused(x).sum())(x)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([1], r"compiler_options must be a dict .* got \[1\]"),
        ({1: True}, r"compiler_options\[1\] must be a bool, a number or text"),
        ({"xla_flag": [1]}, r"compiler_options\['xla_flag'\] must be .* got \[1\]"),
    ],
)
def test_malformed_ones_are_refused_at_once(options: Any, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        BucketedExec(layer, compiler_options=options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"xla_no_such": 1}, "xla_no_such"),
        ({"--xla_flag": True}, "--xla_flag"),
        ({"": 1}, ""),
        ({"xla_cpu_opt_preset": "zz"}, "xla_cpu_opt_preset"),
    ],
)
@pytest.mark.parametrize("bucketed", [True, False])
def test_what_xla_does_not_take_is_named(options: Any, name: str, bucketed: bool) -> None:
    executor = BucketedExec(layer, compiler_options=options)
    executor = executor.with_pow2() if bucketed else executor
    for _ in range(2):
        with pytest.raises(SpecError, match=f"compiler_options: XLA does not take '{name}'"):
            executor(ramp(3, 64))
    assert executor.cache_size() == 0 == executor.stats().calls


def relu(x: Any) -> Any:
    return jax.nn.relu(x @ WEIGHTS).mean()


@on_cpu
@pytest.mark.parametrize("check", [Check.OFF, Check.EXACT, Check.POISON])
def test_folds_that_lose_nan_are_left_out_of_the_library(check: Check) -> None:
    executor = BucketedExec(relu, dynamic_axes="b, _", check=check).with_pow2(min=256)
    for n in (200, 3, 256):
        x = ramp(n, 64)
        x[2, 1] = np.nan
        assert np.isnan(executor(x))
    assert not any("reduce_sum" in line for text in texts(executor) for line in folds_in(text))


def folds_in(text: str) -> list[str]:
    """The lines that hand something to XLA's library."""
    return [line for line in text.splitlines() if "__ynn_fusion" in line]


@on_cpu
def test_what_the_user_says_goes_before_that() -> None:
    asked = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
    executor = BucketedExec(relu, dynamic_axes="b, _", compiler_options=asked).with_pow2()
    executor(ramp(200, 64))
    assert calls_the_library(executor) == [True]


@pytest.mark.parametrize(("check", "exact"), [(Check.OFF, 0), (Check.EXACT, 2)])
def test_an_option_of_ours_that_xla_does_not_take_is_given_up(
    check: Check, exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workarounds, "library_options", lambda *_: {"xla_no_such": 1})
    monkeypatch.setattr(workarounds, "OPTIONS", frozenset(("xla_no_such",)))
    executor = BucketedExec(layer, dynamic_axes="b, _", check=check).with_buckets([4, 8])
    for b in (3, 8, 2):
        x = ramp(b, 64)
        np.testing.assert_allclose(executor(x), layer(x), rtol=1e-5)
    assert executor.stats().compiles == 2 + exact
    assert sum(bucket.exact for bucket in executor.stats().buckets) == exact


@pytest.mark.parametrize("bucketed", [True, False])
def test_files_of_other_options_are_not_loaded(tmp_path, bucketed: bool) -> None:
    x = ramp(5, 64)
    did = []
    for options in ({}, {"xla_backend_optimization_level": 1}, {}):
        executor = BucketedExec(layer, compiler_options=options)
        executor = executor.with_pow2() if bucketed else executor
        executor = executor.with_persistence(tmp_path)
        np.testing.assert_allclose(executor(x), layer(x), rtol=1e-5)
        did.append((executor.stats().compiles, executor.stats().loads))
    assert did == [(1, 0), (1, 0), (0, 1)]
