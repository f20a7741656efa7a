"""Remembers calls that took the slow path, so that the fast path serves the next one like them.

It makes the handlers, puts them into dispatch tables, and closes their call counters when they are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from bucketjit._arrays.results import Change
from bucketjit._compile.cache import ExecutableCache, Slot
from bucketjit._compile.executable import Executable
from bucketjit._runtime.counters import CallCounter, Counters
from bucketjit._runtime.fast_path.bucket_handler import Clock, Handler, Where
from bucketjit._runtime.fast_path.dispatch import (
    CallArguments,
    DispatchTable,
    FastPath,
    make_handler,
)
from bucketjit._runtime.fast_path.layout import Leaves, kind_of, layout_of, other_sizes
from bucketjit._tracing.call import Call

_MOST_KINDS = 64  # of calls that differ in sizes alone, in one table; at that many all are dropped

_LARGEST_SIZE_CONSTANTS = 4096  # elements that a call keeps on the device for each logical size


class ServedCall(NamedTuple):
    """How a call was served.

    Attributes:
        key: The key of its executable.
        sizes: The first argument of the executable, on the device; None if it runs exact.
        finish: Makes the result of the call from that of the executable, or None.
        line: Counts calls like it.
        clock: Tells when such a call has to take the slow path again; None for never.
    """

    key: Any
    sizes: Any
    finish: Change | None
    line: CallCounter
    clock: Clock | None = None


class RememberedCalls:
    """The calls that the fast path serves.

    Attributes:
        fast_path: Serves them.
    """

    def __init__(
        self,
        cache: ExecutableCache[Any, Executable],
        counters: Counters,
        lock: AbstractContextManager[Any],
    ) -> None:
        self.fast_path = FastPath()
        self._cache = cache
        self._counters = counters
        self._lock = lock

    def clear(self) -> None:
        """Forget all calls. The caller clears the counters: call counters are not closed here."""
        self.fast_path.clear()

    def add(
        self,
        call: Call,
        given: CallArguments,
        opened: Sequence[int],
        served: ServedCall,
        same_up_to: tuple[int, ...] | None = None,
    ) -> None:
        """Let the next call like this one take the fast path.

        Nothing is done if the executable has left the cache, or the arguments have no layout (see
        `layout_of`).
        """
        slot = self._cache.slot(served.key)
        if slot is None:
            return
        read = layout_of(call, opened, given.args, given.kwargs)
        if read is None:
            return
        layout, hosts = read
        with self._lock:
            table, gone = self.fast_path.of(layout, given.args, given.kwargs)
            self._forget(gone)
            leaves = {i: call.leaves[i] for i in opened}
            self._remember(table, given, slot, served, leaves, hosts)
            if same_up_to is None:
                return
            kind = kind_of(layout, given.args, given.kwargs)
            if kind is None:
                return
            others = table.others.get(kind[0])
            if others is None or not others.holds(call, served.clock):
                others = other_sizes(call, hosts, served.clock)
            if others is None:
                return
            others.learn(call.ordered, same_up_to, served.key, slot)
            if len(table.others) >= _MOST_KINDS:
                table.others.clear()
            table.others[kind[0]] = others

    def _remember(
        self,
        table: DispatchTable,
        given: CallArguments,
        slot: Slot[Executable],
        served: ServedCall,
        leaves: Leaves,
        hosts: Sequence[Where],
    ) -> Handler:
        """Make the handler of a call and put it into its table. The lock is held."""
        self._counters.open(served.line)
        parts = table.layout, slot, served.sizes, leaves, served.finish, served.line, hosts
        handler = make_handler(*parts, served.clock)
        self._forget(table.remember(given.args, given.kwargs, handler))
        return handler

    def at_new_sizes(
        self, given: CallArguments, serving: Callable[[Any, Executable, Call], ServedCall]
    ) -> Handler | None:
        """The handler of a call that differs from an earlier one in sizes alone.

        None if its bucket is not compiled. ``serving`` says how an executable serves a call.
        """
        if (likes := self.fast_path.other_sizes(given.args, given.kwargs)) is None:
            return None
        table, others, leaves = likes
        if (new := others.call_with(leaves)) is None:
            return None
        call, key, slot = new
        if (entry := slot.entry) is None:
            return None
        served = serving(key, entry, call)
        with self._lock:
            return self._remember(table, given, slot, served, leaves, others.hosts)

    def add_masked(
        self,
        call: Call,
        given: CallArguments,
        served: ServedCall,
        same_up_to: tuple[int, ...] | None = None,
    ) -> None:
        """Let the next call like this one, which was masked, skip the slow path; see `add`.

        Its sizes are on the device. A call whose size constants are large is not remembered: each
        logical size would keep them there. Calls of the sizes from here to
        ``same_up_to`` have the same bucket, so the first one of them is served likewise.
        """
        if sum(x.size for x in call.size_constants.values) > _LARGEST_SIZE_CONSTANTS:
            return
        opened = call.signature.open_leaves(call.tokens)
        self.add(call, given, opened, served, same_up_to)

    def _forget(self, handlers: Sequence[Handler]) -> None:
        for handler in handlers:
            self._counters.close(handler.line)
