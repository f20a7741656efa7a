"""The warm path of calls in chunks: plans of their own, run on several cores."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Padded
from bucketjit._arrays import padding
from bucketjit._cores import helper_threads
from bucketjit._runtime.chunks import chunked_handler
from bucketjit.errors import SplitError
from tests.comparison import assert_like_jit, assert_same, ramp
from tests.runtime.chunks.test_helper_threads import the_helpers
from tests.runtime.test_buckets import SPLITS, buckets, floats, mlp, rows


@pytest.fixture(autouse=True)
def helped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads help whatever this machine has, and however small the chunks are."""
    monkeypatch.setattr(helper_threads, "_helpers", lambda process: the_helpers())
    monkeypatch.setattr(chunked_handler, "_WORTH_HELP", 0.0)


def forbid_the_slow_path(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def sign(*_: Any) -> Any:
        raise AssertionError("the slow path")

    monkeypatch.setattr(executor._engine.signer, "sign", sign)


@pytest.mark.parametrize("name", SPLITS)
def test_the_second_call_is_warm_and_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, axes, args = SPLITS[name]
    executor = BucketedExec(fn, dynamic_axes=axes).with_pow2(min=8).with_overflow("split", "b")
    executor = executor.with_buckets([2, 6], "b")
    for n in (13, 7, 12):
        executor(*args(n))
    calls = executor.stats().calls
    forbid_the_slow_path(executor, monkeypatch)
    for n in (13, 7, 12):
        assert_same(executor(*args(n)), jax.jit(fn)(*args(n)), rtol=2e-5)
    assert executor.stats().calls == calls + 3 + 2 + 2  # each chunk is one


def test_every_kind_of_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(pair: Any, n: Any, scale: str, *, table: Any, shift: Any) -> Any:
        factor = {"one": 1, "two": 2}[scale]
        return {"x": pair["x"] * factor + jnp.ones(n), "y": pair["y"] @ table + shift[:, None]}

    axes = {"pair": {"x": "b", "y": "b, _"}, "n": "b", "shift": "b"}
    executor = BucketedExec(fn, dynamic_axes=axes, static_argnums=2).with_pow2(max=4)
    executor = executor.with_overflow("split")

    def arguments(n: int, make: Callable[..., Any]) -> tuple[Any, ...]:
        return {"x": make(ramp(n)), "y": make(ramp(n, 3))}, n

    for make in (np.asarray, jnp.asarray):
        for scale in ("one", "two", "one"):
            table, shift = make(ramp(3, 2)), make(ramp(9))
            pair, n = arguments(9, make)
            want = jax.jit(fn, static_argnums=(1, 2))(pair, n, scale, table=table, shift=shift)
            assert_same(executor(pair, n, scale, table=table, shift=shift), want)
    forbid_the_slow_path(executor, monkeypatch)
    for scale in ("one", "two"):
        pair, n = arguments(9, np.asarray)
        want = jax.jit(fn, static_argnums=(1, 2))(pair, n, scale, table=ramp(3, 2), shift=ramp(9))
        assert_same(executor(pair, n, scale, table=ramp(3, 2), shift=ramp(9)), want)


def test_forms_of_results_and_arguments() -> None:
    x = floats(9, 3)
    want = jax.jit(rows)(x)
    for out, kind in (("jax", jax.Array), ("numpy", np.ndarray), ("padded", Padded)):
        executor = BucketedExec(rows, out=out).with_pow2(max=4, overflow="split")
        for given in (x, jnp.asarray(x), Padded(jnp.pad(x, ((0, 7), (0, 0))), {0: 9})):
            for _ in range(3):
                got = executor(given)
                assert isinstance(got, kind)
                np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)


def test_the_line_to_blame_is_the_users() -> None:
    """While it traces, functions of the package stand in for some of JAX's."""
    for fn in (
        lambda x: jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(2), x)[1],
        lambda x: jax.lax.associative_scan(jnp.add, x),
        lambda x: jax.random.permutation(jax.random.key(0), x),
    ):
        with pytest.raises(SplitError, match=rf"\[{__file__}:\d+.*<lambda>"):
            BucketedExec(fn).with_pow2(max=8, overflow="split")(floats(19, 2))


def test_another_static_shape_is_looked_at_anew() -> None:
    """Independent along the axis for weights of two axes, and not for those of one."""

    def fn(x: Any, w: Any) -> Any:
        return x @ w if w.ndim == 2 else (x * w).mean(0) + x

    executor = BucketedExec(fn, dynamic_axes=("b, _", None)).with_pow2(max=4, overflow="split")
    x, square, row = floats(9, 3), floats(3, 3), floats(3)
    for _ in range(3):
        assert_same(executor(x, square), jax.jit(fn)(x, square), rtol=1e-5)
        with pytest.raises(SplitError):
            executor(x, row)
        wide = floats(3, 5)
        assert_same(executor(x, wide), jax.jit(fn)(x, wide), rtol=1e-5)


def test_static_shapes_that_alternate_stay_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = BucketedExec(mlp, dynamic_axes=("b, _", None)).with_pow2(max=4, overflow="split")
    narrow, wide = floats(4, 8), floats(4, 6)
    for n in (9, 13):
        for w in (narrow, wide, narrow, wide):
            assert_same(executor(floats(n, 4), w), jax.jit(mlp)(floats(n, 4), w), rtol=2e-5)
    forbid_the_slow_path(executor, monkeypatch)
    for n in (9, 13, 9):
        for w in (narrow, wide):
            assert_same(executor(floats(n, 4), w), jax.jit(mlp)(floats(n, 4), w), rtol=2e-5)


def test_what_leaves_the_cache_is_compiled_again() -> None:
    executor = BucketedExec(rows).with_pow2(max=4, overflow="split").with_maxsize(1)
    for n in (9, 9, 3, 9, 9, 6, 9):
        assert_like_jit(executor, rows, ramp(n, 3) / 20)
    assert executor.stats().evictions >= 2


@pytest.mark.parametrize("maxsize", [1, 2])
def test_counts_where_executables_leave_the_cache(maxsize: int) -> None:
    executor = BucketedExec(rows, dynamic_axes="b, _").with_pow2(max=4, overflow="split")
    executor = executor.with_maxsize(maxsize)
    sizes = [11, 9, 10, 9] * 6
    for n in sizes:
        assert_same(executor(floats(n, 3)), jax.jit(rows)(floats(n, 3)), rtol=1e-5)
    stats = executor.stats()
    assert stats.calls == 3 * len(sizes)
    assert dict(stats.size_counts["b"]) == {1: 12, 2: 6, 3: 6, 4: 48}


def test_arguments_are_let_go_of() -> None:
    """A plan is for shapes: the arrays that it was made with are none of its business."""
    executor = BucketedExec(lambda x, w: x @ w, dynamic_axes=("b, _", None))
    executor = executor.with_pow2(max=4, overflow="split")
    seen: list[Any] = []
    for n in (9, 10, 11, 9):
        x, w = floats(n, 3), jnp.asarray(floats(3, 2))
        executor(x, w)
        seen += [weakref.ref(x), weakref.ref(w)]
        del x, w
    gc.collect()
    assert [ref() for ref in seen] == [None] * 8


def test_a_padded_array_is_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = BucketedExec(rows, dynamic_axes="b, s").with_buckets([2], "b", overflow="split")
    x = floats(20, 8)
    calls: list[int] = []
    unpad = padding.unpad

    def counted(*args: Any) -> Any:
        calls.append(1)
        return unpad(*args)

    monkeypatch.setattr(padding, "unpad", counted)
    for _ in range(3):
        calls.clear()
        got = executor(Padded(jnp.asarray(x), {0: 19, 1: 5}))
        np.testing.assert_allclose(got, jax.jit(rows)(x[:19, :5]), rtol=1e-5)
        assert len(calls) <= 2


def test_a_plan_is_dropped_if_its_chunks_are_not_counted_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = BucketedExec(rows, dynamic_axes="b, _").with_pow2(max=4, overflow="split")
    run = executor._engine.splitter.run

    def cleared(*args: Any) -> Any:
        found = run(*args)
        executor._engine.memory.forget_all()
        return found

    monkeypatch.setattr(executor._engine.splitter, "run", cleared)
    executor(floats(9, 3))
    assert executor._engine.memory.fast_path.latest is None
    monkeypatch.undo()
    for _ in range(5):
        executor(floats(9, 3))
    assert executor.stats().calls == 18


def test_all_chunks_are_counted() -> None:
    executor = BucketedExec(rows, dynamic_axes="b, _").with_pow2(max=4, overflow="split")
    for _ in range(5):
        executor(floats(9, 3))
    stats = executor.stats()
    assert stats.calls == 15 and dict(stats.size_counts["b"]) == {1: 5, 4: 10}
    assert sum(b.hits for b in stats.buckets) + stats.misses == 15
    executor.reset_stats()
    executor(floats(9, 3))
    assert executor.stats().calls == 3
    executor.cache_clear()
    executor(floats(9, 3))
    assert executor.stats().calls == 3


def test_from_many_threads() -> None:
    executor = BucketedExec(mlp, dynamic_axes=("b, _", None)).with_pow2(max=4, overflow="split")
    w = floats(4, 8)
    want = {n: jax.jit(mlp)(floats(n, 4), w) for n in range(1, 14)}

    def ask(i: int) -> None:
        n = 1 + i % 13
        assert_same(executor(floats(n, 4), w), want[n], rtol=2e-5)

    with ThreadPoolExecutor(16) as users:
        list(users.map(ask, range(200)))
    assert {b["b"] for b in buckets(executor)} <= {1, 2, 4}


def test_errors_reach_the_caller() -> None:
    executor = BucketedExec(lambda x: jnp.log(x), dynamic_axes="b, _")
    executor = executor.with_pow2(max=4, overflow="split")
    x = floats(9, 3)
    x[7, 1] = -1
    executor(x), executor(x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        executor(x)
    assert np.isnan(executor(x)[7, 1])


def test_configuration_of_the_caller_holds_for_every_chunk() -> None:
    """Helpers are threads of their own, which know nothing of a context that was entered."""
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="b").with_pow2(max=4, overflow="split")
    x = np.arange(11, dtype=np.int64)
    for _ in range(3):
        with jax.enable_x64(True):
            assert executor(x).dtype == np.int64
        assert executor(x).dtype == np.int32


def test_chunks_run_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = BucketedExec(rows).with_pow2(max=4, overflow="split")
    x = floats(12, 3)
    executor(x), executor(x)
    meet, threads = threading.Barrier(3), set()
    serve = chunked_handler.ChunkedHandler._serve

    def met(*args: Any, **kwargs: Any) -> Any:
        meet.wait(timeout=30)
        threads.add(threading.get_ident())
        return serve(*args, **kwargs)

    monkeypatch.setattr(chunked_handler.ChunkedHandler, "_serve", met)
    assert_same(executor(x), jax.jit(rows)(x), rtol=1e-5)
    assert len(threads) == 3
