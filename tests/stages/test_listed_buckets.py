"""Plans that the first call compiles."""

import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, CompileBudget
from bucketjit._compile import provider
from bucketjit.errors import CompileBudgetError, CompileBudgetWarning, SpecError
from bucketjit.types import Event
from tests.comparison import assert_goes_with_its_last_reference, assert_like_jit, floats


def rows(x: Any) -> Any:
    return jnp.tanh(x).sum(1)


def buckets(executor: BucketedExec) -> list[dict[str, int]]:
    return sorted((dict(b.sizes) for b in executor.stats().buckets), key=lambda b: [*b.values()])


def grid(b: Sequence[int], s: Sequence[int]) -> list[dict[str, int]]:
    return [{"b": n, "s": m} for n in b for m in s]


@pytest.fixture
def executor() -> BucketedExec:
    return BucketedExec(rows, dynamic_axes="b, s").with_ahead_compile()


def limited(budget: int | CompileBudget) -> BucketedExec:
    return BucketedExec(rows, dynamic_axes="b, s", compile_budget=budget).with_ahead_compile()


def test_every_combination_is_there_after_the_first_call(executor: BucketedExec) -> None:
    executor = executor.with_buckets([2, 8], "b").with_buckets([5, 9, 31], "s")
    assert_like_jit(executor, rows, floats(2, 4))
    assert buckets(executor) == grid([2, 8], [5, 9, 31])
    with executor.forbid_compiles():
        for b, s in ((1, 1), (2, 5), (3, 6), (8, 31), (2, 9)):
            assert_like_jit(executor, rows, floats(b, s))
    assert executor.stats().compiles == 6


def test_variables_without_a_list_have_the_bucket_of_the_call(executor: BucketedExec) -> None:
    executor = executor.with_pow2("b").with_buckets([5, 9], "s")
    assert_like_jit(executor, rows, floats(3, 4))
    assert buckets(executor) == grid([4], [5, 9])
    assert_like_jit(executor, rows, floats(9, 7))  # by itself, not with the whole plan again
    assert buckets(executor) == [*grid([4], [5, 9]), {"b": 16, "s": 9}]


def test_nothing_more_without_a_list(executor: BucketedExec) -> None:
    for each in (executor.with_pow2(), executor):
        assert_like_jit(each, rows, floats(3, 4))
        assert each.stats().compiles == 1


def test_each_signature_and_derivative_has_its_own(executor: BucketedExec) -> None:
    executor = executor.with_pow2("b").with_buckets([5, 9], "s")
    x = floats(3, 4)
    executor(x)
    executor(x.astype(np.float16))
    assert executor.stats().compiles == 4
    got = jax.grad(lambda x: executor(x).sum())(jnp.asarray(x))
    np.testing.assert_allclose(got, jax.grad(lambda x: rows(x).sum())(x), rtol=1e-5)
    assert executor.stats().compiles == 6
    jax.grad(lambda x: executor(x).sum())(jnp.asarray(floats(3, 8)))
    assert executor.stats().compiles == 6
    executor.cache_clear()
    assert_like_jit(executor, rows, x)
    assert buckets(executor) == grid([4], [5, 9])


def told(executor: BucketedExec) -> tuple[BucketedExec, list[str]]:
    """What it says of plans that it has not compiled."""
    found: list[str] = []

    def note(event: Event) -> None:
        if event.kind == "ahead":
            found.append(event.detail)

    return executor.with_on_event(note), found


REST = "not all listed buckets are compiled: the rest is beyond what may be compiled"


def test_of_a_budget_the_call_itself_comes_first() -> None:
    executor = limited(2)
    executor, reasons = told(executor.with_buckets([2, 4, 8], "b").with_buckets([9], "s"))
    for _ in range(3):
        assert_like_jit(executor, rows, floats(2, 4))
    assert_like_jit(executor, rows, floats(7, 4))  # the largest comes second
    assert executor.stats().compiles == 2 and reasons == [REST]
    with pytest.raises(CompileBudgetError):
        executor(floats(3, 4))


def test_a_budget_that_warns_is_for_calls_not_for_the_plan() -> None:
    executor = limited(CompileBudget(1, action="warn"))
    executor, reasons = told(executor.with_buckets([2, 4, 8], "b").with_buckets([9], "s"))
    assert_like_jit(executor, rows, floats(2, 4))
    assert executor.stats().compiles == 1 and reasons == [REST]
    with pytest.warns(CompileBudgetWarning):
        assert_like_jit(executor, rows, floats(3, 4))


def test_while_compiles_are_forbidden_nothing_begins(executor: BucketedExec) -> None:
    executor, reasons = told(executor.with_buckets([2, 4, 8], "b").with_buckets([9], "s"))
    with executor.forbid_compiles(), pytest.raises(CompileBudgetError):
        executor(floats(2, 4))
    assert executor.stats().compiles == 0
    assert_like_jit(executor, rows, floats(2, 4))
    assert executor.stats().compiles == 3
    assert not reasons


def test_what_is_in_files_is_loaded_though_nothing_may_be_compiled(
    executor: BucketedExec, tmp_path: Any
) -> None:
    def make(*lengths: int) -> BucketedExec:
        made = executor.with_buckets(lengths, "b").with_buckets([9], "s")
        return made.with_persistence(tmp_path)

    first = make(2, 8)
    assert_like_jit(first, rows, floats(2, 4))
    second = make(2, 4, 8)
    with second.forbid_compiles():
        assert_like_jit(second, rows, floats(2, 4))
        assert (second.stats().loads, second.stats().compiles) == (2, 0)
        with pytest.raises(CompileBudgetError):
            second(floats(3, 4))
    assert_like_jit(second, rows, floats(2, 3))
    assert (second.stats().loads, second.stats().compiles) == (2, 1)


def test_a_cleared_cache_ends_the_plan(
    executor: BucketedExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor.with_buckets(range(1, 9), "b").with_buckets([9], "s")
    prepare, cleared = provider.ExecutableProvider.prepare, threading.Event()

    def clearing(self: Any, order: Any, **how: Any) -> Any:
        done = prepare(self, order, **how)
        if not cleared.is_set():
            cleared.set()
            executor.cache_clear()
        return done

    monkeypatch.setattr(provider.ExecutableProvider, "prepare", clearing)
    executor(floats(2, 4))
    monkeypatch.undo()
    assert executor.cache_size() <= 1
    assert_like_jit(executor, rows, floats(2, 4))


@pytest.mark.parametrize("maxsize", [5, 128, None])
def test_a_plan_beyond_the_cache_is_told_of(executor: BucketedExec, maxsize: int | None) -> None:
    executor, reasons = told(executor.with_maxsize(maxsize))
    executor = executor.with_buckets(range(1, 2000), "b").with_buckets(range(1, 2000), "s")
    assert_like_jit(executor, rows, floats(2, 4))
    assert executor.stats().compiles == 1
    assert reasons == ["no listed bucket is compiled: there are 3996001, beyond the cache"]


def test_other_executables_are_not_driven_out(executor: BucketedExec) -> None:
    executor, reasons = told(executor.with_maxsize(8))
    executor = executor.with_buckets([2, 4, 8], "b").with_buckets([5, 9], "s")
    for dtype in (np.float32, np.float16, np.int32):
        for b in (1, 8):
            x = (10 * floats(b, 4)).astype(dtype)
            np.testing.assert_allclose(executor(x), jax.jit(rows)(x), rtol=1e-2, atol=1e-2)
    stats = executor.stats()
    assert stats.compiles == 6 + 2 + 2
    assert stats.evictions == 2  # by calls, not by plans
    assert reasons == 2 * ["no listed bucket is compiled: the cache has no room for 6 buckets"]


def test_a_plan_that_does_not_fit_into_the_bytes_ends(executor: BucketedExec) -> None:
    executor, reasons = told(executor.with_maxsize(max_bytes=1))
    executor = executor.with_buckets(range(1, 31), "b").with_buckets([9], "s")
    assert_like_jit(executor, rows, floats(2, 4))
    assert executor.stats().compiles < 10
    [reason] = reasons
    assert "would drive executables out of the cache" in reason


def test_an_executor_goes_with_its_last_reference() -> None:
    executor = BucketedExec(rows, dynamic_axes="b, s").with_ahead_compile()
    made = [executor.with_buckets([2, 8], "b").with_buckets([9], "s")]
    made[0](floats(1, 4))
    assert_goes_with_its_last_reference(made)


def test_other_threads_do_not_wait_for_the_plan(
    executor: BucketedExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor.with_buckets([2, 8], "b").with_buckets([9], "s")
    held, begun = threading.Event(), threading.Event()
    prepare = provider.ExecutableProvider.prepare

    def slow(self: Any, order: Any, **how: Any) -> bool:
        begun.set()
        if order.sizes["b"] == 8:
            held.wait(60)
        return prepare(self, order, **how)

    monkeypatch.setattr(provider.ExecutableProvider, "prepare", slow)
    first = threading.Thread(target=executor, args=(floats(8, 4),))
    first.start()
    assert begun.wait(60)
    assert_like_jit(executor, rows, floats(2, 4))
    assert first.is_alive()
    held.set()
    first.join(60)
    assert not first.is_alive()
    assert executor.stats().compiles == 2


@pytest.mark.parametrize("workers", [0, -1, True, 1.5, "2"])
def test_malformed_workers(workers: Any) -> None:
    with pytest.raises(SpecError, match="workers must be a positive int or None"):
        BucketedExec(rows).with_ahead_compile(workers)
