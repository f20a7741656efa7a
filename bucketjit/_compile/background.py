"""Threads that compile in the background, and their queue of jobs.

A job is any function with a key; `bucketjit._compile.provider` submits the compiles.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from bucketjit._config import Background
from bucketjit._jax.config import ThreadConfig
from bucketjit._jax.devices import is_started


class _Jobs:
    """The queue of jobs. Threads and exit handlers know only this object, no bucketed function.

    So a job cannot keep a bucketed function alive after it is done. (Its work may hold a program,
    which holds the function it was traced from, which may hold the bucketed function.)

    Locks and queues that callers use are implemented in C. A `Condition` and a `Queue` are entered
    by Python code, which an interrupt may leave with the lock held.

    Attributes:
        waiting: Jobs that wait for a thread; None tells a thread to end.
        is_stopped: Whether no further job is begun.
    """

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.is_stopped = False

    def stop(self) -> None:
        """Let the threads end. Does not wait: the garbage collector may call it in any thread."""
        self.is_stopped = True
        while True:
            try:
                self.waiting.get_nowait()
            except queue.Empty:
                break
        self.waiting.put(None)


class _Notes:
    """Which jobs are pending, and which have failed.

    Attributes:
        pending: Keys of the jobs that wait or run.
        failed: Keys of the jobs that have failed.
        lock: Protects both.
        changed: Notified when a job is done. Its own ``with`` statement is never used: callers
            enter ``lock``, see `_Jobs`.
    """

    def __init__(self) -> None:
        self.pending: set[Hashable] = set()
        self.failed: set[Hashable] = set()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)

    def done(self, key: Hashable, failed: bool) -> None:
        """Note that a job is done."""
        with self.lock:
            self.pending.discard(key)
            if failed:
                self.failed.add(key)
            self.changed.notify_all()


class _Job(NamedTuple):
    """A job.

    Attributes:
        key: Its key; one job of a key is pending at most.
        work: Does it.
        notes: Where its end is noted.
    """

    key: Hashable
    work: Callable[[], None]
    notes: _Notes

    def run(self) -> None:
        """Do the work. An exception only marks the job as failed.

        The next caller that needs the same does the work itself, and gets the exception.
        """
        failed = True
        with contextlib.suppress(BaseException):
            self.work()
            failed = False
        self.notes.done(self.key, failed)


class Workers:
    """The threads that work in the background for one bucketed function.

    They end with the bucketed function or with the interpreter. The interpreter waits for a compile
    that is under way, and not for jobs that wait. A fork of the process starts without jobs. It can
    start threads, unless XLA had been started before the fork: XLA would wait for ever for its own
    threads, which a fork does not copy.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self._begin()
        _all_workers().add(self)

    def _begin(self, can_work: bool = True) -> None:
        """Start with no jobs and no threads."""
        self._can_work = can_work
        self._jobs, self._notes = _Jobs(), _Notes()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, self._jobs.stop)

    def begin_in_fork(self) -> None:
        """Drop the parent's threads, jobs, and locks, which a thread of the parent may hold."""
        self._finalizer.detach()
        self._begin(can_work=not is_started())

    def submit(self, key: Hashable, work: Callable[[], None]) -> bool:
        """Queue a job, unless its key is pending, the queue is full, or there can be no thread.

        The job runs under the configuration of JAX that is in force in the submitting thread.
        """
        jobs, notes = self._jobs, self._notes
        with notes.lock:
            if key in notes.pending:
                return True
            if not (self._can_work and is_running()):
                return False
            if jobs.waiting.qsize() >= self._background.queue:
                return False
            # In this order, as an interrupt may come between any two lines: a thread first, then
            # the job, and the mark last. A key that is marked as pending without either would
            # never be done.
            self._threads = [t for t in self._threads if t.is_alive()]
            if len(self._threads) <= min(self._background.workers - 1, len(notes.pending)):
                thread = threading.Thread(
                    target=_work, args=(jobs,), name="bucketjit-compile", daemon=True
                )
                self._threads.append(thread)
                _end_at_exit(thread, jobs)
                with contextlib.suppress(RuntimeError):  # no more threads can be started
                    thread.start()
                if not any(t.is_alive() for t in self._threads):
                    return False
            work = functools.partial(ThreadConfig().run, work)
            jobs.waiting.put(_Job(key, work, notes))
            notes.pending.add(key)
            return True

    @property
    def is_stopped(self) -> bool:
        """Whether no further job is begun: the function is gone, or the interpreter ends."""
        return self._jobs.is_stopped

    def failed(self, key: Hashable) -> bool:
        """Whether the last job of a key has failed."""
        notes = self._notes
        with notes.lock:
            return key in notes.failed

    def succeeded(self, key: Hashable) -> None:
        """Note that the work of a key is done, so that a new job of it may be submitted."""
        notes = self._notes
        with notes.lock:
            notes.failed.discard(key)

    def wait(self, timeout: float | None) -> bool:
        """Wait until no job is pending."""
        jobs, notes = self._jobs, self._notes
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        with notes.lock:
            notes.changed.wait_for(lambda: not notes.pending or jobs.is_stopped, timeout)
            return not notes.pending

    def drop(self) -> None:
        """Remove all waiting jobs, and forget which have failed. Running jobs continue."""
        jobs, notes = self._jobs, self._notes
        while not jobs.is_stopped:
            try:
                job = jobs.waiting.get_nowait()
            except queue.Empty:
                break
            if job is None:
                jobs.waiting.put(None)  # `stop` came meanwhile: the None is for the threads
                break
            notes.done(job.key, False)
        with notes.lock:
            notes.failed.clear()


def _work(jobs: _Jobs) -> None:
    """What a thread runs: one job after the other, until the queue is stopped."""
    while not jobs.is_stopped:
        job = jobs.waiting.get()
        if job is None:
            jobs.waiting.put(None)  # for the next thread
            return
        job.run()
        del job  # or it would be kept alive while the thread waits for the next one


def _end_at_exit(thread: threading.Thread, jobs: _Jobs) -> None:
    """Register a function that ends a thread before the interpreter does.

    The interpreter stops daemon threads wherever they are, and XLA must not be stopped in a
    compile.
    """
    alive = weakref.ref(thread)

    def end() -> None:
        running = alive()
        if running is not None and running.is_alive():
            with _deaf_to_interrupts():
                jobs.stop()
                running.join()

    atexit.register(end)
    weakref.finalize(thread, atexit.unregister, end).atexit = False


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C while waiting for a compile, which cannot be cut short."""
    with contextlib.ExitStack() as undone:
        with contextlib.suppress(ValueError):  # only the main thread gets signals, and may set this
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            if before is not None:  # else it was not set by Python, which cannot restore it
                undone.callback(signal.signal, signal.SIGINT, before)
        yield


@functools.cache
def _all_workers() -> weakref.WeakSet[Workers]:
    """The workers of this process. A fork copies them without their threads; they begin again."""
    found: weakref.WeakSet[Workers] = weakref.WeakSet()

    def after_in_child() -> None:
        for workers in list(found):
            workers.begin_in_fork()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=after_in_child)
    return found


def is_running() -> bool:
    """Whether the interpreter is not ending. At its end, new threads would not be waited for."""
    return threading.main_thread().is_alive()
