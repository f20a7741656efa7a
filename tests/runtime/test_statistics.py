"""What is counted, and that counting stays right, bounded and out of the way."""

import dataclasses
import gc
import json
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Check, strategies
from bucketjit._compile.cache import AtomicCount
from bucketjit._runtime.counters import CallCounter, Counters
from bucketjit.errors import FallbackWarning
from tests.comparison import ones


def attend(q: Any, k: Any) -> Any:
    return jax.nn.softmax(q @ k.T) @ k


def test_waste_of_each_dimension() -> None:
    executor = BucketedExec(attend, dynamic_axes=("s, _", "t, _")).with_pow2()
    for s, t in ((3, 5), (3, 5), (4, 8), (3, 5)):  # the second time on, by the warm path
        executor(ones(s, 2), ones(t, 2))
    stats = executor.stats()
    assert stats.dimension_waste == {"s": pytest.approx(3 / 16), "t": pytest.approx(9 / 32)}
    real, total = 3 * 2 * (3 + 5) + 2 * (4 + 8), 4 * 2 * (4 + 8)
    assert stats.padding_waste == pytest.approx((total - real) / total)
    assert stats.size_counts == {"s": {3: 3, 4: 1}, "t": {5: 3, 8: 1}}


def test_exact_calls_have_sizes_and_no_waste() -> None:
    executor = BucketedExec(lambda x: jnp.linalg.eigh(x)[1], dynamic_axes="n, n").with_pow2()
    with pytest.warns(FallbackWarning):
        for n in (3, 3, 5):
            executor(np.eye(n, dtype=np.float32))
    stats = executor.stats()
    assert stats.size_counts == {"n": {3: 2, 5: 1}}
    assert (dict(stats.dimension_waste), stats.padding_waste) == ({}, 0)
    assert list(stats.fallback_reasons.values()) == [3] and stats.fallback_calls == 3
    (program,) = stats.programs
    assert program.refused in stats.fallback_reasons and program.executables == 0


def test_each_executable() -> None:
    began = time.time()
    table = jnp.ones((1000, 4))
    executor = BucketedExec(lambda x: x @ table.T).with_pow2()
    for n in (3, 3, 4):
        executor(ones(n, 4))
    (bucket,) = executor.stats().buckets
    assert bucket.hits == 2
    assert bucket.nbytes >= table.nbytes + 4 * 1000 * 4
    assert bucket.flops == pytest.approx(2 * 4 * 4 * 1000, rel=0.2)
    assert began - 0.1 <= bucket.last_used <= time.time() + 0.1
    assert not bucket.pinned
    ((key, _),) = executor._engine.cache.slots()
    executor._engine.cache.pin(key)
    assert executor.stats().buckets[0].pinned


def test_programs_of_derivatives_are_told() -> None:
    executor = BucketedExec(lambda x: (x**2).sum()).with_pow2()
    jax.grad(executor)(jnp.ones(3))
    stats = executor.stats()
    assert sum(p.executables for p in stats.programs) == executor.cache_size() == 1
    executor.cache_clear()
    assert executor.stats().programs == ()


def test_reset_keeps_the_cache_and_counts_on() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    for n in (3, 5, 3):
        executor(ones(n))
    executor.reset_stats()
    stats = executor.stats()
    assert (stats.calls, stats.hits, stats.misses, stats.compiles) == (0, 0, 0, 0)
    assert (stats.padding_waste, dict(stats.size_counts)) == (0, {})
    assert [b.hits for b in stats.buckets] == [0, 0] and len(stats.programs) == 1
    assert executor.cache_info()[:2] == (0, 0)
    for n in (3, 3, 6):  # warm, warm, and a size that is new
        executor(ones(n))
    stats = executor.stats()
    assert (stats.calls, stats.hits, stats.misses, stats.compiles) == (3, 3, 0, 0)
    assert [b.hits for b in stats.buckets] == [2, 1]
    assert stats.padding_waste == pytest.approx((1 + 1 + 2) / (4 + 4 + 8))
    assert executor.cache_info()[:2] == (3, 0)


def test_reset_warns_of_no_reason_twice(recwarn: pytest.WarningsRecorder) -> None:
    executor = BucketedExec(lambda x: sum(x[i] for i in range(x.shape[0]))).with_pow2()
    executor(ones(3))
    executor.reset_stats()
    executor(ones(3))
    assert len(recwarn) == 1
    assert executor.stats().fallback_calls == 1


def test_what_is_evicted_stays_counted() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2().with_maxsize(1)
    for _ in range(2):
        for n in (3, 5):
            executor(ones(n))
            executor(ones(n))
    stats = executor.stats()
    assert (stats.calls, stats.hits, stats.misses, stats.evictions) == (8, 4, 4, 3)
    assert stats.size_counts == {"batch": {3: 4, 5: 4}}


def test_threads_lose_no_count() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    executor(ones(3))
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(lambda: [executor(ones(3)) for _ in range(200)]) for _ in range(4)]
        while not all(call.done() for call in calls):
            executor.stats()
    stats = executor.stats()
    assert stats.calls == stats.size_counts["batch"][3] == 801
    assert stats.buckets[0].hits == 800


@pytest.mark.parametrize("check", [Check.OFF, Check.POISON, Check.EXACT])
@pytest.mark.parametrize("strategy", [strategies.Pow2(), strategies.Exact()])
def test_calls_that_fail_while_they_run_are_counted(check: Check, strategy: Any) -> None:
    fails = False

    def on_host(x: Any) -> Any:
        if fails:
            raise ValueError("no")
        return x

    def fn(x: Any) -> Any:
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct((), jnp.float32), x.sum())

    executor = BucketedExec(fn, check=check).with_strategy(strategy)
    for fails in (True, False, True):  # of a new executable, one that is found, one that is known
        for _ in range(3):
            with pytest.raises((RuntimeError, ValueError)) if fails else nullcontext():
                jax.block_until_ready(executor(ones(3)))
    stats = executor.stats()
    assert stats.calls == stats.size_counts["batch"][3] == 9
    if check is not Check.EXACT:  # it runs more than one executable
        assert (stats.hits, stats.misses) == (8, 1)


def test_json() -> None:
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="b, _").with_pow2()
    for n in (3, 5, 3):
        executor(ones(n, 2))
    stats = executor.stats()
    told = json.loads(stats.to_json())
    assert told["calls"] == 3 and told["size_counts"] == {"b": {"3": 2, "5": 1}}
    assert [b["sizes"] for b in told["buckets"]] == [{"b": 4}, {"b": 8}]
    assert told["programs"][0]["inputs"] == ["x: float32[b, 2]"]
    assert stats.to_json(None).count("\n") == 0


def test_unknown_flops_are_null() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    executor(ones(3))
    ((_, slot),) = executor._engine.cache.slots()
    slot.entry.flops = float("nan")
    stats = executor.stats()
    assert stats.buckets[0].flops is None
    assert json.loads(stats.to_json())["buckets"][0]["flops"] is None


# --- of the moment, and only what is asked for -------------------------------------------------


@pytest.mark.parametrize("buckets", ["pow2", "auto"])
def test_a_snapshot_tells_of_the_moment_when_it_was_taken(buckets: str) -> None:
    """Whatever comes before it is read: warm calls, new sizes, programs, resets."""

    def both() -> Any:
        """A snapshot that is read at once, and one that is read later."""
        now, later = executor.stats(), executor.stats()
        return dataclasses.asdict(now), later

    executor = bucketjit.jit(lambda x: x[x > 0].sum() + x.sum(), buckets=buckets)
    taken = [both()]
    for x in (ones(3), ones(3), ones(5), ones(5), ones(3), ones(9), ones(3, 2)):
        executor(x)
        taken.append(both())
    executor.map([ones(2), ones(3)])
    taken.append(both())
    executor.explain(ones(2, 2, 2))
    executor.reset_stats()
    executor(ones(3))
    taken.append(both())
    executor.cache_clear()
    executor(ones(3))
    for now, later in reversed(taken):
        assert dataclasses.asdict(later) == now
    assert [now["calls"] for now, _ in taken[:8]] == [*range(8)]


def test_many_snapshots_that_nobody_reads_stay_right() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    snapshots = []
    for i in range(40):
        executor(ones(i % 3 + 2))
        snapshots.append(executor.stats())
    assert [s.calls for s in snapshots] == [*range(1, 41)]
    assert [s.hits + s.misses for s in snapshots] == [*range(1, 41)]


@pytest.mark.parametrize("what", ["settle", "reset_stats"])
def test_snapshots_that_come_while_others_are_computed_stay_right(what: str) -> None:
    """Another thread takes one while all that are held are computed, or while counters reset."""
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    for _ in range(3):
        executor(ones(3))
    history, first, meanwhile = executor._engine.counters.history, executor.stats(), []
    (moment,) = history.moments()
    buckets = moment.parts["buckets"]
    moment.parts["buckets"] = lambda m: (meanwhile.append(executor.stats()), buckets(m))[1]
    getattr(history if what == "settle" else executor, what)()
    executor(ones(3))
    assert [s.calls for s in (first, *meanwhile)] == [3, 3]


def test_what_is_not_asked_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of fallbacks takes one read, however many sizes were seen and are called."""
    executor = BucketedExec(lambda x: (jnp.linalg.eigh(x)[1]).sum()).with_pow2()
    with pytest.warns(FallbackWarning):
        for _ in range(2):
            for n in range(1, 9):
                executor(np.eye(n, dtype=np.float32))
    reads: list[Any] = []
    read = AtomicCount.read
    monkeypatch.setattr(AtomicCount, "read", lambda count: reads.append(count) or read(count))
    told = []
    for _ in range(5):
        snapshot = executor.stats()
        told.append(snapshot.fallback_calls)
        executor(np.eye(3, dtype=np.float32))
    assert told == [16, 17, 18, 19, 20] and len(reads) <= 5 + 2 * 5  # with two of the called size
    assert sum(snapshot.fallback_reasons.values()) == 20


# --- in bounded memory -------------------------------------------------------------------------


def test_sizes_are_bounded() -> None:
    counters = Counters()
    for n in range(1, 20_001):
        counters.call(CallCounter({"s": n}))
    counts = counters.snapshot().size_counts["s"]
    assert len(counts) <= 4096 and sum(counts.values()) == 20_000
    assert max(counts) == 20_000 and all(size % 8 == 0 for size in counts)


@pytest.mark.parametrize("text", ["long " * 20_000, "x" * 100_000, "\x1b" * 100_000])
def test_reasons_are_bounded_in_length(text: str) -> None:
    """The start and the end of a reason stay."""
    counters = Counters()
    for _ in range(3):
        counters.call(CallCounter({}, reason=f"dot_general: {text} [f.py:3]"))
    counters.fallback(f"dot_general: {text} [f.py:3]", counted=False)
    ((reason, calls),) = counters.snapshot().fallback_reasons.items()
    assert calls == 4 and len(reason) <= 500 and reason.isprintable()
    assert reason.startswith("dot_general: ") and reason.endswith(" [f.py:3]")


def test_counting_keeps_nothing_alive() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    executor(ones(3))
    executor(ones(3))
    ((_, slot),) = executor._engine.cache.slots()
    entry = weakref.ref(slot.entry)
    counters = weakref.ref(executor._engine.counters)
    executor.stats()
    del slot
    executor.cache_clear()
    gc.collect()
    assert entry() is None
    del executor
    gc.collect()
    assert counters() is None


@pytest.mark.parametrize("check", list(Check))
def test_a_checked_call_is_one_call(check: Check) -> None:
    executor = BucketedExec(lambda x: jnp.exp(x).sum(), check=check).with_pow2()
    for n in (3, 5, 3):
        executor(ones(n))
    stats = executor.stats()
    assert (stats.calls, stats.size_counts) == (3, {"batch": {3: 2, 5: 1}})
    assert stats.padding_waste == pytest.approx(5 / 16)
    assert stats.dimension_waste == {"batch": pytest.approx(5 / 16)}
