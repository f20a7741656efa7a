"""Sizes beyond the largest bucket: an error, the next bucket, or the exact size."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Overflow, strategies
from bucketjit.errors import BucketOverflowError, SpecError
from bucketjit.types import Event
from tests.comparison import assert_like_jit, buckets, ramp


def rows(x: Any) -> Any:
    return jnp.sum(jnp.exp(x), axis=1)


def total(x: Any) -> Any:
    return jnp.sum(x * x)


# --- what fits a device ------------------------------------------------------------------------


def attended(x: Any) -> Any:
    return jax.nn.softmax(jnp.einsum("bsd,btd->bst", x, x)) @ x


@pytest.mark.parametrize(
    ("platforms", "strategy", "expected"),
    [
        ({"tpu"}, "pow2", {"b": [16, 16, 256], "s": [128, 128, 256]}),
        ({"tpu"}, "auto", {"b": [16, 16, 256], "s": [128, 128, 256]}),
        ({"tpu"}, strategies.Linear(100), {"b": [104, 104, 200], "s": [128, 128, 256]}),
        ({"tpu"}, strategies.Pow2(max=200), {"b": [16, 16, 200], "s": [128, 128, 200]}),
        ({"tpu"}, strategies.Pow2(min=4), {"b": [4, 8, 256], "s": [4, 8, 256]}),
        ({"tpu"}, strategies.Boundaries([9, 500]), {"b": [9, 9, 500], "s": [9, 9, 500]}),
        ({"gpu"}, strategies.Linear(10), {"b": [16, 16, 200], "s": [16, 16, 200]}),
        (set(), "pow2", {"b": [2, 8, 256], "s": [2, 8, 256]}),
    ],
)
def test_buckets_fit_the_device(
    platforms: set[str], strategy: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bucketjit._runtime.buckets.other_platforms", lambda *call: platforms)
    executor = bucketjit.jit(attended, dynamic_axes="b, s, 4", buckets=strategy)
    told = [executor.explain(np.ones((n, n, 4), np.float32)) for n in (2, 7, 200)]
    assert {v: [t.bucket[v] for t in told] for v in ("b", "s")} == expected
    assert ("s: on a TPU, an attention is one fused" in told[0].why) == (expected["s"][0] == 128)
    assert_like_jit(executor, attended, np.ones((2, 7, 4), np.float32))


def test_an_attention_of_jax_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketjit._runtime.buckets.other_platforms", lambda *call: {"tpu"})
    executor = bucketjit.jit(jax.nn.dot_product_attention, dynamic_axes=("b, s, 2, 8",) * 3)
    told = executor.explain(*[np.ones((3, 5, 2, 8), np.float32)] * 3)
    assert dict(told.bucket) == {"b": 16, "s": 128}


def test_sizes_that_guards_refuse_there_have_the_buckets_of_all_devices(monkeypatch: Any) -> None:
    monkeypatch.setattr("bucketjit._runtime.buckets.other_platforms", lambda *call: {"tpu"})

    def placed(x: Any, y: Any) -> Any:
        x, y = x + jnp.ones((64, 4))[: x.shape[0]], y + jnp.ones((50, 4))[: y.shape[0]]
        return jax.nn.softmax(x @ y.T) @ y

    executor = bucketjit.jit(placed, dynamic_axes=("s, _", "t, _"), buckets="pow2")
    told = executor.explain(np.ones((5, 4), np.float32), np.ones((9, 4), np.float32))
    assert dict(told.bucket) == {"s": 8, "t": 16} and not told.why


# --- the policies ------------------------------------------------------------------------------


def test_it_is_an_error_by_default() -> None:
    for executor in (
        BucketedExec(total).with_pow2(max=8),
        BucketedExec(total).with_pow2(max=8, overflow="exact").with_overflow(Overflow.ERROR),
    ):
        with pytest.raises(BucketOverflowError, match="'batch' has size 9, beyond .* 8"):
            executor(ramp(9))


@pytest.mark.parametrize("policy", ["extend", Overflow.EXTEND])
@pytest.mark.parametrize(
    ("strategy", "n", "bucket"),
    [
        (strategies.Pow2(max=8), 9, 16),
        (strategies.Boundaries([3, 6]), 7, 12),
        (strategies.fit([2, 4], buckets=1), 9, 16),
        (strategies.Exponential(1.5, max=4), 5, 6),
    ],
    ids=lambda x: type(x).__name__,
)
def test_extend(policy: Any, strategy: Any, n: int, bucket: int) -> None:
    executor = BucketedExec(total, dynamic_axes="n").with_strategy(strategy).with_overflow(policy)
    assert_like_jit(executor, total, ramp(2))
    assert_like_jit(executor, total, ramp(n))
    assert buckets(executor)[-1] == {"n": bucket}
    told = executor.explain(ramp(n))
    assert dict(told.bucket) == {"n": bucket} and told.compiled


def test_exact_leaves_the_size_as_it_is_and_counts(xla_compiles: Callable[[], int]) -> None:
    executor = BucketedExec(total).with_pow2(max=8, overflow="exact")
    x = ramp(9)
    with warnings.catch_warnings(action="error"):
        first = executor(x)
        compiled = xla_compiles()
        for _ in range(3):  # by the warm path
            np.testing.assert_array_equal(executor(x), first)
        assert xla_compiles() == compiled
    np.testing.assert_array_equal(first, jax.jit(total)(x))  # bit by bit: nothing is masked
    stats = executor.stats()
    assert (stats.calls, stats.fallback_calls, stats.compiles) == (4, 4, 1)
    (reason,) = stats.fallback_reasons
    assert reason == "the size of batch is beyond its largest bucket 8 (overflow='exact')"
    assert [b.exact for b in stats.buckets] == [True]
    told = executor.explain(x)
    assert (told.kind, told.reason, told.compiled) == ("exact", reason, True)
    executor(ramp(5))
    assert executor.stats().fallback_calls == 4


def test_exact_is_told_once() -> None:
    told: list[Event] = []
    executor = BucketedExec(total).with_pow2(max=8, overflow="exact").with_on_event(told.append)
    for n in (5, 9, 9, 11):
        executor(ramp(n))
    (event,) = [e for e in told if e.kind == "fallback"]
    assert (event.detail, event.sizes) == (
        "the size of batch is beyond its largest bucket 8 (overflow='exact')",
        {"batch": 9},
    )


def test_exact_for_one_variable_only() -> None:
    """The other variable keeps its buckets, so its sizes cost no compiles."""
    executor = (
        BucketedExec(rows, dynamic_axes="b, s")
        .with_pow2("b", max=4, overflow="exact")
        .with_pow2("s", min=8, max=16)
    )
    for s in (3, 8, 5, 8):
        assert_like_jit(executor, rows, ramp(6, s, start=0) / 50)
    assert buckets(executor) == [{"b": 6, "s": 8}]
    assert executor.stats().fallback_calls == 4
    with pytest.raises(BucketOverflowError, match="'s'"):
        executor(ramp(6, 17))
    wholly = executor.with_exact("s")
    assert_like_jit(wholly, rows, ramp(6, 3) / 50)
    assert [b.exact for b in wholly.stats().buckets] == [True]


def test_each_variable_has_its_own_policy() -> None:
    executor = (
        BucketedExec(rows, dynamic_axes="b, s")
        .with_pow2(max=4)
        .with_overflow("extend")
        .with_overflow("exact", "b")
    )
    assert_like_jit(executor, rows, ramp(9, 5) / 50)
    assert buckets(executor) == [{"b": 9, "s": 8}]


def test_builders_take_a_policy_and_keep_it() -> None:
    for build in (
        lambda e: e.with_pow2("b", max=4, overflow="extend"),
        lambda e: e.with_linear(4, "b", max=4, overflow="extend"),
        lambda e: e.with_exponential(2, "b", max=4, overflow="extend"),
        lambda e: e.with_buckets([4], "b", overflow="extend"),
        lambda e: e.with_strategy(strategies.Boundaries([4]), "b", overflow="extend"),
        lambda e: e.with_overflow("extend", "b").with_buckets([4], "b"),
    ):
        executor = build(BucketedExec(total, dynamic_axes="b"))
        assert_like_jit(executor, total, ramp(7))
        assert buckets(executor) == [{"b": 8}]


@pytest.mark.parametrize("policy", ["EXTEND", "grow", None, 3])
def test_there_is_no_other_policy(policy: Any) -> None:
    with pytest.raises(SpecError, match="'error', 'extend', 'exact', got"):
        BucketedExec(total).with_overflow(policy)


@pytest.mark.parametrize(
    "choose",
    [
        lambda: BucketedExec(total, overflow="split"),  # type: ignore[arg-type]
        lambda: BucketedExec(total, overflow={"n": "split"}),  # type: ignore[dict-item]
        lambda: BucketedExec(total).with_overflow("split"),  # type: ignore[arg-type]
        lambda: BucketedExec(total).with_pow2("n", overflow="split"),  # type: ignore[arg-type]
    ],
)
def test_that_calls_are_not_split_names_what_to_use(choose: Callable[[], Any]) -> None:
    with pytest.raises(SpecError, match="'split'; use the method map, .* or 'extend'"):
        choose()


def test_a_policy_is_for_a_variable_there_is() -> None:
    with pytest.raises(SpecError, match="dim must be the name"):
        BucketedExec(total).with_overflow("exact", 0)  # type: ignore[arg-type]
    executor = BucketedExec(total, dynamic_axes="n").with_pow2().with_overflow("exact", "m")
    with pytest.raises(SpecError, match="an overflow policy for dimension 'm'"):
        executor(ramp(3))
