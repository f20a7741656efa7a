"""Gets executables: from the cache, from a file, by a compile now, or by one in the background.

A call whose executable is missing may be served by a *stand-in*: the smallest compiled bucket of
the same program that holds the call's sizes. The result is the same. A stand-in serves while the
call's own bucket compiles in the background.

`bucketjit._compile.requests` describes what to get, `bucketjit._compile.cache` stores it, and
`bucketjit._compile.budget` limits the compiles.
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
from typing import Any, NamedTuple

from bucketjit._compile.budget import Allowance
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.executable import Executable, run_first
from bucketjit._compile.requests import CompileRequest, Source
from bucketjit._config import Background
from bucketjit._events import Event, shown
from bucketjit._ir.program import Program
from bucketjit._jax.arrays import is_started
from bucketjit._jax.compiler import forget_bytes
from bucketjit._jax.config import ThreadConfig
from bucketjit.errors import CompileBudgetError


class Workers:
    """The threads that work in the background for one bucketed function.

    A thread ends when no job waits. The interpreter waits for a compile that is under way, and not
    for jobs that wait. A fork of the process starts without jobs. It can start threads, unless XLA
    had been started before the fork: XLA would wait for ever for its own threads, which a fork does
    not copy.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self.begin()
        _all_workers().add(self)

    def begin(self, can_work: bool = True) -> None:
        """Start with no jobs and no threads, and with a lock that no thread holds.

        A fork does so: it has none of its parent's threads, one of which may hold the lock.
        """
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


@functools.cache
def _all_workers() -> weakref.WeakSet[Workers]:
    """The workers of this process: a running thread keeps its own alive."""
    pools: weakref.WeakSet[Workers] = weakref.WeakSet()

    def after_in_child() -> None:
        for workers in list(pools):
            workers.begin(can_work=not is_started())

    def end() -> None:
        # The interpreter stops daemon threads wherever they are. XLA must not be stopped in a
        # compile, by Ctrl-C neither.
        try:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        except ValueError:  # only the main thread gets signals, and may set this
            before = None
        for workers in list(pools):
            workers.end()
        if before is not None:
            signal.signal(signal.SIGINT, before)

    atexit.register(end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=after_in_child)
    return pools


class Provided(NamedTuple):
    """An executable, and its source; it may stand in for the bucket that was requested."""

    entry: Executable
    source: Source = "cache"
    stands_in: bool = False


class ExecutableProvider:
    """Gets executables for an engine and those of its derivatives."""

    def __init__(
        self,
        cache: ExecutableCache[Any, Executable],
        name: str,
        allowance: Allowance,
        background: Background | None,
        compiled: Callable[[Executable], None],
        tell: Callable[[Event], None],
    ) -> None:
        self._cache = cache
        self._name = name
        self.allowance = allowance
        self.workers = None if background is None else Workers(background)
        self._compiled = compiled
        self._tell = tell
        self._failed: set[Hashable] = set()  # marks whose compile has failed in the background
        # Marks that were in no file when the budget was spent: no worker looks for them again.
        self._beyond_budget: set[Hashable] = set()

    def get(
        self, key: Hashable, request: Callable[[], CompileRequest], may_stand_in: bool = True
    ) -> Provided:
        entry = self._cache.get(key)
        if entry is not None:
            return Provided(entry)
        wanted = request()
        # What failed in the background compiles here, so that the caller gets the error.
        if may_stand_in and self.workers is not None and wanted.mark not in self._failed:
            larger = wanted.requests.smallest(wanted)
            entry = None if larger is None else self._cache.get(larger)
            if entry is not None:
                self._compile_later(self.workers, wanted, entry)
                return Provided(entry, stands_in=True)
        return self._obtain(wanted)

    def prepare(
        self,
        request: CompileRequest,
        first_run: bool = False,
        *,
        is_asked_for: bool = True,
        epoch: object = None,
    ) -> Provided:
        """Compile what is neither stored nor in a file; `Cleared` if there was a `clear` since."""
        if epoch is not None and epoch is not self.epoch:
            raise Cleared
        return self._obtain(request, first_run, is_asked_for, is_call=False)

    def get_apart(self, request: CompileRequest) -> Provided:
        """The executable of a request, which is neither looked for nor stored in the cache."""
        events: list[Event] = []
        try:
            return self._load_or_build(request, events)
        finally:
            for event in events:
                self._tell(event)

    @property
    def epoch(self) -> object:
        """An object that stays the same until the next `clear`."""
        return self.allowance.spent

    def clear(self) -> None:
        """Forget what failed, what was spent of the budget, and the jobs that wait."""
        self._failed.clear()
        self._beyond_budget.clear()
        self.allowance.clear()
        if self.workers is not None:
            self.workers.drop()

    def _obtain(
        self,
        request: CompileRequest,
        first_run: bool = False,
        is_asked_for: bool = True,
        is_call: bool = True,
    ) -> Provided:
        """The executable of a request: stored, from a file, or compiled by this or another thread.

        `is_call` says whether the caller uses it, which then counts as a hit where it is stored.
        """
        source: Source = "cache"
        began = False
        # Told after storing: a listener may call the bucketed function, which needs the executable.
        events: list[Event] = []

        def build() -> Executable:
            nonlocal source, began
            began = True
            entry, source, _ = self._load_or_build(request, events, is_asked_for)
            if first_run and isinstance(request.program, Program):
                run_first(entry, request.program)
            self._failed.discard(request.mark)
            return entry

        while True:
            try:
                return Provided(self._cache.get_or_compile(request.key, build, is_call), source)
            except CompileBudgetError:
                if began or not is_asked_for:
                    raise
            finally:
                for event in events:
                    self._tell(event)
            # Another thread tried, which may not compile. This thread may: try again.

    def _load_or_build(
        self, request: CompileRequest, events: list[Event], is_asked_for: bool = True
    ) -> Provided:
        """The executable from a file, which needs no budget, or compiled here."""
        loaded = None if request.kept is None else request.kept.load(request.kernel)
        if loaded is not None:
            self._compiled(loaded)
            events.append(self._event("load", request, loaded))
            return Provided(loaded, "file")
        built = self.allowance.build(request, is_asked_for, (e for _, e in self._cache.items()))
        try:
            self._compiled(built)
            events.append(self._event("compile", request, built))
            if request.kept is not None:
                request.kept.save(built)
        finally:
            forget_bytes(built.compiled)
        return Provided(built, "compile")

    def _event(self, kind: str, request: CompileRequest, entry: Executable) -> Event:
        detail = "an exact shape" if request.program is None else ""
        return Event(kind, self._name, entry.sizes, entry.compile_seconds, detail)

    # --- in the background ---

    def _compile_later(
        self, workers: Workers, request: CompileRequest, stand_in: Executable
    ) -> None:
        """Have a worker load or compile a request.

        Loading needs no budget, so a request is handed over once though the budget is spent.
        """
        if request.mark in self._beyond_budget and not self.allowance.affordable():
            return
        epoch, alive = self.epoch, weakref.ref(self)

        def work(config: ThreadConfig) -> None:
            provider = alive()
            if provider is not None:  # else its bucketed function is gone
                provider._prepare_later(request, epoch, config)

        if workers.submit(request.mark, work):
            detail = f"served by {shown(stand_in.sizes)}"
            self._tell(Event("stand-in", self._name, request.sizes, detail=detail))

    def _prepare_later(self, request: CompileRequest, epoch: object, config: ThreadConfig) -> None:
        """What a worker runs for `_compile_later`."""
        try:
            prepare = functools.partial(
                self.prepare, first_run=True, is_asked_for=False, epoch=epoch
            )
            config.run(prepare, request)
        except Cleared:
            pass
        except CompileBudgetError as error:  # no failure: the stand-in goes on serving
            self._beyond_budget.add(request.mark)
            self.allowance.tell_refusal(request, str(error))
        except BaseException as error:
            self._failed.add(request.mark)
            self._tell(Event("error", self._name, request.sizes, detail=repr(error)))


class Cleared(Exception):
    """A request is from before `ExecutableProvider.clear`: its executable is no longer wanted."""
