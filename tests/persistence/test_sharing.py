"""One of several processes compiles, and the others load: ``with_persistence(share="first")``."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._compile.files import sharing
from bucketjit._compile.provider import ExecutableProvider
from bucketjit._persistence import claims, files
from bucketjit.errors import CompileBudgetError, PersistenceWarning, SpecError
from tests.persistence.sharing_child import SIZES, pooled, rows

ROOT = Path(__file__).parent.parent.parent
WANTED = [value for n in SIZES for value in np.tanh(rows(n)).sum(axis=0).tolist()]


# --- processes ----------------------------------------------------------------------------------


@contextlib.contextmanager
def child(directory: Path, *flags: str):
    """A process of `sharing_child`; killed if the test fails."""
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tests.persistence.sharing_child"]
    process = subprocess.Popen(
        [*command, str(directory), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hear(process: subprocess.Popen[str], word: str) -> None:
    """Wait until a process says so. (Gloo prints lines of its own.)"""
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"the process ended, and did not say {word!r}")


def go(process: subprocess.Popen[str]) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def all_right(answers: list[dict[str, Any]], compiles: int, loads: int) -> None:
    """Together they compiled and loaded so much, and each has the right results."""
    for answer in answers:
        np.testing.assert_allclose(answer["results"], WANTED, rtol=1e-5)
    assert sum(answer["compiles"] for answer in answers) == compiles
    assert sum(answer["loads"] for answer in answers) == loads


def names(directory: Path) -> list[str]:
    return [p.name for p in directory.iterdir() if p.suffix != files.SUFFIX]


def test_processes_compile_each_bucket_once_and_without_locks(tmp_path):
    with child(tmp_path, "no-flock") as one, child(tmp_path, "no-flock", "warm") as other:
        for process in (one, other):
            hear(process, "ready")
        for process in (one, other):
            go(process)
        all_right([told(one), told(other)], compiles=2, loads=2)
    assert names(tmp_path) == []


def test_another_process_goes_on_where_one_was_killed(tmp_path):
    with child(tmp_path, "held", "quick") as killed, child(tmp_path, "quick") as other:
        for process in (killed, other):
            hear(process, "ready")
        go(killed)
        hear(killed, "compiles")
        [claim] = names(tmp_path)
        killed.kill()
        killed.wait()
        assert names(tmp_path) == [claim]
        go(other)
        answer = told(other)
    all_right([answer], compiles=2, loads=0)
    assert answer["kinds"].count("wait") == 1
    assert names(tmp_path) == []


def test_the_processes_of_a_job_load_what_one_of_them_compiled(tmp_path):
    """Each has a device of its own, with a number of its own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    jobs = [("job", str(rank), "2", port) for rank in (0, 1)]
    with child(tmp_path, *jobs[0]) as first, child(tmp_path, *jobs[1]) as second:
        for process in (first, second):
            hear(process, "ready")
        for process in (first, second):
            go(process)
        answers = [told(first), told(second)]
    all_right(answers, compiles=2, loads=2)
    assert answers[0]["device"] != answers[1]["device"]
    assert len(list(tmp_path.iterdir())) == 2


# --- executors of one process, which know as little of each other -------------------------------


class Told(list):
    """The events of executors on one directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def executor(self, share: Any = "first", **options: Any) -> BucketedExec:
        made = BucketedExec(pooled, **options).with_pow2().with_on_event(self.append)
        return made.with_persistence(self.directory, share=share)

    def kinds(self) -> list[str]:
        return [event.kind for event in self if event.kind != "signature"]


@pytest.fixture
def shared(tmp_path):
    return Told(tmp_path / "shared")


@pytest.fixture
def compiles(monkeypatch):
    """The compiles: each says that it has begun, and waits until it may go on."""

    class Compiles:
        def __init__(self) -> None:
            self.begun = threading.Semaphore(0)
            self.may_end = threading.Semaphore(0)
            self.error: Exception | None = None
            self.count = 0

        def next(self) -> None:
            assert self.begun.acquire(timeout=60)

        def end(self, error: Exception | None = None) -> None:
            self.error = error
            self.may_end.release()

    compiles, build = Compiles(), ExecutableProvider._build

    def held(*args: Any, **kwargs: Any) -> Any:
        compiles.count += 1
        compiles.begun.release()
        assert compiles.may_end.acquire(timeout=60)
        error, compiles.error = compiles.error, None
        if error is not None:
            raise error
        return build(*args, **kwargs)

    monkeypatch.setattr(ExecutableProvider, "_build", held)
    return compiles


@pytest.fixture
def waits(monkeypatch):
    """Released when somebody begins to wait for another process."""
    waits, wait = threading.Semaphore(0), sharing._wait

    def noted(*args: Any) -> Any:
        waits.release()
        return wait(*args)

    monkeypatch.setattr(sharing, "_wait", noted)
    return waits


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_three_wait_for_one(shared, compiles, waits, threads):
    executors = [shared.executor() for _ in range(4)]
    first = threads.submit(executors[0], rows(3))
    compiles.next()
    others = [threads.submit(executor, rows(4)) for executor in executors[1:]]
    for _ in others:
        assert waits.acquire(timeout=60)
    compiles.end()
    np.testing.assert_allclose(first.result(), pooled(rows(3)), rtol=1e-5)
    for other in others:
        np.testing.assert_allclose(other.result(), pooled(rows(4)), rtol=1e-5)
    stats = [executor.stats() for executor in executors]
    assert [(s.compiles, s.loads) for s in stats] == [(1, 0)] + [(0, 1)] * 3
    assert sorted(shared.kinds()) == ["compile"] + ["load"] * 3 + ["wait"] * 3
    [told] = {(e.detail, e.seconds > 0) for e in shared if e.kind == "wait"}
    assert told == ("another process compiled", True)
    assert names(shared.directory) == []


def test_without_share_each_compiles(shared, compiles, threads):
    both = [threads.submit(shared.executor(share=None), rows(3)) for _ in range(2)]
    for _ in both:
        compiles.next()
    for _ in both:
        compiles.end()
    for each in both:
        each.result()
    assert shared.kinds() == ["compile"] * 2


def test_if_a_compile_fails_the_next_one_tries(shared, compiles, waits, threads):
    first = threads.submit(shared.executor(), rows(3))
    compiles.next()
    other = threads.submit(shared.executor(), rows(3))
    assert waits.acquire(timeout=60)
    compiles.end(MemoryError("of the first one"))
    with pytest.raises(MemoryError, match="of the first one"):
        first.result()
    compiles.next()
    compiles.end()
    np.testing.assert_allclose(other.result(), pooled(rows(3)), rtol=1e-5)
    assert shared.kinds() == ["wait", "compile"] and names(shared.directory) == []


def test_who_gets_no_file_does_not_wait_for_all_others(shared, compiles, waits, threads):
    """After two compiles that wrote none, the others compile at the same time."""
    executors = [
        shared.executor().with_persistence(shared.directory, max_bytes=1, share="first")
        for _ in range(4)
    ]
    calls = [threads.submit(executor, rows(3)) for executor in executors]
    for expected in (3, 2):
        compiles.next()
        for _ in range(expected):
            assert waits.acquire(timeout=60)
        compiles.end()
    for _ in range(2):
        compiles.next()  # both, before one of them ends
    for _ in range(2):
        compiles.end()
    for call in calls:
        np.testing.assert_allclose(call.result(), pooled(rows(3)), rtol=1e-5)
    assert list(shared.directory.iterdir()) == []


def test_a_damaged_file_keeps_nobody_waiting(shared, compiles, waits, threads):
    first = threads.submit(shared.executor(), rows(3))
    compiles.next()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PersistenceWarning)
        other = threads.submit(shared.executor(), rows(3))
        assert waits.acquire(timeout=60)
        [claim] = names(shared.directory)
        key = claim.removeprefix(files.CLAIM)
        (shared.directory / files.file_name("0" * 16, key)).write_bytes(b"damaged")
        (shared.directory / claim).unlink()  # as if the first one had written that
        compiles.next()
        for _ in range(2):
            compiles.end()
        for call in (first, other):
            np.testing.assert_allclose(call.result(), pooled(rows(3)), rtol=1e-5)
    assert shared.kinds().count("compile") == 2 and "damaged" in shared.kinds()


def test_a_holder_that_never_ends_is_not_waited_for_without_end(shared, compiles, threads):
    first = threads.submit(shared.executor(), rows(3))
    compiles.next()
    sharing._LONGEST_WAIT, before = 0.0, sharing._LONGEST_WAIT
    try:
        other = threads.submit(shared.executor(), rows(3))
        compiles.next()
    finally:
        sharing._LONGEST_WAIT = before
    for _ in range(2):
        compiles.end()
    for call in (first, other):
        call.result()
    assert sorted(shared.kinds()) == ["compile", "compile", "wait"]


def test_a_file_written_between_a_look_and_a_claim_is_loaded(shared, monkeypatch):
    def late(path):
        monkeypatch.undo()
        shared.executor(share=None)(rows(3))
        return claims.take(path)

    monkeypatch.setattr(sharing, "take", late)
    executor = shared.executor()
    executor(rows(3))
    assert (executor.stats().compiles, executor.stats().loads) == (0, 1)
    assert names(shared.directory) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOTSUP, errno.ENOSPC])
def test_a_directory_that_takes_no_claims(shared, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sharing, "take", fail)
    executor = shared.executor()
    for n in (3, 4):
        np.testing.assert_allclose(executor(rows(n)), pooled(rows(n)), rtol=1e-5)
    assert executor.stats().compiles == 1


def test_a_directory_that_cannot_be_made(shared):
    shared.directory.parent.joinpath("file").write_text("")
    executor = BucketedExec(pooled).with_pow2()
    executor = executor.with_persistence(shared.directory, share="first")
    shared.directory.write_text("")  # a file is in its place by now
    with pytest.warns(PersistenceWarning):
        np.testing.assert_allclose(executor(rows(3)), pooled(rows(3)), rtol=1e-5)
    assert executor.stats().compiles == 1


def test_what_has_no_key_is_not_waited_for(shared):
    def calls_back(x):
        return jax.pure_callback(lambda v: v, x, x) * 2

    for _ in range(2):
        executor = BucketedExec(calls_back).with_persistence(shared.directory, share="first")
        np.testing.assert_allclose(executor(rows(3)), 2 * rows(3))
        assert executor.stats().compiles == 1
    assert not shared.directory.exists() or names(shared.directory) == []


def test_a_budget_is_spent_by_who_compiles(shared, compiles, waits, threads):
    with pytest.raises(CompileBudgetError):
        shared.executor(compile_budget=0)(rows(3))
    assert names(shared.directory) == []
    first = threads.submit(shared.executor(), rows(3))
    compiles.next()
    other = shared.executor(compile_budget=0)
    call = threads.submit(other, rows(3))
    assert waits.acquire(timeout=60)
    compiles.end()
    first.result()
    np.testing.assert_allclose(call.result(), pooled(rows(3)), rtol=1e-5)
    assert (other.stats().compiles, other.stats().loads) == (0, 1)


def test_a_compile_ahead_of_calls_is_waited_for_in_the_background(shared, compiles, waits, threads):
    like = jax.ShapeDtypeStruct((1, 2), np.float32)

    def warm(executor, size):
        return threads.submit(executor.warmup, like, sizes={"batch": [size]}, progress=False)

    behind = shared.executor().with_background_compile()
    larger = warm(behind, 16)
    compiles.next()
    compiles.end()
    assert len(larger.result().compiled) == 1
    ahead = warm(shared.executor(), 4)
    compiles.next()
    np.testing.assert_allclose(behind(rows(3)), pooled(rows(3)), rtol=1e-5)  # in the larger bucket
    assert waits.acquire(timeout=60)
    assert not behind.wait_for_compiles(timeout=0.01)
    compiles.end()
    assert ahead.result().loaded == 0 and behind.wait_for_compiles(timeout=60)
    assert (behind.stats().compiles, behind.stats().loads, compiles.count) == (1, 1, 2)


@pytest.mark.parametrize("share", ["last", "", True, 1, ["first"]])
def test_other_ways_to_share_are_refused(tmp_path, share):
    with pytest.raises(SpecError, match="share must be 'first' or None, got "):
        BucketedExec(pooled).with_persistence(tmp_path, share=share)
