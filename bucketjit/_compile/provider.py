"""Gets executables: from the cache, from a file, by a compile now, or by one in the background.

A call whose executable is missing may be served by a *stand-in*: the smallest compiled bucket of
the same program that holds the call's sizes. The result is the same. A stand-in serves while the
call's own bucket compiles in the background, and after that bucket was evicted from a full cache,
where compiling it again at once would only evict another one.

`bucketjit._compile.requests` describes what to get, `bucketjit._compile.cache` stores it, and
`bucketjit._compile.budget` limits the compiles.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bucketjit._compile.background import Workers
from bucketjit._compile.budget import Allowance, Spending
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.cache_store import CLEARED
from bucketjit._compile.executable import Executable
from bucketjit._compile.first_run import run_first
from bucketjit._compile.requests import CompileRequest, Source, key_without_owner
from bucketjit._config import Background, CompileBudget
from bucketjit._events import Event, shown
from bucketjit._jax.compiler import forget_bytes
from bucketjit._tracing.program import Program
from bucketjit.errors import CompileBudgetError

# Evicted executables that are remembered; the most that repeated evictions multiply hysteresis by.
_GHOSTS, _MOST_PATIENT = 256, 128

_TOLD = 1024  # buckets whose stand-in is remembered, so that each is reported once


class Provided(NamedTuple):
    """An executable, and where this call got it from.

    Attributes:
        entry: The executable.
        source: Where it came from.
        stands_in: Whether it is a stand-in for the bucket that was requested.
    """

    entry: Executable
    source: Source = "cache"
    stands_in: bool = False


@dataclass
class _Ghost:
    """What is remembered of an evicted executable.

    Attributes:
        wanted: How many requests a stand-in serves before the executable is compiled again.
        asked: How many requests there were since the eviction.
    """

    wanted: int
    asked: int = 0


class ExecutableProvider:
    """Gets executables for an engine and those of its derivatives.

    Attributes:
        allowance: What may still be compiled.
        workers: The threads that compile in the background; None without background compiles.
    """

    def __init__(
        self,
        cache: ExecutableCache[Any, Executable],
        name: str,
        budget: CompileBudget,
        background: Background | None,
        hysteresis: int,
        compiled: Callable[[Executable], None],
        tell: Callable[[Event], None],
    ) -> None:
        self._cache = cache
        self._name = name
        self._hysteresis = hysteresis
        self._compiled = compiled
        self._tell = tell
        self.allowance = Allowance(name, budget, cache, tell)
        self._ghosts: OrderedDict[Hashable, _Ghost] = OrderedDict()
        # Marks that were in no file when the budget was spent: no worker looks for them again.
        self._beyond_budget: set[Hashable] = set()
        self._stand_ins: OrderedDict[Hashable, Mapping[str, int]] = OrderedDict()
        self._lock = threading.Lock()
        # Its jobs hold this provider by a weak reference, so that they do not keep it alive.
        self.workers = None if background is None else Workers(background)

    def get(
        self, key: Hashable, request: Callable[[], CompileRequest], may_stand_in: bool = True
    ) -> Provided:
        """The executable of a key, or a stand-in."""
        entry = self._cache.get(key)
        if entry is not None:
            return Provided(entry)
        wanted = request()
        if may_stand_in and (stand_in := self._stand_in(wanted)) is not None:
            return Provided(stand_in, stands_in=True)
        return self._obtain(wanted)

    def prepare(
        self,
        request: CompileRequest,
        first_run: bool,
        *,
        is_asked_for: bool = True,
        epoch: object = None,
    ) -> Source:
        """Compile the executable of a request, unless it is stored or in a file."""
        if epoch is not None and epoch is not self.epoch:
            raise Cleared
        if request.key in self._cache:
            return "cache"
        return self._obtain(request, first_run, is_asked_for, is_call=False).source

    def get_own(self, request: CompileRequest) -> Executable:
        """The executable of a request itself, never a stand-in."""
        return self._obtain(request, is_call=False).entry

    def get_apart(self, request: CompileRequest) -> Executable:
        """The executable of a request, which is neither looked for nor stored in the cache."""
        told: list[Event] = []
        try:
            return self._load_or_build(request, told).entry
        finally:
            for event in told:
                self._tell(event)

    def _obtain(
        self,
        request: CompileRequest,
        first_run: bool = False,
        is_asked_for: bool = True,
        is_call: bool = True,
    ) -> Provided:
        """The executable of a request: stored, from a file, or compiled by this or another thread.

        See `prepare` for the arguments. `is_call` says whether the caller uses the executable,
        which then counts as a hit where it is stored already.
        """
        source: Source = "cache"
        began = False
        told: list[Event] = []

        def tell() -> None:
            # After storing: a listener may call the bucketed function, which then needs this
            # executable.
            while told:
                self._tell(told.pop(0))

        def build() -> Executable:
            nonlocal source, began
            began = True
            entry, source, _ = self._load_or_build(request, told, is_asked_for)
            if first_run and isinstance(request.program, Program):
                run_first(entry, request.program)
            with self._lock:
                self._stand_ins.pop(request.mark, None)
            if self.workers is not None:
                self.workers.succeeded(request.mark)
            return entry

        while True:
            try:
                entry = self._cache.get_or_compile(request.key, build, tell, is_call)
                return Provided(entry, source)
            except CompileBudgetError:
                if began or not is_asked_for:
                    raise
            finally:
                tell()  # the events of a compile whose first run failed
            # Another thread tried, which may not compile. This thread may: try again.

    def evicted(self, key: tuple[Any, ...], entry: Executable, why: str) -> None:
        """Remember an executable that has left the cache, and emit an event."""
        if why is not CLEARED:  # a clear drops the programs as well, so that no key comes back
            mark = key_without_owner(key)
            with self._lock:
                before = self._ghosts.pop(mark, None)
                most = _MOST_PATIENT * self._hysteresis
                wanted = self._hysteresis if before is None else min(2 * before.wanted, most)
                self._ghosts[mark] = _Ghost(wanted)
                while len(self._ghosts) > _GHOSTS:
                    self._ghosts.popitem(last=False)
        self._tell(Event("evict", self._name, entry.sizes, detail=why))

    @property
    def epoch(self) -> object:
        """An object that stays the same until the next `clear`."""
        return self.allowance.spent

    def clear(self) -> None:
        """Forget evictions, stand-ins, what was spent of the budget, and the jobs that wait."""
        with self._lock:
            self._ghosts.clear()
            self._beyond_budget.clear()
            self._stand_ins.clear()
            self.allowance.clear()
        if self.workers is not None:
            self.workers.drop()

    def _load_or_build(
        self,
        request: CompileRequest,
        told: list[Event],
        is_asked_for: bool = True,
    ) -> Provided:
        """The executable from a file, or compiled here.

        See `prepare` for the arguments, and `_build` for ``told``.
        """
        entry = self._load(request)
        if entry is None:
            spent = self.allowance.spend(request, is_asked_for)
            return Provided(self._build(request, spent, told), "compile")
        told.append(_event("load", self._name, request, entry))
        return Provided(entry, "file")

    def _load(self, request: CompileRequest) -> Executable | None:
        """The executable from a file, or None. Loading is no compile and needs no budget."""
        loaded = None if request.kept is None else request.kept.load()
        if loaded is not None:
            self._compiled(loaded)
        return loaded

    def _build(self, request: CompileRequest, spent: Spending, told: list[Event]) -> Executable:
        """Compile a request, count it, and save the executable in a file."""
        began = time.perf_counter()
        try:
            built = request.build()
        except BaseException:
            with spent.lock:
                spent.compiles -= 1  # a failed compile does not count; the seconds it took do
            raise
        finally:
            with spent.lock:
                spent.seconds += time.perf_counter() - began
        try:
            self._compiled(built)
            told.append(_event("compile", self._name, request, built))
            if request.kept is not None:
                request.kept.save(built)
        finally:
            forget_bytes(built.compiled)
        return built

    # --- stand-ins ---

    def _stand_in(self, request: CompileRequest) -> Executable | None:
        """A stored executable that serves the request for now, or None to get the requested one."""
        kept_out = self._keeps_out(request.mark)
        if not kept_out and (self.workers is None or self.workers.failed(request.mark)):
            # It failed in the background: compile it here, so that the caller gets the error.
            return None
        key = request.stand_in()
        entry = None if key is None else self._cache.get(key)
        if entry is None:
            return None
        if self.workers is not None and not kept_out:
            self._compile_later(request)
        self._tell_stand_in(request, entry)
        return entry

    def _tell_stand_in(self, request: CompileRequest, entry: Executable) -> None:
        """Emit an event for a stand-in, unless the last one of this bucket was the same."""
        with self._lock:
            is_known = self._stand_ins.get(request.mark) == entry.sizes
            self._stand_ins[request.mark] = entry.sizes
            if len(self._stand_ins) > _TOLD:
                self._stand_ins.popitem(last=False)
        if is_known:
            return
        detail = f"served by {shown(entry.sizes)}"
        self._tell(Event("stand-in", self._name, request.sizes, detail=detail))

    def _keeps_out(self, mark: Hashable) -> bool:
        """Whether an evicted executable was requested too rarely since to be compiled again.

        The request is counted. Where nothing may be compiled, it is kept out as well.
        """
        if not self._hysteresis or not self._cache.is_full:
            return False
        obtainable = self.workers is not None or self.allowance.affordable()
        with self._lock:
            ghost = self._ghosts.get(mark)
            if ghost is None:
                return False
            ghost.asked += 1
            return ghost.asked <= ghost.wanted or not obtainable

    def _compile_later(self, request: CompileRequest) -> None:
        """Have a worker load or compile a request.

        Loading needs no budget, so a request is handed over even if the budget is spent: once, as a
        mark in `_beyond_budget` then says that no file holds it.
        """
        assert self.workers is not None
        affordable = self.allowance.affordable()
        with self._lock:
            if affordable:
                self._beyond_budget.discard(request.mark)
            elif request.mark in self._beyond_budget:
                return

        epoch, alive = self.epoch, weakref.ref(self)

        def work() -> None:
            provider = alive()
            if provider is not None:  # else its bucketed function is gone
                provider._prepare_later(request, epoch)

        self.workers.submit(request.mark, work)

    def _prepare_later(self, request: CompileRequest, epoch: object) -> None:
        """What a worker runs for `_compile_later`."""
        try:
            self.prepare(request, first_run=True, is_asked_for=False, epoch=epoch)
        except Cleared:
            pass
        except CompileBudgetError as error:  # not noted as a failure: the stand-in goes on serving
            self.allowance.tell_refusal(request, str(error))
            with self._lock:
                self._beyond_budget.add(request.mark)
        except BaseException as error:
            self._tell(Event("error", self._name, request.sizes, detail=repr(error)))
            raise


class Cleared(Exception):
    """A request is from before `ExecutableProvider.clear`: its executable is no longer wanted."""


def _event(kind: str, name: str, request: CompileRequest, entry: Executable) -> Event:
    """An event of an executable that was compiled or loaded."""
    detail = "an exact shape" if request.program is None else ""
    return Event(kind, name, entry.sizes, entry.compile_seconds, detail)
