"""Several threads, one executor."""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from tests.comparison import in_threads, ramp

WORKERS = 12


def test_one_compile_per_bucket(xla_compiles: Callable[[], int]) -> None:
    executor = BucketedExec(lambda x: (jnp.sin(x), x.sum())).with_pow2()
    sizes = [[(3 * i + 5 * k) % 16 + 1 for k in range(25)] for i in range(WORKERS)]
    inputs = [[ramp(n) for n in row] for row in sizes]
    before = xla_compiles()
    results = in_threads(lambda row: [executor(x) for x in row], inputs)
    assert xla_compiles() - before == executor.cache_size() == executor.stats().compiles == 5
    for row, outs in zip(inputs, results, strict=True):
        for x, (a, b) in zip(row, outs, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.sin(x), rtol=1e-5)
            assert float(b) == x.sum()
    stats = executor.stats()
    assert stats.calls == WORKERS * 25
    assert stats.hits + stats.misses == stats.calls
    assert stats.misses == 5


def test_all_ask_for_the_same_bucket_first(xla_compiles: Callable[[], int]) -> None:
    executor = BucketedExec(lambda x: jnp.cos(x) * 2).with_pow2()
    before = xla_compiles()
    results = in_threads(lambda i: np.asarray(executor(ramp(5 + i % 4))), range(WORKERS))
    assert xla_compiles() - before == executor.cache_size() == 1
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, 2 * np.cos(ramp(5 + i % 4)), rtol=1e-5)


def test_different_buckets_compile_at_the_same_time() -> None:
    """Each thread's rule waits until the others are compiling too."""
    meeting = threading.Barrier(4)

    def slow(ctx: Any, x: Any) -> Any:
        meeting.wait(60)
        return ctx.bind(x)

    executor = BucketedExec(lambda x: jnp.exp(x)).with_pow2()
    executor = executor.with_rules({jax.lax.exp_p: slow})
    in_threads(lambda i: executor(ramp(2**i)), range(4))
    assert executor.cache_size() == 4


def test_mixed_signatures_guards_and_learning() -> None:
    def fn(x: Any, d: Any) -> Any:
        y = x * 2 if x.shape[0] > 4 else x * 3
        return y, d["w"] + 1

    executor = BucketedExec(fn).with_pow2()

    def work(i: int) -> None:
        for k in range(12):
            n, m = (i + k) % 9 + 1, 3 + (i * k) % 3
            dtype = (np.float32, np.int32)[(i + k) % 2]
            x, w = ramp(n, dtype=dtype), ramp(m)
            y, z = executor(x, {"w": w})
            np.testing.assert_array_equal(np.asarray(y), x * (2 if n > 4 else 3))
            np.testing.assert_array_equal(np.asarray(z), w + 1)
            assert y.dtype == dtype

    with warnings.catch_warnings(action="error"):
        in_threads(work, range(8))


def test_x64_belongs_to_the_thread() -> None:
    executor = BucketedExec(lambda x: x + 1).with_pow2()

    def work(i: int) -> None:
        for n in (3, 4, 5, 3):
            with jax.enable_x64(bool(i % 2)):
                result = executor(ramp(n, dtype=np.float64))
            assert result.dtype == (np.float64 if i % 2 else np.float32)
            np.testing.assert_array_equal(np.asarray(result), ramp(n) + 1)

    in_threads(work, range(8))
    assert executor.cache_size() == 4


def test_eviction_under_load(live_executables: Callable[[], int]) -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2().with_maxsize(2)

    def work(i: int) -> None:
        for k in range(10):
            n = 2 ** ((i + k) % 5)
            np.testing.assert_array_equal(np.asarray(executor(ramp(n))), 2 * ramp(n))

    in_threads(work, range(8))
    assert executor.cache_size() == 2
    assert live_executables() == 2


def test_a_failed_compile_raises_for_every_waiter() -> None:
    started = threading.Event()
    broken = True

    def rule(ctx: Any, x: Any) -> Any:
        started.set()
        if broken:
            raise KeyError("a defect")
        return ctx.bind(x)

    def fn(x: Any) -> Any:
        if broken:
            raise RuntimeError("cannot trace")
        return jnp.exp(x)

    executor = BucketedExec(fn).with_pow2().with_rules({jax.lax.exp_p: rule})

    def work(i: int) -> Any:
        with pytest.raises(RuntimeError, match="cannot trace"):
            executor(ramp(3))
        return True

    assert all(in_threads(work, range(8)))
    assert executor.cache_size() == 0
    broken = False
    np.testing.assert_allclose(np.asarray(executor(ramp(3))), np.exp(ramp(3)), rtol=1e-5)


def test_tracing_in_two_threads_keeps_comparisons_apart() -> None:
    """The hook on comparisons reports to the thread that compares."""
    meeting = threading.Barrier(2)

    def waits(value: int) -> Callable[[Any], Any]:
        def fn(x: Any) -> Any:
            if isinstance(x, jax.core.Tracer) and not isinstance(x.shape[0], int):
                meeting.wait(60)
                y = x * 2 if x.shape[0] == value else x
                meeting.wait(60)
                return y
            return x * 2 if x.shape[0] == value else x

        return fn

    executors = [BucketedExec(waits(v)).with_pow2() for v in (7, 8)]
    results = in_threads(lambda executor: executor(ramp(3)), executors)
    for result in results:
        np.testing.assert_array_equal(np.asarray(result), ramp(3))


def test_an_axis_opened_during_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call goes on with the axes that it was resolved with."""
    from bucketjit._compile.kernel import Kernel

    build, waiting, release = Kernel.build, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        if not waiting.is_set():
            waiting.set()
            assert release.wait(60)
        return build(*args)

    monkeypatch.setattr(Kernel, "build", slow)
    executor = BucketedExec(lambda x, y: (x.sum(), y.sum())).with_pow2()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(executor, np.ones(4, np.float32), np.ones(4, np.float32))
        assert waiting.wait(60)
        assert executor(np.ones(5, np.float32), np.ones(3, np.float32)) == (5, 3)
        release.set()
        assert first.result(60) == (4, 4)
    assert executor(np.ones(4, np.float32), np.ones(4, np.float32)) == (4, 4)
