"""Where executables come from: warm-up, the background, a budget; and which of them stay."""

import contextlib
import gc
import itertools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Check, CompileBudget, Fallback, strategies
from bucketjit._compile.provider import ExecutableProvider
from bucketjit._stages import warmup
from bucketjit.errors import CompileBudgetError, CompileBudgetWarning, FallbackWarning, SpecError
from bucketjit.types import Event
from tests.alone import run_python
from tests.comparison import assert_like_jit, assert_same, buckets, in_threads, ramp, unrolled


def spread(p: Any, x: Any) -> Any:
    return jax.nn.softmax(x * p["w"], axis=0), x.mean(0)


PARAMS = {"w": np.float32(2)}
LIKE = jax.ShapeDtypeStruct((1, 3), jnp.float32)


def slow_rule(go: threading.Event, begun: threading.Event | None = None) -> Callable[..., Any]:
    def rule(ctx: Any, x: Any) -> Any:
        if begun is not None:
            begun.set()
        assert go.wait(60)
        return ctx.bind(x)

    return rule


# --- warm-up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_warm_up_leaves_nothing_to_compile(workers: int | None, xla_compiles: Any) -> None:
    executor = BucketedExec(spread, dynamic_axes=(None, "b, 3")).with_pow2()
    sizes = {"b": range(1, 20)}
    report = executor.warmup(PARAMS, LIKE, sizes=sizes, workers=workers, progress=False)
    assert [b["b"] for b in report.compiled] == [32, 16, 8, 4, 2, 1]
    assert not (report.present or report.failed or report.exact or report.left)
    assert report.seconds > 0 and str(report).startswith("6 compiled, 0 present")
    before = xla_compiles()
    with executor.forbid_compiles():
        for n in (1, 3, 19, 32):
            executor(PARAMS, ramp(n, 3))
            executor(PARAMS, jax.device_put(ramp(n, 3)))
    executor.warmup(PARAMS, LIKE, sizes=sizes, progress=False)
    assert xla_compiles() == before
    assert executor.stats().compiles == executor.cache_size() == 6
    for n in (1, 3, 19):
        assert_like_jit(executor, spread, PARAMS, ramp(n, 3))


def test_warm_up_of_containers_keywords_sizes_and_static_arguments() -> None:
    def fn(d: Any, k: int, how: str, *, y: Any) -> Any:
        return d["x"] * k + y.sum(), jnp.arange(k) if how == "a" else None

    executor = BucketedExec(
        fn, dynamic_axes={"d": {"x": "n"}, "k": "k", "y": "m"}, static_argnames="how"
    ).with_pow2()
    d = {"x": jax.ShapeDtypeStruct((1,), jnp.float32)}
    sizes = {"n": [3, 4], "k": 5, "m": range(1, 3)}
    report = executor.warmup(d, 1, "a", y=ramp(1), sizes=sizes, progress=False)
    assert len(report.compiled) == 2
    with executor.forbid_compiles():
        assert_same(
            executor({"x": ramp(3)}, 5, "a", y=ramp(2)),
            jax.jit(fn, static_argnums=(1, 2))({"x": ramp(3)}, 5, "a", y=ramp(2)),
        )


def test_warm_up_by_plans() -> None:
    plan = strategies.fit({"b": [4, 8, 8], "s": [16, 16, 64]}, buckets=4)
    executor = BucketedExec(lambda x: x.sum(1), dynamic_axes="b, s", buckets=plan)
    report = executor.warmup(np.zeros((1, 1), np.float32), sizes=plan, progress=False)
    assert len(report.compiled) == 4
    with executor.forbid_compiles():
        for b, s in ((1, 1), (4, 16), (3, 17), (8, 16), (5, 64)):
            np.testing.assert_allclose(executor(ramp(b, s)), ramp(b, s).sum(1), rtol=1e-5)
    one = strategies.Boundaries([5, 9])
    with pytest.raises(SpecError, match="for sizes of one dimension, and these arguments have"):
        executor.warmup(np.zeros((1, 4), np.float32), sizes=one)
    for sizes in ({"n": one}, one):
        executor = BucketedExec(lambda x: x * 2, dynamic_axes="n").with_strategy(one)
        report = executor.warmup(ramp(1), sizes=sizes, progress=False)
        assert list(map(dict, report.compiled)) == [{"n": 9}, {"n": 5}]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"workers": 0}, "workers must be an int of at least 1, or None, got 0"),
        ({"sizes": [{"batch": [3, 4]}]}, r"each dict of a list has one size of 'batch'.*\[3, 4\]"),
        ({"sizes": {"batch": (n for n in (1.5, 2))}}, "the sizes of 'batch' must be ints"),
        ({"sizes": {"batch": "3"}}, "the sizes of 'batch' must be ints"),
        ({"sizes": {"batch": []}}, "the sizes of 'batch' must be ints"),
        (
            {"sizes": {"batch": strategies.Pow2()}},
            r"strategy that has a largest bucket such as .*got Pow2\(\)",
        ),
        ({"sizes": {"batch": strategies.Linear(1, max=70_000)}}, "not too many below it"),
        ({"sizes": strategies.Linear(8)}, r"has a largest bucket .*got Linear\(8\)"),
        ({"time_budget": "soon"}, "time_budget must be seconds, or None, got 'soon'"),
        ({"sizes": {"batch": itertools.count()}}, "more than 4194304 sizes of 'batch' are too"),
        ({"first_run": "no"}, "first_run must be True or False, got 'no'"),
        ({"progress": "off"}, "progress must be True or False, got 'off'"),
    ],
)
def test_what_a_warm_up_does_not_take(options: dict[str, Any], why: str) -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    with pytest.raises(SpecError, match=why):
        executor.warmup(ramp(1), **{"progress": False, **options})
    assert executor.warmup(ramp(3), progress=False).compiled == ({"batch": 4},)


def test_of_many_sizes_the_ends_of_each_bucket_stand_for_those_between() -> None:
    traced = []

    def fn(x: Any) -> Any:
        traced.append(1)
        return x.sum(1) if x.shape[0] > 70 else x.sum(1) * 2

    executor = BucketedExec(fn, dynamic_axes="b, s").with_pow2().with_pow2("s", min=512)
    like = jax.ShapeDtypeStruct((1, 1), np.float32)
    long = {"b": [128], "s": range(600, 10_001)}
    report = executor.warmup(like, sizes=long, progress=False)
    assert [b["s"] for b in report.compiled] == [16384, 8192, 4096, 2048, 1024]
    small = {"b": range(65, 129), "s": range(1, 513)}
    report = executor.warmup(like, sizes=small, workers=1, progress=False)
    assert [b["b"] for b in report.compiled] == [128, 70]  # beyond 70, and up to there
    traces = len(traced)
    for b, s in ((66, 7), (99, 300)):
        np.testing.assert_allclose(executor(ramp(b, s)), fn(ramp(b, s)), rtol=1e-5)
    assert len(traced) == traces + 2 and executor.stats().compiles == 7
    each = BucketedExec(lambda x: x.sum(1), dynamic_axes="b, s").with_exact()
    with pytest.raises(SpecError, match="65664 combinations of sizes, those in one bucket not"):
        each.warmup(like, sizes={"b": range(1, 129), "s": range(1, 514)}, progress=False)


def test_a_warm_up_of_more_than_the_cache_holds_says_so() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2().with_maxsize(2)
    report = executor.warmup(ramp(1), sizes={"batch": [2, 4, 8, 16]}, workers=1, progress=False)
    assert len(report.compiled) == 4 and executor.cache_size() == 2
    assert [b["batch"] for b in report.evicted] == [16, 8]
    assert str(report).splitlines()[1:] == [
        "  evicted batch=16: the cache is full",
        "  evicted batch=8: the cache is full",
    ]


@pytest.mark.parametrize("beyond", [False, True], ids=["no strategy", "beyond the buckets"])
def test_warm_up_of_exact_runs_compiles_sizes(beyond: bool) -> None:
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="batch")
    executor = executor.with_buckets([2], overflow="exact") if beyond else executor
    report = executor.warmup(ramp(1), sizes={"batch": [3, 5]}, progress=False)
    assert list(map(dict, report.compiled)) == [{"batch": 5}, {"batch": 3}]
    with executor.forbid_compiles():
        np.testing.assert_array_equal(executor(ramp(3)), 2 * ramp(3))
        with pytest.raises(CompileBudgetError, match="batch"):
            executor(ramp(4))


@pytest.mark.parametrize("axes", [None, ([0], [0]), ([0], None), ([0, 1], [0])])
def test_warm_up_without_a_strategy_of_what_has_no_names(axes: Any) -> None:
    given = {} if axes is None else {"dynamic_axes": axes}
    executor = BucketedExec(lambda x, w: x @ w, **given)
    executor.warmup(ramp(5, 3), ramp(3, 2), progress=False)
    with executor.forbid_compiles():
        executor(ramp(5, 3), ramp(3, 2))
    sizes = {"batch": [4, 5, 6]}  # of the first argument's axis only
    report = executor.warmup(ramp(5, 3), ramp(3, 2), sizes=sizes, progress=False)
    assert not report.failed and (len(report.compiled), len(report.present)) == (2, 1)
    with executor.forbid_compiles():
        for n in (4, 5, 6):
            np.testing.assert_allclose(executor(ramp(n, 3), ramp(3, 2)), ramp(n, 3) @ ramp(3, 2))
    with pytest.raises(SpecError, match="no open axis; name those that vary in dynamic_axes"):
        BucketedExec(jnp.exp).warmup(np.float32(3), sizes={"batch": 4})


def test_warm_up_of_sizes_that_no_array_can_have() -> None:
    for strategy in (strategies.Exact(), strategies.Pow2()):
        executor = BucketedExec(jnp.exp, dynamic_axes="b, b").with_strategy(strategy)
        report = executor.warmup(ramp(3, 3), sizes={"b": [2**33, 4]}, progress=False)
        [(sizes, why)] = report.failed
        assert sizes == {"b": 2**33} and "no array of float32 can have the shape" in why
        assert [b["b"] for b in report.compiled] == [4]


def test_one_failure_does_not_lose_the_rest() -> None:
    def picky(ctx: Any, x: Any) -> Any:
        if x.shape == (8,):
            raise RuntimeError("not this one")
        return ctx.bind(x)

    executor = BucketedExec(jnp.exp).with_buckets([4, 8, 16]).with_rules({jax.lax.exp_p: picky})
    report = executor.warmup(ramp(1), sizes={"batch": [3, 7, 9, 99]}, progress=False)
    assert sorted(b["batch"] for b in report.compiled) == [4, 16]
    reasons = {s["batch"]: why for s, why in report.failed}
    assert "not this one" in reasons[8] and "99" in reasons[99]
    assert "failed batch=8" in str(report)


@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
def test_what_cannot_be_masked_is_said() -> None:
    executor = BucketedExec(lambda x: unrolled(x), dynamic_axes="n").with_pow2()
    report = executor.warmup(ramp(3), sizes={"n": [3, 0]}, progress=False)
    assert {s["n"] for s, _ in report.exact} == {s["n"] for s in report.compiled} == {3, 0}
    with executor.forbid_compiles():
        for n in (3, 0):
            np.testing.assert_array_equal(executor(ramp(n)), unrolled(ramp(n)))


def test_an_interrupted_warm_up_is_gone_on_with() -> None:
    stop_at = {16}

    def interrupted(ctx: Any, x: Any) -> Any:
        if x.shape[0] in stop_at:
            stop_at.clear()
            raise KeyboardInterrupt
        return ctx.bind(x)

    executor = BucketedExec(jnp.exp).with_pow2().with_rules({jax.lax.exp_p: interrupted})
    ask = lambda: executor.warmup(  # noqa: E731
        ramp(1), sizes={"batch": range(1, 65)}, workers=1, progress=False
    )
    with pytest.raises(KeyboardInterrupt):
        ask()
    assert buckets(executor) == [{"batch": 64}, {"batch": 32}]
    report = ask()
    assert len(report.present) == 2 and [b["batch"] for b in report.compiled] == [16, 8, 4, 2, 1]


def test_a_time_budget_ends_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_LOOKED_UP_AT_LEAST", 60)  # whatever the first trace takes
    executor = BucketedExec(jnp.cos).with_pow2()
    report = executor.warmup(ramp(1), sizes={"batch": range(1, 65)}, time_budget=0, progress=False)
    assert not report.compiled and len(report.left) == 7


def test_progress_is_told_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    executor = BucketedExec(jnp.cos).with_pow2()
    executor.warmup(ramp(1), sizes={"batch": [1, 2]}, workers=1)
    assert capsys.readouterr().err.splitlines() == [
        "cos: compiled batch=2 (1/2)",
        "cos: compiled batch=1 (2/2)",
    ]
    executor.warmup(ramp(1), sizes={"batch": [1, 2, 4]}, progress=False)
    assert capsys.readouterr().err == ""


def test_what_is_left_of_a_warm_up_is_what_calls_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_LOOKED_UP_AT_LEAST", 60)
    executor = BucketedExec(jnp.linalg.eigh, dynamic_axes="n, n").with_pow2()
    prepare = ExecutableProvider.prepare

    def late(self: Any, order: Any, **how: Any) -> bool:
        time.sleep(1.2)
        return prepare(self, order, **how)

    monkeypatch.setattr(ExecutableProvider, "prepare", late)
    ask = {"sizes": {"n": [3, 9, 20]}, "workers": 1, "progress": False}
    report = executor.warmup(ramp(3, 3), time_budget=1.0, **ask)  # enough to find out
    assert len(report.exact) == 3 and not report.compiled and not report.failed
    assert [s["n"] for s in report.left] == [20, 9, 3]
    monkeypatch.undo()
    report = executor.warmup(ramp(3, 3), **ask)
    assert [s["n"] for s in report.compiled] == [20, 9, 3] and not report.left


def test_warm_ups_at_the_same_time_report_what_each_compiled() -> None:
    executor = BucketedExec(lambda x: jnp.tanh(x) * 2).with_pow2()
    ask = {"sizes": {"batch": [4, 8, 16, 32]}, "progress": False}
    reports = in_threads(lambda _: executor.warmup(ramp(1), **ask), range(4))
    assert sum(len(r.compiled) for r in reports) == executor.stats().compiles == 4
    assert sum(len(r.present) for r in reports) == 12


def test_warm_up_of_what_must_not_run_exact() -> None:
    executor = BucketedExec(jnp.linalg.eigh, dynamic_axes="n, n", fallback=Fallback.ERROR)
    executor = executor.with_pow2()
    for _ in range(2):
        report = executor.warmup(ramp(3, 3), sizes={"n": [3, 9]}, progress=False)
        assert not report.compiled and not report.exact and executor.cache_size() == 0
        assert [s["n"] for s, _ in report.failed] == [3, 9]
        assert all(why.startswith("FallbackError: eigh: eigenvectors") for _, why in report.failed)


def test_warm_up_of_structs_that_are_placed(xla_compiles: Callable[[], int]) -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=here)
    executor = BucketedExec(lambda x: x.sum()).with_pow2()
    executor.warmup(like, sizes={"batch": [4, 8]}, progress=False)
    before = xla_compiles()
    for n in (3, 4, 5, 8):
        executor(jax.device_put(ramp(n), here))
    assert xla_compiles() == before
    executor(ramp(3))  # another placement is another compile, and counted
    assert xla_compiles() - before == 1 and executor.stats().compiles == 3


def test_without_sizes_every_bucket_of_the_program_is_loaded(tmp_path: Path) -> None:
    def fn(x: Any) -> Any:
        return (x * 3).sum(0)

    first = BucketedExec(fn, dynamic_axes="n, _").with_pow2()
    assert [b["n"] for b in first.warmup(ramp(3, 2), progress=False).compiled] == [4]
    first = first.with_persistence(tmp_path)
    for n in (3, 9, 30):
        first(ramp(n, 2))
    first(ramp(5, 2, dtype=np.int32))  # another program
    other = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_pow2()
    other.with_persistence(tmp_path)(ramp(100, 2))

    again = first.with_persistence(tmp_path)
    report = again.warmup(ramp(3, 2), progress=False)
    assert report.loaded == 3 and str(report).startswith("3 compiled (3 of them from files)")
    assert [b["n"] for b in report.compiled] == [32, 16, 4]
    assert again.warmup(ramp(3, 2), progress=False).compiled == ()
    assert again.stats().compiles == 0
    with again.forbid_compiles():
        np.testing.assert_array_equal(again(ramp(12, 2)), fn(ramp(12, 2)))


def test_sizes_may_be_an_array_or_none_at_all() -> None:
    double = BucketedExec(lambda x: x * 2, dynamic_axes="n").with_pow2()
    report = double.warmup(ramp(3), sizes={"n": jnp.arange(1, 9)}, progress=False)
    assert [dict(bucket) for bucket in report.compiled] == [{"n": n} for n in (8, 4, 2, 1)]
    constant = BucketedExec(lambda: jnp.ones(3)).with_pow2()
    assert constant.warmup(sizes={}, progress=False).compiled == ({},)


# --- contexts of JAX, which hold for one thread -------------------------------------------------

CONTEXTS: dict[str, Callable[[], Any]] = {
    "enable_x64": lambda: jax.enable_x64(True),
    "default_matmul_precision": lambda: jax.default_matmul_precision("highest"),
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "default_device": lambda: jax.default_device(jax.devices()[0]),
    "debug_nans": lambda: jax.debug_nans(True),
}


def row_sums(x: Any) -> Any:
    return (x @ x.T).sum(1)


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_context_is_that_of_the_warm_up_or_of_the_call(name: str) -> None:
    """In threads of a warm-up, and in the background, which keeps nothing of it."""
    executor = BucketedExec(row_sums, dynamic_axes="b, _").with_pow2()
    x, large = (np.arange(3.0 * n).reshape(n, 3) for n in (3, 9))
    with CONTEXTS[name]():
        assert not executor.warmup(x, progress=False).failed
        with executor.forbid_compiles():
            assert_like_jit(executor, row_sums, x)
        later = executor.with_background_compile()
        for each in (large, x):
            assert_like_jit(later, row_sums, each)
        later.wait_for_compiles()
        with later.forbid_compiles():
            assert_like_jit(later, row_sums, x)
        assert later.stats().compiles == 2
        later(np.ones((5, 3)))
        later.wait_for_compiles()
    for each in (large, x):
        assert_like_jit(later, row_sums, each)


# --- in the background -------------------------------------------------------------------------


def test_a_larger_bucket_stands_in_until_its_own_is_ready() -> None:
    go, begun = threading.Event(), threading.Event()
    go.set()
    executor = BucketedExec(lambda x: (jnp.exp(-x), x.sum())).with_pow2()
    executor = executor.with_rules({jax.lax.exp_p: slow_rule(go, begun)}).with_background_compile()
    executor(ramp(60))
    go.clear()
    begun.clear()
    for n in (3, 5, 3, 7):
        first, total = executor(ramp(n))  # returns, though nothing of its size is compiled
        np.testing.assert_allclose(first, np.exp(-ramp(n)), rtol=1e-5)
        assert float(total) == ramp(n).sum()
    assert begun.wait(60) and buckets(executor) == [{"batch": 64}]
    assert not executor.wait_for_compiles(0.05)
    go.set()
    assert executor.wait_for_compiles(60)
    assert buckets(executor) == [{"batch": 64}, {"batch": 4}, {"batch": 8}]
    before = {b.sizes["batch"]: b.hits for b in executor.stats().buckets}
    executor(ramp(3))
    after = {b.sizes["batch"]: b.hits for b in executor.stats().buckets}
    assert after == {**before, 4: before[4] + 1}
    stats = executor.stats()
    assert stats.compiles == 3 and stats.hits + stats.misses == stats.calls + 2


def test_nothing_stands_in_for_what_does_not_fit() -> None:
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="a, b").with_pow2()
    executor = executor.with_background_compile()
    for a, b in ((3, 3), (9, 2), (2, 9), (4, 4), (3, 2)):
        np.testing.assert_array_equal(executor(ramp(a, b)), 2 * ramp(a, b))
    assert executor.wait_for_compiles(60)
    assert {tuple(b.values()) for b in buckets(executor)} == {(4, 4), (16, 2), (2, 16), (4, 2)}


def test_an_error_in_the_background_surfaces(caplog: pytest.LogCaptureFixture) -> None:
    def picky(ctx: Any, x: Any) -> Any:
        if x.shape == (4,):
            raise KeyError("no four")
        return ctx.bind(x)

    executor = BucketedExec(jnp.exp).with_pow2().with_rules({jax.lax.exp_p: picky})
    executor = executor.with_background_compile()
    executor(ramp(9))
    with caplog.at_level(logging.ERROR, "bucketjit"):
        np.testing.assert_allclose(executor(ramp(3)), np.exp(ramp(3)), rtol=1e-5)
        executor.wait_for_compiles(60)
    assert "no four" in caplog.text
    with pytest.warns(FallbackWarning, match="no four"):
        np.testing.assert_allclose(executor(ramp(3)), np.exp(ramp(3)), rtol=1e-5)
    np.testing.assert_allclose(executor(ramp(9)), np.exp(ramp(9)), rtol=1e-5)


def test_many_threads_one_compile_each(xla_compiles: Callable[[], int]) -> None:
    executor = BucketedExec(lambda x: (jnp.sin(x), x.sum())).with_pow2().with_background_compile(2)
    executor(ramp(100))
    before = xla_compiles()

    def work(i: int) -> None:
        for k in range(20):
            n = (7 * i + 11 * k) % 100 + 1
            got, total = executor(ramp(n))
            np.testing.assert_allclose(got, np.sin(ramp(n)), rtol=1e-4, atol=1e-5)
            assert float(total) == ramp(n).sum()

    in_threads(work, range(16))
    assert executor.wait_for_compiles(60)
    assert xla_compiles() - before == executor.cache_size() - 1 == 7


def test_the_queue_is_bounded() -> None:
    go = threading.Event()
    go.set()
    executor = BucketedExec(jnp.exp).with_buckets([1, 2, 3, 4, 5, 6, 90])
    executor = executor.with_rules({jax.lax.exp_p: slow_rule(go)})
    executor = executor.with_background_compile(queue=2)
    executor(ramp(90))
    go.clear()
    for n in range(1, 7):
        executor(ramp(n))
    go.set()
    assert executor.wait_for_compiles(60)
    assert executor.cache_size() in (3, 4)  # the first may have left the queue in time
    for _ in range(6):
        for n in range(1, 7):
            executor(ramp(n))
        executor.wait_for_compiles(60)
    assert executor.cache_size() == 7


_IMPORTS = """
import atexit, os, signal, threading, time
import jax, jax.numpy as jnp, numpy as np
from bucketjit import BucketedExec
begun, ends = threading.Event(), threading.Event()
def slow(ctx, x):
    if x.shape[0] < 64:
        begun.set()
        time.sleep(1)
    return ctx.bind(x)
executor = BucketedExec(jnp.exp).with_pow2().with_rules({jax.lax.exp_p: slow})
executor = executor.with_background_compile()
def call(*sizes):
    for n in sizes:
        y = executor(np.zeros(n, np.float32))
    return y
"""

AT_EXIT = {
    "a call starts no compile": (  # it is served by the larger bucket
        """
call(64)
atexit.register(lambda: print(call(3), begun.wait(1), executor.cache_size()))
""",
        "[1. 1. 1.] False 1\n",
    ),
    "interrupts do not cut a compile short": (
        """
call(64, 3)
begun.wait()
def interrupt():
    ends.wait()
    for _ in range(3):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
atexit.register(ends.set)
""",
        "",
    ),
    "compiles wait": ("call(64, 1, 2, 4, 8, 16, 32)", ""),
    "who waits for them waits for nothing": (
        """
atexit.register(lambda: print(executor.wait_for_compiles(), flush=True))
call(64, 1, 2, 4, 8, 16, 32)
""",
        "False\n",
    ),
    "a warm-up is under way in a thread": (
        """
executor = BucketedExec(jnp.exp).with_linear(1).with_on_event(lambda event: begun.set())
example = jax.ShapeDtypeStruct((1,), np.float32)
warm_up = lambda: executor.warmup(example, sizes={"batch": range(1, 257)}, progress=False)
thread = threading.Thread(target=warm_up, daemon=True)
thread.start()
atexit.register(lambda: (thread.join(), print(executor.cache_size() < 256, flush=True)))
begun.wait()
""",
        "True\n",
    ),
}


@pytest.mark.parametrize("what", AT_EXIT)
def test_the_interpreter_ends(what: str) -> None:
    script, said = AT_EXIT[what]
    done = run_python("-c", _IMPORTS + script)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


_FORKS = """
import os, sys, warnings
import numpy as np
from bucketjit import BucketedExec
warnings.simplefilter("ignore")
executor = BucketedExec(lambda x: x * 2).with_pow2().with_background_compile()
if sys.argv[1] == "used":
    executor(np.ones(64, np.float32))
    executor(np.ones(32, np.float32))
    assert executor.wait_for_compiles()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
executor(np.ones(64, np.float32))
print(executor(np.ones(3, np.float32)), executor.wait_for_compiles(60))
print([bucket.sizes["batch"] for bucket in executor.stats().buckets], flush=True)
os._exit(0)  # as multiprocessing ends its processes; XLA's own end is for one with its threads
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize(("when", "buckets"), [("used", "[64, 32]"), ("new", "[64, 4]")])
def test_a_fork_compiles_in_the_background_where_xla_can(when: str, buckets: str) -> None:
    done = run_python("-c", _FORKS, when)
    assert (done.returncode, done.stdout) == (0, f"[2. 2. 2.] True\n{buckets}\n"), done.stderr


def test_for_an_executor_that_is_gone_nothing_is_begun(live_executables: Callable[[], int]) -> None:
    others = set(threading.enumerate())
    begun, go_on = threading.Semaphore(0), threading.Event()
    built = []

    def exp(ctx: Any, x: Any) -> Any:
        built.append(x.shape)
        if threading.current_thread() is not threading.main_thread():
            begun.release()
            assert go_on.wait(60)
        return ctx.bind(x)

    executor = BucketedExec(jnp.exp).with_rules({jax.lax.exp_p: exp})
    executor = executor.with_linear(4).with_background_compile()
    for n in (64, 4, 8, 12, 16, 20):
        executor(ramp(n))
    assert begun.acquire(timeout=60)
    started = set(threading.enumerate()) - others
    threads = [t for t in started if t.name == "bucketjit-compile"]
    assert threads
    before = len(built)
    gc.collect()  # JAX keeps the frames of a trace with symbolic sizes in a cycle
    del executor
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(built) == before and live_executables() == 0


def test_threads_end_when_nothing_waits(live_executables: Callable[[], int]) -> None:
    told: list[Event] = []
    executor = BucketedExec(jnp.exp).with_pow2().with_background_compile()
    executor = executor.with_on_event(told.append)
    for n in (9, 3, 3):
        executor(ramp(n))
    assert executor.wait_for_compiles(60) and executor.cache_size() == 2
    assert [dict(e.sizes) for e in told if e.kind == "stand-in"] == [{"batch": 4}]
    deadline = time.monotonic() + 60
    while any(thread.name == "bucketjit-compile" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    del executor
    assert live_executables() == 0


# --- a budget ----------------------------------------------------------------------------------


def test_a_budget_of_compiles() -> None:
    executor = BucketedExec(lambda x: x * 2, compile_budget=2).with_pow2()
    for n in (3, 5, 4, 3):
        executor(ramp(n))
    message = (
        r"<lambda>: a call with batch=9 needs the bucket batch=16, which is not compiled, and the "
        r"compile budget of 2 compiles is spent. The nearest compiled bucket is batch=8 \(too small"
    )
    with pytest.raises(CompileBudgetError, match=message):
        executor(ramp(9))
    np.testing.assert_array_equal(executor(ramp(6)), 2 * ramp(6))
    executor.cache_clear()
    executor(ramp(9))


def test_a_compile_that_fails_is_not_counted() -> None:
    def picky(x: Any) -> Any:
        if x.shape[0] == 7:
            raise ValueError("seven")
        return x * 2

    executor = BucketedExec(picky, compile_budget=1)  # at exact shapes
    for _ in range(2):
        with pytest.raises(ValueError, match="seven"):
            executor(ramp(7))
    np.testing.assert_array_equal(executor(ramp(3)), 2 * ramp(3))
    with pytest.raises(CompileBudgetError):
        executor(ramp(4))


def test_a_bucket_is_not_taken_for_the_exact_shape_of_its_size() -> None:
    executor = BucketedExec(lambda x: x.sum(), check=Check.EXACT_ALWAYS).with_pow2()
    executor(ramp(3))
    with executor.forbid_compiles(), pytest.raises(CompileBudgetError) as error:
        executor(ramp(4))
    assert "needs the exact shape batch=4" in str(error.value)
    assert str(error.value).endswith("explain() tells why calls run exact.")
    assert "The nearest compiled bucket is batch=4." in str(error.value)


def test_a_budget_that_warns_or_counts_seconds() -> None:
    executor = BucketedExec(lambda x: x * 2, compile_budget=CompileBudget(1, action="warn"))
    executor = executor.with_pow2()
    executor(ramp(3))
    with pytest.warns(CompileBudgetWarning, match="nearest compiled bucket is batch=4") as warned:
        np.testing.assert_array_equal(executor(ramp(5)), 2 * ramp(5))
    assert warned[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        executor(ramp(5))
    executor = BucketedExec(lambda x: x * 2, compile_budget=CompileBudget(seconds=1e-9)).with_pow2()
    executor(ramp(3))
    with pytest.raises(CompileBudgetError, match="1e-09 seconds"):
        executor(ramp(5))


@pytest.mark.parametrize("limit", ["forbidden", "compiles", None])
def test_what_jit_compiles_once_more_is_told_of(limit: str | None, xla_compiles: Any) -> None:
    """Arguments that are committed, where those of the warm-up were not."""
    told: list[Event] = []
    budget = 1 if limit == "compiles" else None
    executor = BucketedExec(lambda w, x: x * w, dynamic_axes=(None, "b"), compile_budget=budget)
    executor = executor.with_pow2().with_on_event(told.append)
    two = np.float32(2)
    executor.warmup(two, jax.ShapeDtypeStruct((3,), jnp.float32), progress=False)
    committed = jax.device_put(two, jax.devices()[0])
    before = xla_compiles()
    with contextlib.ExitStack() as stack:
        if limit == "forbidden":
            stack.enter_context(executor.forbid_compiles())
        executor(two, ramp(3))
        with warnings.catch_warnings(record=True, action="always") as warned:
            for _ in range(3):
                np.testing.assert_array_equal(executor(committed, ramp(3)), 2 * ramp(3))
    assert xla_compiles() - before == 1 and executor.stats().compiles == 2
    again = [e for e in told if e.kind == "compile"][1]
    assert str(again) == "<lambda>: compile b=4: once more, for arguments that are placed otherwise"
    assert len([e for e in told if e.kind == "budget"]) == len(warned) == (limit is not None)
    if warned:
        assert warned[0].category is CompileBudgetWarning and warned[0].filename == __file__
        assert "the bucket b=4 was compiled once more" in str(warned[0].message)
        assert {"forbidden": "forbid_compiles", "compiles": "budget of 1 compiles"}[
            limit or ""
        ] in str(warned[0].message)


def test_no_compiles_at_all() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    executor(ramp(3))
    with executor.forbid_compiles() as outer, executor.forbid_compiles():
        with pytest.raises(CompileBudgetError, match="compiles are forbidden"):
            executor(ramp(9))
        outer.release()
        outer.release()
        with pytest.raises(CompileBudgetError):
            executor(ramp(9))
    executor(ramp(9))
    none = BucketedExec(lambda x: x * 2, compile_budget=0).with_pow2()
    with pytest.raises(CompileBudgetError, match="No bucket is compiled"):
        none(ramp(3))


# --- which stay --------------------------------------------------------------------------------


def test_a_bound_in_bytes(live_executables: Callable[[], int]) -> None:
    table = np.ones((64, 1024), np.float32)
    executor = BucketedExec(lambda x: x + (table * x.sum()).max(), dynamic_axes="b, _")
    executor = executor.with_pow2().with_maxsize(None, max_bytes=600000)
    for n in (3, 5, 9, 17, 33):
        executor(ramp(n, 4))
    assert 256 * 1024 <= sum(b.nbytes for b in executor.stats().buckets) <= 600_000
    assert executor.cache_size() == live_executables() == 2
    alone = executor.with_maxsize(None, max_bytes=1)
    for n in (3, 5):
        alone(ramp(n, 4))
    assert alone.cache_size() == 1


def test_pinned_executables_stay() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2().with_maxsize(2)
    for n in (3, 5):
        executor(ramp(n))
    assert executor.pin(batch=4) == 1 and executor.pin(batch=99) == 0
    for n in (9, 17, 33):
        executor(ramp(n))
    assert buckets(executor) == [{"batch": 4}, {"batch": 64}]
    assert executor.pin() == 2
    executor(ramp(9))
    assert executor.cache_size() == 3  # nothing may go
    executor.pin(False)
    executor(ramp(100))
    assert executor.cache_size() == 2
    with pytest.raises(SpecError, match=r"pin\(batch=8\)"):
        executor.pin("batch")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="batch must be a padded size, an int, got 'a'"):
        executor.pin(batch="a")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="no executable has a dimension 'btach', they have batch"):
        executor.pin(btach=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BucketedExec(jnp.exp).with_maxsize(0), "maxsize"),
        (lambda: BucketedExec(jnp.exp).with_maxsize(max_bytes=0), "max_bytes"),
        (lambda: BucketedExec(jnp.exp).with_background_compile(0), "workers"),
        (lambda: BucketedExec(jnp.exp, compile_budget=-1), "compile budget: compiles"),
        (lambda: BucketedExec(jnp.exp, compile_budget=True), "compile budget: compiles"),
        (lambda: BucketedExec(jnp.exp, compile_budget=1.5), "compile budget: compiles"),
        (lambda: CompileBudget(action="ignore"), "action"),
        (lambda: BucketedExec(jnp.exp).wait_for_compiles("soon"), "timeout must be seconds, or No"),
        (lambda: BucketedExec(jnp.exp).wait_for_compiles(-1), "timeout must be seconds, or None"),
        (lambda: BucketedExec(jnp.exp).wait_for_compiles(True), "timeout must be seconds, or None"),
    ],
)
def test_wrong_options_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
