"""Several jobs on the cores of the host: who asks works on them too, and others help.

XLA runs one small program on few of the cores, and on CPU it runs it in the thread that called it.
Independent calls of such a program therefore end sooner when several threads make them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bucketjit import _jax

T = TypeVar("T")


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


@functools.cache
def _helpers(process: int) -> tuple[int, ThreadPoolExecutor | None]:
    """How many threads can help in a process, and those: a fork has none of its parent's."""
    count = cores() - 1
    if count < 1:
        return 0, None
    pool = ThreadPoolExecutor(count, "bucketjit-chunks", _take_heap)
    together = threading.Barrier(count)  # so that each of them begins one
    try:
        for _ in range(count):
            pool.submit(together.wait)
    except BaseException as error:  # one does not start: those that have must not wait for it
        together.abort()
        if not isinstance(error, RuntimeError):
            raise
    return count, pool


def _take_heap() -> None:
    bytearray(2**12)  # Python has small objects in a heap of its own


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
    count, pool = _helpers(os.getpid())
    if len(jobs) == 1 or pool is None:
        return [job() for job in jobs]
    results: dict[int, T] = {}
    todo = deque(enumerate(jobs))
    failures: list[BaseException] = []

    def work() -> None:
        while True:
            try:
                index, job = todo.popleft()
            except IndexError:
                return
            try:
                results[index] = job()
            except BaseException as error:
                failures.append(error)
                todo.clear()

    context = _jax.thread_config()

    def help_out() -> None:
        if _jax.thread_config() == context:
            work()

    helping = []
    try:
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end: nobody helps
            for _ in range(min(count, len(jobs) - 1)):
                helping.append(pool.submit(help_out))
        work()
        for future in helping:
            if not future.cancel():
                future.result()
    finally:
        todo.clear()  # after an interrupt, nobody goes on
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # the error holds this frame
    return [results[index] for index in range(len(jobs))]
