"""Which calls the fast path serves: a call that took the slow path is remembered with its way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from bucketjit._arrays.results import Change
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.executable import Executable
from bucketjit._runtime.counters import Counters, Line
from bucketjit._runtime.fast_path.handler import Way
from bucketjit._runtime.fast_path.layout import arguments_of, host_arguments, layout_of
from bucketjit._runtime.fast_path.plan import Plan
from bucketjit._runtime.fast_path.route import Given, Route, Routes, make_plan
from bucketjit._signature.signer import Signed
from bucketjit._tracing.program import Program


class Served(NamedTuple):
    """How a call was served.

    Attributes:
        key: The key of its executable.
        sizes: What the executable takes before the arguments, on the device; None at exact shapes.
        finish: What is done to the result; None if nothing.
        line: Counts calls like it.
        note: Told of each call like it; None if nobody is.
    """

    key: Any
    sizes: Any
    finish: Change | None
    line: Line
    note: Callable[[], None] | None = None


class Memory:
    """The calls that the fast path serves.

    Args:
        cache: The executables.
        counters: Counts calls.
        lock: Held while a way is added or forgotten.

    Attributes:
        routes: The ways to serve whole calls.
    """

    def __init__(
        self,
        cache: ExecutableCache[Any, Executable],
        counters: Counters,
        lock: AbstractContextManager[Any],
    ) -> None:
        self.routes = Routes()
        self._cache = cache
        self._counters = counters
        self._lock = lock
        self._of_chunks: dict[weakref.ref[Program], Routes] = {}

    def clear(self) -> None:
        """Forget all calls; the counters are cleared, too."""
        self.routes.clear()
        self._of_chunks.clear()

    def forget_all(self) -> None:
        """Let every call look for its bucket anew."""
        with self._lock:
            every = [self.routes, *self._of_chunks.values()]
            self._forget([way for routes in every for way in routes.clear()])

    def of_chunks(self, program: Program) -> Routes:
        """The ways to serve the chunks of the calls of a program, whose results are padded."""
        with self._lock:
            for gone in [ref for ref in self._of_chunks if ref() is None]:
                self._forget(self._of_chunks.pop(gone).clear())
            return self._of_chunks.setdefault(weakref.ref(program), Routes())

    def add(
        self, signed: Signed, given: Given, opened: Sequence[int], served: Served
    ) -> Way | None:
        """Let the next call like this one skip the slow path.

        Args:
            signed: The call.
            given: Its arguments as they came.
            opened: Its leaves that have open axes.
            served: How it was served.

        Returns:
            The way that calls like it take; None if there is none.
        """
        slot = self._cache.slot(served.key)
        if slot is None:
            return None
        arguments = arguments_of(signed, given.args, given.kwargs)
        layout = layout_of(signed, opened, given.args, given.kwargs, arguments)
        if layout is None:
            return None
        hosts = host_arguments(arguments, opened)
        with self._lock:
            self._counters.open(served.line)
            route, gone = given.routes.of(layout)
            joined = given.routes is not self.routes
            plan = make_plan(
                layout,
                slot,
                served.sizes,
                signed.leaves,
                served.finish,
                served.line,
                served.note,
                hosts,
                joined,
            )
            self._keep(given, route, gone, plan)
        return plan

    def add_chunked(self, signed: Signed, given: Given, opened: Sequence[int], way: Way) -> None:
        """Let the next call like this one, which runs in chunks, skip the slow path."""
        arguments = arguments_of(signed, given.args, given.kwargs)
        layout = layout_of(signed, opened, given.args, given.kwargs, arguments)
        if layout is None:
            return
        with self._lock:
            # Who cleared the routes meanwhile does not count its chunks any more.
            if self._counters.counts(way.lines):
                self._keep(given, *given.routes.of(layout), way)

    def _keep(self, given: Given, route: Route, gone: list[Way], way: Way) -> None:
        gone += route.remember(given.args, given.kwargs, way)
        if given.routes is not self.routes and any(other.is_alive for other in gone):
            gone += self.routes.clear()  # they may lead to chunks that are not counted any more
        self._forget(gone)

    def _forget(self, ways: Sequence[Way]) -> None:
        for way in ways:
            if isinstance(way, Plan):  # the chunks of others count for themselves
                self._counters.close(way.line)
