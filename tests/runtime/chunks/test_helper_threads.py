"""Jobs on several cores: who asks works on them too."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import jax
import pytest

from bucketjit._cores import helper_threads
from bucketjit._cores.helper_threads import run_together


@functools.cache
def the_helpers() -> helper_threads.Helpers:
    helpers = helper_threads.Helpers(2)
    helpers.start()
    return helpers


@pytest.fixture(autouse=True)
def two_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(helper_threads, "_helpers", lambda process: the_helpers())


def test_results_are_in_order() -> None:
    def job(i: int) -> Callable[[], int]:
        return lambda: (time.sleep(0.002 * (5 - i)), i)[1]

    assert run_together([job(i) for i in range(6)]) == list(range(6))
    assert run_together([]) == []


def test_others_help() -> None:
    meet = threading.Barrier(3)

    def job() -> int:
        meet.wait(timeout=30)  # nobody gets past it alone
        return threading.get_ident()

    assert len(set(run_together([job] * 3))) == 3


def test_who_asks_does_it_alone_if_nobody_is_free() -> None:
    busy, free = threading.Barrier(4), threading.Event()

    def job() -> bool:
        busy.wait(30)
        return free.wait(30)

    with ThreadPoolExecutor(1) as other:
        held = other.submit(run_together, [job] * 3)  # the helpers have two of them
        busy.wait(30)
        me = threading.get_ident()
        assert run_together([threading.get_ident] * 4) == [me] * 4
        free.set()
        assert held.result() == [True] * 3


def test_an_interrupt_leaves_what_nobody_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    begun, free = threading.Barrier(3), threading.Event()

    def long(i: int) -> None:
        ran.append(i)
        begun.wait(30)
        free.wait(30)

    def interrupted() -> None:
        begun.wait(30)  # the helpers are at work
        raise KeyboardInterrupt

    def job(i: int) -> Callable[[], None]:
        me = threading.get_ident()
        return lambda: interrupted() if threading.get_ident() == me else long(i)

    threading.Timer(0.05, free.set).start()
    with pytest.raises(KeyboardInterrupt):
        run_together([job(i) for i in range(9)])
    assert free.is_set() and len(ran) == 2
    assert run_together([lambda: 1, lambda: 2]) == [1, 2]


def test_nobody_holds_what_is_done() -> None:
    class Thing:
        pass

    def job() -> Thing:
        time.sleep(0.002)
        return Thing()

    things = [weakref.ref(x) for x in run_together([job] * 6)]
    assert [x() for x in things] == [None] * 6


@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.debug_nans(True),
        lambda: jax.transfer_guard("allow"),
    ],
)
def test_nobody_helps_inside_a_context(context: Callable[[], AbstractContextManager]) -> None:
    def job() -> int:
        time.sleep(0.001)
        return threading.get_ident()

    with context():
        assert set(run_together([job] * 8)) == {threading.get_ident()}


def test_the_first_error_is_raised_and_nothing_runs_after_it() -> None:
    ran: list[int] = []

    def job(i: int) -> Callable[[], None]:
        def run() -> None:
            ran.append(i)
            if i == 1:
                raise KeyError("the second")
            time.sleep(0.005)

        return run

    with pytest.raises(KeyError, match="the second"):
        run_together([job(i) for i in range(50)])
    count = len(ran)
    assert count < 50
    time.sleep(0.02)
    assert len(ran) == count
    assert run_together([lambda: 1, lambda: 2]) == [1, 2]


def test_jobs_may_have_jobs() -> None:
    def outer(i: int) -> Callable[[], int]:
        return lambda: sum(run_together([lambda j=j: i * j for j in range(4)]))

    with ThreadPoolExecutor(8) as users:
        found = list(users.map(lambda _: run_together([outer(i) for i in range(5)]), range(16)))
    assert found == [[0, 6, 12, 18, 24]] * 16


def test_threads_that_come_at_the_same_time_share_the_helpers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(helper_threads, "cores", lambda: 4)
    monkeypatch.setattr(helper_threads, "_known", {})
    together = threading.Barrier(8)

    def call(_: int) -> int:
        together.wait(30)
        return sum(run_together([lambda: (time.sleep(0.01), 1)[1]] * 8))

    before = threading.active_count()
    with ThreadPoolExecutor(8) as users:
        assert list(users.map(call, range(8))) == [8] * 8
    assert threading.active_count() - before == 3
    [helpers] = helper_threads._known.values()
    assert helpers.count == 3


_EXIT = """
import os, signal, sys, threading, time
from bucketjit._cores import helper_threads

class Interrupt(BaseException):
    pass

def interrupt(*_):
    raise Interrupt

signal.signal(signal.SIGUSR1, interrupt)
helper_threads.cores = lambda: 2
main = threading.get_ident()

def job():
    if threading.get_ident() == main:
        time.sleep(0.01)
        return
    time.sleep(0.2)  # who asked waits by now
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.3)  # goes on while the interpreter ends
    print("done", flush=True)

try:
    helper_threads.run_together([job] * 2)
except Interrupt:
    print("interrupted", flush=True)
"""


def test_the_interpreter_ends_after_what_helpers_are_at() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _EXIT], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\ndone\n", "")
