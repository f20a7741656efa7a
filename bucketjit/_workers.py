"""Threads that work in the background, and what waits for them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from bucketjit import _jax
from bucketjit._apart.pool import end_pool
from bucketjit._config import Background

# Seconds that Python code may run while another thread waits for its turn (CPython has 5 ms). A
# call waits so long each time it comes back from XLA.
_TURN = 0.0005


class Workers:
    """Threads that work in the background, and what waits for them.

    They end with the executor, or with the interpreter, which waits for a compile that is under
    way but for nothing that waits.
    """

    def __init__(self, background: Background) -> None:
        self._jobs: queue.Queue[tuple[Hashable, Callable[[], None]] | None]
        self._jobs = queue.Queue(background.queue)
        self._pending: set[Hashable] = set()
        self._failed: set[Hashable] = set()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._count = background.workers
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        weakref.finalize(self, _stop, self._jobs, self._stop)

    def submit(self, key: Hashable, work: Callable[[], None]) -> bool:
        """Have something done, unless it waits already, too much does, or the interpreter ends.

        It is done under the configuration of JAX that is in force here.
        """
        with self._lock:
            if key in self._pending:
                return True
            if not is_running():
                return False
            try:
                self._jobs.put_nowait((key, functools.partial(_jax.ThreadConfig().run, work)))
            except queue.Full:
                return False
            self._pending.add(key)
            if len(self._threads) < min(self._count, len(self._pending)):
                thread = threading.Thread(
                    target=_work,
                    args=(self._jobs, self._stop, weakref.ref(self)),
                    name="bucketjit-compile",
                    daemon=True,
                )
                self._threads.append(thread)
                _end_at_exit(thread, self._jobs, self._stop)
                thread.start()
            return True

    def failed(self, key: Hashable) -> bool:
        """Whether it has failed before; whoever wants it then does it, and gets the error."""
        with self._lock:
            return key in self._failed

    def done(self, key: Hashable, failed: bool) -> None:
        """Take note that a job is done."""
        with self._idle:
            self._pending.discard(key)
            if failed:
                self._failed.add(key)
            self._idle.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait until nothing is left to do; False if that took too long."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._pending, timeout)

    def drop(self) -> None:
        """Do nothing of what waits."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                self.done(job[0], False)
        with self._lock:
            self._failed.clear()


def _work(
    jobs: queue.Queue[tuple[Hashable, Callable[[], None]] | None],
    stop: threading.Event,
    owner: weakref.ref[Workers],
) -> None:
    while not stop.is_set():
        job = jobs.get()
        if job is None:
            jobs.put(None)  # for the next thread
            return
        key, work = job
        failed = False
        try:
            with short_turns():
                work()
        except Exception:
            failed = True
        del work, job
        workers = owner()
        if workers is not None:
            workers.done(key, failed)
        del workers


def _stop(jobs: queue.Queue[Any], stop: threading.Event) -> None:
    """Let the threads end. Does not wait: it may run anywhere, by the garbage collector."""
    stop.set()
    while True:
        try:
            jobs.get_nowait()
        except queue.Empty:
            break
    with contextlib.suppress(queue.Full):
        jobs.put_nowait(None)


def _end_at_exit(thread: threading.Thread, jobs: queue.Queue[Any], stop: threading.Event) -> None:
    """End a thread before the interpreter does: XLA must not be cut short in a compile."""
    alive = weakref.ref(thread)

    def end() -> None:
        running = alive()
        if running is not None and running.is_alive():
            _stop(jobs, stop)
            end_pool()  # what it compiles elsewhere, nobody waits for
            running.join()

    atexit.register(end)
    weakref.finalize(thread, atexit.unregister, end).atexit = False


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
