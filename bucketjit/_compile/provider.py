"""Where executables come from: stored, compiled now, or compiled in the background.

A call whose executable is missing may be served by a *stand-in*, the smallest compiled bucket of
its program that holds its sizes, with the same result: while its own compiles in the background,
or where its own was evicted a moment ago and would only drive another out.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from bucketjit._compile.background import Workers
from bucketjit._compile.budget import Allowance, Spending
from bucketjit._compile.build import Compile
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.cache_store import CLEARED
from bucketjit._compile.executable import Executable
from bucketjit._compile.first_run import run_first
from bucketjit._compile.process.pool import Ended, can_start, pool
from bucketjit._compile.requests import CompileRequest, Source, key_without_owner
from bucketjit._config import Background, CompileBudget
from bucketjit._errors import CompileBudgetError
from bucketjit._events import Event, shown
from bucketjit._jax.compiler import NotElsewhere, compile_elsewhere, compile_here, forget_bytes
from bucketjit._jax.devices import only_on_cpu

_GHOSTS, _MOST_PATIENT = 256, 128

_TOLD = 1024  # buckets whose stand-in is remembered, to tell of it once

# How long another process may take: so many seconds, and so many times the longest compile here.
_PATIENCE, _PATIENT = 30.0, 10.0


class Provided(NamedTuple):
    """An executable, where this call has it from, and whether it is a stand-in."""

    entry: Executable
    source: Source = "cache"
    stands_in: bool = False


@dataclass
class _Ghost:
    """An executable that had to go: how often it was asked for since, and must be to come back."""

    wanted: int
    asked: int = 0


class ExecutableProvider:
    """Gets executables for an engine.

    Args:
        cache: Where they are stored.
        name: How messages name the function.
        budget: What may be compiled.
        background: How to compile in the background; None to compile where they are wanted.
        hysteresis: How often an evicted executable must be asked for, where a stand-in would do,
            until it is compiled again, and twice as often each time; 0 to compile it at once.
        compiled: Told of each executable that was compiled, or loaded.
        tell: Told of events.

    Attributes:
        allowance: What may still be compiled.
        workers: Compile in the background; None where nothing does.
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
        self._longest = 0.0  # seconds of a compile in this process
        self._ghosts: OrderedDict[Hashable, _Ghost] = OrderedDict()
        self._beyond_budget: set[Hashable] = set()  # what is not in files either
        self._stand_ins: OrderedDict[Hashable, Mapping[str, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.workers = None if background is None else Workers(background)
        self._may_ask = background is not None and background.process

    def get(self, key: Hashable, request: Callable[[], CompileRequest]) -> Provided:
        """The executable of a key, or a stand-in.

        Args:
            key: The key of the executable.
            request: What to ask for if it is not stored.

        Raises:
            CompileBudgetError: It would have to be compiled, which is not allowed.
            Exception: Whatever compiling raised.
        """
        entry = self._cache.get(key)
        if entry is not None:
            return Provided(entry)
        wanted = request()
        if (stand_in := self._stand_in(wanted)) is not None:
            return Provided(stand_in, stands_in=True)
        return self._obtain(wanted)

    def prepare(
        self,
        request: CompileRequest,
        first_run: bool,
        *,
        beside_calls: bool = False,
        is_asked_for: bool = True,
        may_compile: bool = True,
        epoch: object = None,
    ) -> Source:
        """Compile what an order asks for, if it is not stored.

        Args:
            request: What is wanted.
            first_run: Whether to run it once before anybody gets it; see `run_first`.
            beside_calls: Whether to compile it as in the background, where it stands back.
            is_asked_for: Whether somebody waits for it, who is told of a budget that is spent;
                and it is compiled beyond one that only warns.
            may_compile: Whether to compile it where it is not in files.
            epoch: When the order was made. One from before a `clear` is not filled.

        Returns:
            Where it comes from.

        Raises:
            CompileBudgetError: It may not be compiled.
            Cleared: The order is from before a `clear`.
            Exception: Whatever compiling raised.
        """
        if epoch is not None and epoch is not self.epoch:
            raise Cleared
        if request.key in self._cache:
            return "cache"
        compile = compile_here
        if beside_calls and self._asks:
            compile = functools.partial(self._compile_apart, request)
        return self._obtain(
            request, first_run, compile, is_asked_for, may_compile, is_call=False
        ).source

    def _obtain(
        self,
        request: CompileRequest,
        first_run: bool = False,
        compile: Compile = compile_here,
        is_asked_for: bool = True,
        may_compile: bool = True,
        is_call: bool = True,
    ) -> Provided:
        """The executable of an order: from a file, or compiled; another thread may be first."""
        source: Source = "cache"
        began = False
        told: list[Event] = []

        def tell() -> None:
            while told:  # a listener may ask for the same executable, which is there by now
                self._tell(told.pop(0))

        def build() -> Executable:
            nonlocal source, began
            began = True
            entry = self._load(request)
            source = "file"
            if entry is not None:
                told.append(_event("load", self._name, request, entry))
            else:
                if not may_compile:
                    raise CompileBudgetError(self.allowance.refusal(request))
                entry = self._build(
                    request, self.allowance.spend(request, is_asked_for), compile, told
                )
                source = "compile"
            if first_run and request.program is not None:
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
                tell()  # of what was made, and could not be run
            # That was meant for another thread, which may not compile what this one may.

    def evicted(self, key: tuple[Any, ...], entry: Executable, why: str) -> None:
        """Take note of an executable that has left the cache, and why."""
        if why is not CLEARED:  # else nobody can ask for it again: its program has gone too
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
        """Another one after each `clear`."""
        return self.allowance.spent

    def clear(self) -> None:
        """Forget what was compiled, and what waits to be."""
        with self._lock:
            self._ghosts.clear()
            self._beyond_budget.clear()
            self._stand_ins.clear()
            self.allowance.clear()
        if self.workers is not None:
            self.workers.drop()

    def _load(self, request: CompileRequest) -> Executable | None:
        """The executable from a file, which is no compile and needs no budget."""
        loaded = None if request.kept is None else request.kept.load()
        if loaded is not None:
            self._compiled(loaded)
        return loaded

    @property
    def _asks(self) -> bool:
        """Whether another process compiles what compiles in the background."""
        return self._may_ask and can_start() and only_on_cpu()

    def _compile_apart(self, request: CompileRequest, lowered: jax.stages.Lowered) -> Any:
        """Have another process compile; it may take long where all cores are wanted."""
        ask = functools.partial(pool().compile, _PATIENCE + _PATIENT * self._longest)
        try:
            return compile_elsewhere(ask, lowered)
        except NotElsewhere as error:
            why = f"it compiles in this process: {error}"
            self._tell(Event("process", self._name, request.sizes, detail=why))
        return compile_here(lowered)

    def _build(
        self, request: CompileRequest, spent: Spending, compile: Compile, told: list[Event]
    ) -> Executable:
        if compile is compile_here and self._asks:
            pool().start()  # what compiles here can stand in for others, which come next
        began = time.perf_counter()
        try:
            built = request.build(compile)
        except BaseException:
            with spent.lock:
                spent.compiles -= 1  # nothing came of it; its time is not given back
            raise
        finally:
            with spent.lock:
                spent.seconds += time.perf_counter() - began
        if compile is compile_here:
            self._longest = max(self._longest, built.compile_seconds)
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
        """A stored executable to serve the call by, if that is better than to compile now."""
        kept_out = self._keeps_out(request.mark)
        if not kept_out and (self.workers is None or self.workers.failed(request.mark)):
            return None  # after a failure, whoever compiles it now gets the error
        key = request.stand_in()
        entry = None if key is None else self._cache.get(key)
        if entry is None:
            return None
        if self.workers is not None and not kept_out:
            self._compile_later(request)
        self._tell_stand_in(request, entry)
        return entry

    def _tell_stand_in(self, request: CompileRequest, entry: Executable) -> None:
        """Tell what serves a bucket in its place, once for as long as it does."""
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
        """Whether an executable that was evicted is not worth another one's place yet."""
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
        """Compile it in the background, or load it, which needs no budget."""
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
            if provider is not None:  # else nobody asks for it any more
                provider._prepare_later(request, epoch)

        self.workers.submit(request.mark, work)

    def _prepare_later(self, request: CompileRequest, epoch: object) -> None:
        """See `_compile_later`."""
        try:
            self.prepare(
                request, first_run=True, beside_calls=True, is_asked_for=False, epoch=epoch
            )
        except Cleared:
            pass
        except CompileBudgetError as error:  # no failure: what stands in goes on
            self.allowance.tell_refusal(request, str(error))
            with self._lock:
                self._beyond_budget.add(request.mark)
        except Ended:  # at exit
            raise
        except BaseException as error:
            self._tell(Event("error", self._name, request.sizes, detail=repr(error)))
            raise


class Cleared(Exception):
    """What was asked for is not wanted any more: `ExecutableProvider.clear` came before it."""


def _event(kind: str, name: str, request: CompileRequest, entry: Executable) -> Event:
    detail = "an exact shape" if request.program is None else ""
    return Event(kind, name, entry.sizes, entry.compile_seconds, detail)
