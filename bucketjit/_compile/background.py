"""Threads that work in the background, and their queue of jobs.

A job is any function with a key; `bucketjit._compile.provider` submits the compiles.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from bucketjit._config import Background
from bucketjit._jax.config import ThreadConfig
from bucketjit._jax.devices import is_started


class Workers:
    """The threads that work in the background for one bucketed function.

    A thread ends when no job waits. The interpreter waits for a compile that is under way, and not
    for jobs that wait. A fork of the process starts without jobs. It can start threads, unless XLA
    had been started before the fork: XLA would wait for ever for its own threads, which a fork does
    not copy.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self._begin()
        _all_workers().add(self)

    def _begin(self, can_work: bool = True) -> None:
        """Start with no jobs and no threads, and with a lock that no thread holds."""
        self._can_work, self._is_ending = can_work, False
        self._waiting: dict[Hashable, Callable[[], Any]] = {}
        self._running: set[Hashable] = set()
        self._threads: set[threading.Thread] = set()
        # Only the lock is entered by ``with``: it is implemented in C. An interrupt may leave the
        # Python code of a `Condition` with the lock held.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def submit(self, key: Hashable, work: Callable[[ThreadConfig], Any]) -> bool:
        """Queue a job, unless its key is pending, the queue is full, or there can be no thread.

        ``work`` is called with the configuration of JAX that is in force here.
        """
        with self._lock:
            if key in self._waiting or key in self._running:
                return False
            if not self._can_work or len(self._waiting) >= self._background.queue:
                return False
            # The thread first, which waits for the lock: an interrupt may come between any two
            # lines, and a job without a thread would never be done.
            most = min(self._background.workers, len(self._waiting) + len(self._running) + 1)
            if len(self._threads) < most:
                thread = threading.Thread(target=self._work, name="bucketjit-compile", daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads can be started
                    thread.start()
                    self._threads.add(thread)
                if not self._threads:
                    return False
            self._waiting[key] = functools.partial(work, ThreadConfig())
            return True

    def _work(self) -> None:
        """What a thread runs: one job after the other, until none waits."""
        while True:
            with self._lock:
                # Asked here: an interrupt in `is_alive` may mark the main thread as ended.
                if not threading.main_thread().is_alive():
                    self._waiting.clear()
                    self._can_work, self._is_ending = False, True
                if not self._waiting:
                    self._threads.discard(threading.current_thread())
                    self._changed.notify_all()
                    return
                key = next(iter(self._waiting))
                work = self._waiting.pop(key)
                self._running.add(key)
            with contextlib.suppress(BaseException):  # the job tells of its errors itself
                work()
            del work  # or it would be kept alive while the thread waits for the lock
            with self._lock:
                self._running.discard(key)
                self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait until no job is pending. At the end of the interpreter none is waited for."""
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        with self._lock:
            self._changed.wait_for(self._is_idle, timeout)
            return self._is_idle() and not self._is_ending

    def _is_idle(self) -> bool:
        return not self._waiting and not self._running

    def drop(self) -> None:
        """Remove all waiting jobs. Running jobs continue."""
        with self._lock:
            self._waiting.clear()
            self._changed.notify_all()

    def end(self) -> None:
        """Wait for the jobs that run, and for no other."""
        self.drop()
        for thread in list(self._threads):
            thread.join()

    def begin_in_fork(self) -> None:
        """Drop the parent's threads, jobs, and locks, which a thread of the parent may hold."""
        self._begin(can_work=not is_started())


@functools.cache
def _all_workers() -> weakref.WeakSet[Workers]:
    """The workers of this process: a running thread keeps its own alive."""
    found: weakref.WeakSet[Workers] = weakref.WeakSet()

    def after_in_child() -> None:
        for workers in list(found):
            workers.begin_in_fork()

    def end() -> None:
        # The interpreter stops daemon threads wherever they are. XLA must not be stopped in a
        # compile, by Ctrl-C neither.
        try:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        except ValueError:  # only the main thread gets signals, and may set this
            before = None
        for workers in list(found):
            workers.end()
        if before is not None:
            signal.signal(signal.SIGINT, before)

    atexit.register(end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=after_in_child)
    return found
