"""Run several jobs at the same time, in the calling thread and in helper threads.

XLA runs one small program on few of the cores, and on CPU in the thread that called it. So
independent calls of such a program end sooner if several threads make them.

The threads are not a pool of ``concurrent.futures``: two jobs of a millisecond took 0.1 ms longer
there, since a pool does more work before and after each job.
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
_NOT_RUN: Any = object()  # the result of a job that failed, or was not begun after another failed


def cores() -> int:
    """How many cores this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(os.getpid()))  # of the main thread: this one may have fewer


def start_helpers() -> None:
    """Start the helper threads of this process, before there are many other threads.

    The C library (glibc) gives each of the first threads of a process a heap, and later threads
    share these heaps: two threads that work at the same time would wait for each other.
    """
    _helpers(os.getpid())


class Helpers:
    """Threads that wait for jobs until the process ends.

    Args:
        wanted: How many threads `start` starts.

    Attributes:
        asked: The queue of jobs that threads are asked to help with.
    """

    def __init__(self, wanted: int) -> None:
        self.asked: SimpleQueue[_Shared[Any]] = SimpleQueue()
        self._unstarted = deque(range(wanted))
        self._busy: list[threading.Lock] = []  # for each thread, held while it runs jobs

    @property
    def count(self) -> int:
        """The number of threads: fewer than wanted if the system refused to start more."""
        return len(self._busy)

    def start(self) -> None:
        """Start the threads that are not started yet. Safe to call from several threads."""
        while self._unstarted:
            with contextlib.suppress(IndexError):  # another thread has just taken the last one
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
        """Wait until no thread runs a job, and keep them from beginning another one."""
        for busy in self._busy:
            busy.acquire()

    def _wait(self, busy: threading.Lock) -> None:
        # The thread gets its heap of glibc now. The object must be large: Python keeps small ones
        # in its own heap.
        bytearray(2**12)
        while True:
            shared = self.asked.get()
            with busy:
                shared.help_out()
            del shared  # the jobs hold arrays, and the next job may be long in coming


_known: dict[int, Helpers] = {}  # by process


def _helpers(process: int) -> Helpers:
    """The helpers of a process. A fork inherits no threads, so it gets its own."""
    helpers = _known.get(process)
    if helpers is None:  # `setdefault` is atomic, so all threads get the same helpers
        helpers = _known.setdefault(process, Helpers(cores() - 1))
    helpers.start()
    return helpers


@atexit.register
def _stop_helpers() -> None:
    """Stop the helpers at exit: a thread in the middle of a job would abort the interpreter.

    An interrupt of `run_together` may leave one.
    """
    helpers = _known.get(os.getpid())
    if helpers is not None:
        helpers.stop()


class _Shared(Generic[T]):
    """Jobs that several threads take from.

    A helper puts the result of each job that it took into `done`. The thread that asked for help
    counts its own jobs.

    Args:
        jobs: The jobs.

    Attributes:
        todo: The jobs that nobody has taken, with their positions.
        done: Position and result of each job that a helper took; `_NOT_RUN` after an error.
        failures: Errors, oldest first.
    """

    __slots__ = ("_config", "done", "failures", "todo")

    def __init__(self, jobs: Sequence[Callable[[], T]]) -> None:
        self.todo = deque(enumerate(jobs))
        self.done: SimpleQueue[tuple[int, T]] = SimpleQueue()
        self.failures: list[BaseException] = []
        self._config: Hashable = thread_config()

    def help_out(self) -> None:
        """Do jobs until there are none, in a helper thread.

        Nothing is done if JAX is configured differently in this thread.
        """
        if not self.todo or thread_config() != self._config:
            return
        while True:
            index, result = self.take()
            if index < 0:
                return
            self.done.put((index, result))

    def take(self) -> tuple[int, T]:
        """Take a job and do it.

        Returns:
            Its position, negative if there was none left, and its result; `_NOT_RUN` if the job
            raised, or one before it did.
        """
        try:
            index, job = self.todo.popleft()  # atomic: no two threads get one job
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
    """Run jobs that do not depend on each other, in this thread and in helper threads.

    A context that configures JAX (such as ``jax.default_matmul_precision``) holds for the thread
    that entered it. Within one, this thread runs all jobs alone.

    Args:
        jobs: The jobs. No job may wait for another.

    Returns:
        Their results, in order.

    Raises:
        Exception: The first error of a job. No job is begun after it, and none is running any
            more when it is raised.
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
        for _ in range(left):  # helpers took these
            index, results[index] = shared.done.get()
    finally:
        shared.todo.clear()  # after an interrupt, helpers must not go on
    if shared.failures:
        try:
            raise shared.failures[0]
        finally:
            shared.failures.clear()  # the error's traceback holds this frame: no reference cycle
    return results
