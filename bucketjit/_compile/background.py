"""Threads that work in the background, and what waits for them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from bucketjit._compile.process.pool import end_pool
from bucketjit._config import Background
from bucketjit._jax.config import ThreadConfig
from bucketjit._jax.devices import is_started

# Seconds that Python code may run while another thread waits for its turn (CPython has 5 ms). A
# call waits so long each time it comes back from XLA.
_TURN = 0.0005


class _Jobs:
    """What waits for a thread: all that threads, and the end of the process, know of an executor.

    No executor is kept by a job that is done, whose work may hold a program that knows the function
    it was traced from, and so an executor that this function knows.

    Locks and queues that callers take are those of C: a `Condition` and a `Queue` are entered by
    Python code, which an interrupt may leave with the lock held.
    """

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.is_stopped = False

    def stop(self) -> None:
        """Let the threads end. Does not wait: it may run anywhere, by the garbage collector."""
        self.is_stopped = True
        while True:
            try:
                self.waiting.get_nowait()
            except queue.Empty:
                break
        self.waiting.put(None)


class _Notes:
    """What is waited for, and what has failed."""

    def __init__(self) -> None:
        self.pending: set[Hashable] = set()
        self.failed: set[Hashable] = set()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # entered by the lock

    def done(self, key: Hashable, failed: bool) -> None:
        """Take note that a job is done."""
        with self.lock:
            self.pending.discard(key)
            if failed:
                self.failed.add(key)
            self.changed.notify_all()


class _Job(NamedTuple):
    """Something to be done.

    Attributes:
        key: What it is for.
        work: Does it.
        notes: Where it is noted that it is done.
    """

    key: Hashable
    work: Callable[[], None]
    notes: _Notes

    def run(self) -> None:
        """Do it, whatever comes of it: who wants the same next does it then, and gets the error."""
        failed = True
        with contextlib.suppress(BaseException), short_turns():
            self.work()
            failed = False
        self.notes.done(self.key, failed)


class Workers:
    """Threads that work in the background, and what waits for them.

    They end with the executor, or with the interpreter, which waits for a compile that is under
    way but for nothing that waits. A fork of the process begins with nothing to do; it has threads
    of its own, unless XLA was running, which would wait for its threads in them for ever.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self._begin()
        _all_workers().add(self)

    def _begin(self, can_work: bool = True) -> None:
        self._can_work = can_work
        self._jobs, self._notes = _Jobs(), _Notes()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, self._jobs.stop)

    def begin_in_fork(self) -> None:
        """Forget the parent's threads and jobs, and its locks, which may be held for ever."""
        self._finalizer.detach()
        self._begin(can_work=not is_started())

    def submit(self, key: Hashable, work: Callable[[], None]) -> bool:
        """Have something done, unless it waits already, too much does, or no thread can do it.

        It is done under the configuration of JAX that is in force here.
        """
        jobs, notes = self._jobs, self._notes
        with notes.lock:
            if key in notes.pending:
                return True
            if not (self._can_work and is_running()):
                return False
            if jobs.waiting.qsize() >= self._background.queue:
                return False
            # An interrupt may come anywhere: what is pending has to have a thread, and a job.
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
        """Whether nothing is to be begun any more: the interpreter ends, or the executor has."""
        return self._jobs.is_stopped

    def failed(self, key: Hashable) -> bool:
        """Whether it has failed before; whoever wants it then does it, and gets the error."""
        notes = self._notes
        with notes.lock:
            return key in notes.failed

    def succeeded(self, key: Hashable) -> None:
        """Take note that somebody else has done it, so that it may be done here again."""
        notes = self._notes
        with notes.lock:
            notes.failed.discard(key)

    def wait(self, timeout: float | None) -> bool:
        """Wait until nothing is left to do; False if that took too long, or never will be done."""
        jobs, notes = self._jobs, self._notes
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        with notes.lock:
            notes.changed.wait_for(lambda: not notes.pending or jobs.is_stopped, timeout)
            return not notes.pending

    def drop(self) -> None:
        """Do nothing of what waits."""
        jobs, notes = self._jobs, self._notes
        while not jobs.is_stopped:
            try:
                job = jobs.waiting.get_nowait()
            except queue.Empty:
                break
            if job is None:
                jobs.waiting.put(None)  # stopped meanwhile: the threads are to see it
                break
            notes.done(job.key, False)
        with notes.lock:
            notes.failed.clear()


def _work(jobs: _Jobs) -> None:
    while not jobs.is_stopped:
        job = jobs.waiting.get()
        if job is None:
            jobs.waiting.put(None)  # for the next thread
            return
        job.run()
        del job


def _end_at_exit(thread: threading.Thread, jobs: _Jobs) -> None:
    """End a thread before the interpreter does: XLA must not be cut short in a compile."""
    alive = weakref.ref(thread)

    def end() -> None:
        running = alive()
        if running is not None and running.is_alive():
            with _deaf_to_interrupts():
                jobs.stop()
                end_pool()  # what it compiles elsewhere, nobody waits for
                running.join()

    atexit.register(end)
    weakref.finalize(thread, atexit.unregister, end).atexit = False


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let no Ctrl-C end the wait for a compile: as in a call, it cannot be cut short."""
    with contextlib.ExitStack() as undone:
        with contextlib.suppress(ValueError):  # no main thread: none is interrupted
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            if before is not None:  # else it was not set by Python, which cannot restore it
                undone.callback(signal.signal, signal.SIGINT, before)
        yield


@functools.cache
def _all_workers() -> weakref.WeakSet[Workers]:
    """Those of this process, of which a fork has the objects but no threads."""
    found: weakref.WeakSet[Workers] = weakref.WeakSet()

    def after_in_child() -> None:
        for workers in list(found):
            workers.begin_in_fork()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=after_in_child)
    return found


class _Turns:
    """How long a thread of Python may keep others waiting, for all threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = self._ours = 0.0

    @contextlib.contextmanager
    def short(self) -> Iterator[None]:
        """Keep turns short, unless they are already; whoever sets others meanwhile keeps those."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._before = sys.getswitchinterval()
                if self._before > _TURN:
                    sys.setswitchinterval(_TURN)
                self._ours = sys.getswitchinterval()
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    self._restore()

    def forget(self) -> None:
        """What is under way is not under way in a copy of this process."""
        if self._count:
            self._restore()
        self.__init__()  # type: ignore[misc]

    def _restore(self) -> None:
        if sys.getswitchinterval() == self._ours < self._before:
            # Whole microseconds are kept, rounded down.
            sys.setswitchinterval(self._before + 0.5e-6)


def is_running() -> bool:
    """Whether the interpreter is not about to end, when nobody would wait for a new thread."""
    return threading.main_thread().is_alive()


def short_turns() -> contextlib.AbstractContextManager[None]:
    """A context for work beside calls, in which no thread of Python keeps others waiting long."""
    return _turns().short()


@functools.cache
def _turns() -> _Turns:
    """The turns of this process."""
    made = _Turns()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=made.forget)
    return made
