"""Several jobs on the cores of the host: who asks works on them too, and others help.

XLA runs one small program on few of the cores, and on CPU it runs it in the thread that called it.
Independent calls of such a program therefore end sooner when several threads make them.

The threads are our own, and no pool of ``concurrent.futures``: two jobs of a millisecond together
took 0.1 ms longer there, by what a pool does before a job and after it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from bucketjit._jax.config import thread_config

T = TypeVar("T")
_NOT_RUN: Any = object()


def cores() -> int:
    """How many cores this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(os.getpid()))  # that of a thread may be less


def start_helpers() -> None:
    """Start the threads that help, before there are many others.

    The C library (glibc) has a heap for each of the first threads of a process, and later ones
    share them: two threads that work at the same time would wait for each other.
    """
    _helpers(os.getpid())


class Helpers:
    """Threads that wait for jobs, until the process ends.

    Args:
        wanted: How many. They begin with `start`.

    Attributes:
        asked: Where they are asked to help.
    """

    def __init__(self, wanted: int) -> None:
        self.asked: SimpleQueue[_Shared[Any]] = SimpleQueue()
        self._unstarted = deque(range(wanted))
        self._busy: list[threading.Lock] = []  # one of each thread

    @property
    def count(self) -> int:
        """How many there are: fewer than wanted, if no more could be started."""
        return len(self._busy)

    def start(self) -> None:
        """Start those that are not yet; several threads may do so at the same time."""
        while self._unstarted:
            with contextlib.suppress(IndexError):
                i, busy = self._unstarted.popleft(), threading.Lock()
                name = f"bucketjit-chunks_{i}"
                helper = threading.Thread(target=self._wait, args=(busy,), name=name, daemon=True)
                try:
                    helper.start()
                except RuntimeError:
                    self._unstarted.clear()
                    return
                self._busy.append(busy)

    def stop(self) -> None:
        """Wait for what they are at; they begin nothing any more."""
        for busy in self._busy:
            busy.acquire()

    def _wait(self, busy: threading.Lock) -> None:
        bytearray(2**12)  # takes its heap now: Python has small objects in one of its own
        while True:
            shared = self.asked.get()
            with busy:
                shared.help_out()
            del shared


_known: dict[int, Helpers] = {}


def _helpers(process: int) -> Helpers:
    """Those of a process: a fork has none of its parent's."""
    helpers = _known.get(process)
    if helpers is None:  # of several threads that come at the same time, one has its way
        helpers = _known.setdefault(process, Helpers(cores() - 1))
    helpers.start()
    return helpers


@atexit.register
def _stop_helpers() -> None:
    """A thread in the middle of a job, left by an interrupt, would abort the interpreter."""
    helpers = _known.get(os.getpid())
    if helpers is not None:
        helpers.stop()


class _Shared(Generic[T]):
    """Jobs that several threads take from.

    Whoever takes a job tells of it, but for the thread that asked, which counts its own.

    Args:
        jobs: The jobs.

    Attributes:
        todo: What nobody has taken, by position.
        done: What helpers have taken and are done with: the position and the result, `_NOT_RUN`
            after an error.
        failures: Errors, the first one first.
    """

    __slots__ = ("_config", "done", "failures", "todo")

    def __init__(self, jobs: Sequence[Callable[[], T]]) -> None:
        self.todo = deque(enumerate(jobs))
        self.done: SimpleQueue[tuple[int, T]] = SimpleQueue()
        self.failures: list[BaseException] = []
        self._config: Hashable = thread_config()

    def help_out(self) -> None:
        """Take jobs until there are none."""
        if not self.todo or thread_config() != self._config:
            return
        while True:
            index, result = self.take()
            if index < 0:
                return
            self.done.put((index, result))

    def take(self) -> tuple[int, T]:
        """Do a job. Returns its position, negative if there was none, and its result."""
        try:
            index, job = self.todo.popleft()
        except IndexError:
            return -1, _NOT_RUN
        if self.failures:
            return index, _NOT_RUN
        try:
            return index, job()
        except BaseException as error:
            self.failures.append(error)
            return index, _NOT_RUN


def run_together(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run jobs that do not depend on each other, in this thread and others.

    Nobody helps where JAX is configured by a context (``jax.default_matmul_precision`` and the
    like): that holds for the thread that entered it.

    Args:
        jobs: What to run. No job may wait for another.

    Returns:
        Their results, in order.

    Raises:
        Exception: The first error of a job. No job is begun after it, and none is running any
            more.
    """
    helpers = _helpers(os.getpid())
    if len(jobs) < 2 or not helpers.count:
        return [job() for job in jobs]
    shared = _Shared(jobs)
    results: list[T] = [_NOT_RUN] * len(jobs)
    try:
        for _ in range(min(helpers.count, len(jobs) - 1)):
            helpers.asked.put(shared)
        left = len(jobs)
        while (taken := shared.take())[0] >= 0:
            results[taken[0]] = taken[1]
            left -= 1
        for _ in range(left):  # helpers have them
            index, results[index] = shared.done.get()
    finally:
        shared.todo.clear()  # after an interrupt, nobody goes on
    if shared.failures:
        try:
            raise shared.failures[0]
        finally:
            shared.failures.clear()  # the error holds this frame
    return results
