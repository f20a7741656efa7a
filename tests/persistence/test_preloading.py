"""What is loaded while a function is still being traced: who gets it, and how much it may be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._compile.files import preload
from bucketjit._persistence.files import SUFFIX
from bucketjit.errors import PersistenceWarning
from bucketjit.types import Eviction

ROOT = Path(__file__).parents[2]
SIZES = (3, 7, 15)
PATIENCE = 30.0


def rows(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, 2)).astype(np.float32)


class Pooled:
    """A function that waits for something while it is traced; its program is always the same."""

    def __init__(self, until: Callable[[], bool] | None = None, power: int = 2) -> None:
        self._until = until
        self._power = power
        self.waited_for_it = False

    def __call__(self, x: Any) -> Any:
        if isinstance(x, jax.core.Tracer) and self._until is not None:
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end and not self._until():
                time.sleep(0.005)
            self.waited_for_it = self._until()
        return (x**self._power).sum(axis=0)


@pytest.fixture
def directory(tmp_path):
    """A directory with the executables of three buckets."""
    first = executor(Pooled(), tmp_path / "cache")
    for n in SIZES:
        first(rows(n))
    assert first.stats().compiles == 3
    return tmp_path / "cache"


def executor(fn: Any, directory: Any) -> BucketedExec:
    return BucketedExec(fn).with_pow2().with_persistence(directory)


def did(executor: BucketedExec, sizes: Any = SIZES, power: int = 2) -> tuple[int, int]:
    """Compiles and loads of an executor after calls of these sizes, which are compared."""
    for n in sizes:
        np.testing.assert_allclose(executor(rows(n)), (rows(n) ** power).sum(axis=0), rtol=1e-5)
    stats = executor.stats()
    return stats.compiles, stats.loads


def test_all_buckets_are_loaded_while_the_function_is_traced(directory, live_executables):
    fn = Pooled(until=lambda: live_executables() == 3)
    second = executor(fn, directory)
    assert did(second, SIZES[:1]) == (0, 1)
    assert fn.waited_for_it
    # What waits is no load yet, and is not read again when it is asked for.
    for path in directory.glob(f"*{SUFFIX}"):
        path.unlink()
    assert did(second) == (0, 3)
    assert live_executables() == 3


def test_a_warm_up_takes_what_was_loaded(directory, live_executables):
    fn = Pooled(until=lambda: live_executables() == 3)
    second = executor(fn, directory)
    report = second.warmup(rows(3), sizes={"batch": SIZES}, progress=False)
    assert fn.waited_for_it and len(report.compiled) == 3 and not report.failed
    assert live_executables() == 3
    assert did(second) == (0, 3)


def test_another_program_gets_none_of_it(directory, live_executables):
    fn = Pooled(until=lambda: live_executables() == 3, power=3)
    other = executor(fn, directory)
    assert did(other, power=3) == (3, 0)
    assert fn.waited_for_it
    assert live_executables() == 3  # those of the other program are not kept


def preloading_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "bucketjit-preload"]


def test_once_the_program_is_known_no_other_is_loaded(directory, monkeypatch, live_executables):
    """A function that was changed many times has left many files."""
    read, go = [], threading.Event()

    def deserialized(raw: bytes, placement: Any) -> Any:
        read.append(raw)
        assert go.wait(PATIENCE)
        return original(raw, placement)

    original = preload.deserialized
    monkeypatch.setattr(preload, "_THREADS", 1)
    monkeypatch.setattr(preload, "deserialized", deserialized)
    other = executor(Pooled(until=lambda: bool(read), power=3), directory)
    assert did(other, power=3) == (3, 0)
    threads = preloading_threads()
    go.set()
    assert len(threads) == 1
    threads[0].join(PATIENCE)
    assert len(read) == 1
    assert live_executables() == 3  # and what had been begun is not kept


def test_arguments_of_another_kind_expect_nothing(directory, monkeypatch):
    started = []
    monkeypatch.setattr(preload, "_load", lambda *given: started.append(given))
    second = executor(Pooled(), directory)
    second(rows(3).astype(np.float16))
    second(jnp.ones((3, 2, 2)))
    assert not started


@pytest.mark.parametrize("maxsize", [1, 2])
def test_no_more_live_than_the_cache_may_hold(directory, live_executables, maxsize):
    most = []
    fn = Pooled(until=lambda: most.append(live_executables()) or len(most) > 20)
    second = executor(fn, directory).with_maxsize(maxsize)
    for n in (*SIZES, *SIZES):
        did(second, [n])
        most.append(live_executables())
    assert max(most) == maxsize


def test_a_cache_bounded_in_bytes_has_nothing_beside_it(directory, monkeypatch):
    started = []
    monkeypatch.setattr(preload, "_load", lambda *given: started.append(given))
    assert did(
        executor(Pooled(), directory).with_maxsize(max_bytes=10**9, eviction=Eviction(hysteresis=8))
    ) == (0, 3)
    assert not started


def test_what_nobody_asked_for_goes_with_its_executor(directory, live_executables):
    second = executor(Pooled(until=lambda: live_executables() == 3), directory)
    assert did(second, SIZES[:1]) == (0, 1)
    del second
    assert live_executables() == 0


def test_what_nobody_asked_for_is_cleared(directory, live_executables):
    second = executor(Pooled(until=lambda: live_executables() == 3), directory)
    assert did(second, SIZES[:1]) == (0, 1)
    second.cache_clear()
    assert live_executables() == 0
    assert did(second) == (0, 3)


def test_damage_is_told_once(directory):
    damaged = max(directory.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    second = executor(Pooled(), directory)
    with pytest.warns(PersistenceWarning, match="is damaged and is made again") as warned:
        assert did(second) == (1, 2)
    assert len(warned) == 1
    assert did(executor(Pooled(), directory)) == (0, 3)


def test_a_directory_that_others_write_into_is_not_read(directory, monkeypatch):
    second = executor(Pooled(), directory)
    directory.chmod(0o777)
    monkeypatch.setattr(preload, "deserialized", None)  # whoever calls it fails
    with pytest.warns(PersistenceWarning, match="can be written by other users"):
        assert did(second) == (3, 0)


def test_calls_go_on_where_no_thread_can_be_started(directory, monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        assert did(executor(Pooled(), directory)) == (0, 3)


def test_a_fork_waits_for_nothing(directory, monkeypatch, live_executables):
    """Locks may have been held when the process was copied, by threads that are not there."""
    fn = Pooled(until=lambda: live_executables() == 3)
    second = executor(fn, directory)
    assert did(second, SIZES[:1]) == (0, 1)
    monkeypatch.setattr(preload.os, "getpid", lambda: -1)
    with second._engine.shared.preloading._lock:
        assert did(second) == (0, 3)


def test_derivatives_expect_theirs(directory):
    for expected in ((2, 0), (0, 2)):  # there, and back
        second = executor(Pooled(power=3), directory)
        gradient = jax.grad(lambda x: second(x).sum())(jnp.asarray(rows(5)))  # noqa: B023
        np.testing.assert_allclose(gradient, 3 * rows(5) ** 2, rtol=1e-5)
        stats = second.stats()
        assert (stats.compiles, stats.loads) == expected


def test_derivatives_share_the_room(tmp_path, live_executables):
    def most_alive() -> int:
        found = executor(Pooled(), tmp_path / "cache").with_maxsize(3)
        most = 0
        for n in SIZES:
            x = jnp.asarray(rows(n))
            found(x)
            most = max(most, live_executables())
            jax.grad(lambda x: found(x).sum())(x)
            most = max(most, live_executables())
        assert found.cache_size() == 3
        return most

    compiled = most_alive()
    before = live_executables()
    assert most_alive() <= compiled + before  # loaded


def test_threads_end(directory):
    second = executor(Pooled(), directory)
    assert did(second) == (0, 3)
    for thread in preloading_threads():
        thread.join(PATIENCE)
    assert not preloading_threads()


CALLS = """
import atexit, sys
import jax.numpy as jnp
from tests.persistence.test_preloading import executor, rows

def long(x):
    for _ in range(30):
        x = jnp.tanh(x @ x.T @ x)
    return x.sum(0)

def call(*sizes):
    found = executor(long, sys.argv[1])
    for n in sizes:
        found(rows(n))
    print(found.stats().compiles, found.stats().loads)

if sys.argv[2:] == ["at exit"]:
    atexit.register(call, 3)
else:
    call(1, 2, 4, 8, 16, 32)
"""


def test_a_call_while_the_interpreter_ends(tmp_path):
    def run(*words: str) -> str:
        command = [sys.executable, "-c", CALLS, str(tmp_path / "cache"), *words]
        options: Any = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
        done = subprocess.run(command, check=False, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run() == "6 0\n"
    assert run("at exit") == "0 1\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in the file system")
def test_a_pipe_in_place_of_a_file(directory):
    files = sorted(directory.glob(f"*{SUFFIX}"))
    pipe = files[0]
    pipe.unlink()
    os.mkfifo(pipe, 0o600)
    with pytest.warns(PersistenceWarning, match="is not a file"):
        assert did(executor(Pooled(), directory)) == (1, 2)
    for thread in preloading_threads():
        thread.join(PATIENCE)
    assert not preloading_threads()


def test_threads_share_what_is_loaded(directory):
    second, barrier = executor(Pooled(), directory), threading.Barrier(9)

    def call(n: int) -> Any:
        barrier.wait()
        return second(rows(n))

    sizes = SIZES * 3
    with ThreadPoolExecutor(9) as pool:
        for n, out in zip(sizes, pool.map(call, sizes), strict=True):
            np.testing.assert_allclose(out, (rows(n) ** 2).sum(axis=0), rtol=1e-5)
    assert did(second) == (0, 3)
