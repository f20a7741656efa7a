"""Remembers calls that took the slow path, so that the fast path serves the next one like them.

It makes the handlers, puts them into dispatch tables, and closes their call counters when they are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from bucketjit._compile.cache import ExecutableCache, Slot
from bucketjit._compile.executable import Executable
from bucketjit._runtime.counters import Counters
from bucketjit._runtime.fast_path import dispatch
from bucketjit._runtime.fast_path.bucket_handler import Handler, Where
from bucketjit._runtime.fast_path.layout import Leaves, kind_of, layout_of, other_sizes
from bucketjit._tracing.call import Call

_MOST_KINDS = 64  # of calls that differ in sizes alone, in one table; at that many all are dropped

_LARGEST_SIZE_CONSTANTS = 4096  # elements that a call keeps on the device for each logical size


class RememberedCalls:
    """The calls that ``fast_path`` serves."""

    def __init__(
        self,
        cache: ExecutableCache[Any, Executable],
        counters: Counters,
        lock: AbstractContextManager[Any],
    ) -> None:
        self.fast_path = dispatch.FastPath()
        self._cache = cache
        self._counters = counters
        self._lock = lock

    def clear(self) -> None:
        """Forget all calls. The caller clears the counters: call counters are not closed here."""
        self.fast_path.clear()

    def add(
        self,
        call: Call,
        arguments: dispatch.Arguments,
        opened: Sequence[int],
        served: dispatch.ServedCall,
        same_up_to: tuple[int, ...] | None = None,
    ) -> None:
        """Let the next call like this one take the fast path, if it has a layout.

        A masked call has its sizes on the device. With large size constants it is not remembered:
        each logical size would keep them there. Calls from its sizes up to ``same_up_to`` have the
        same bucket, so the first one of them is served likewise.
        """
        constants = call.size_constants.values if served.sizes is not None else ()
        if sum(x.size for x in constants) > _LARGEST_SIZE_CONSTANTS:
            return
        slot, read = self._cache.slot(served.key), layout_of(call, opened, *arguments)
        if slot is None or read is None:
            return
        layout, hosts = read
        with self._lock:
            table, gone = self.fast_path.of(layout, *arguments)
            self._forget(gone)
            leaves = {i: call.leaves[i] for i in opened}
            self._remember(table, arguments, slot, served, leaves, hosts)
            kind = None if same_up_to is None else kind_of(layout, *arguments)
            if same_up_to is None or kind is None:
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
        table: dispatch.DispatchTable,
        arguments: dispatch.Arguments,
        slot: Slot[Executable],
        served: dispatch.ServedCall,
        leaves: Leaves,
        hosts: Sequence[Where],
    ) -> Handler:
        """Make the handler of a call and put it into its table. The lock is held."""
        self._counters.open(served.line)
        handler = dispatch.make_handler(table.layout, slot, leaves, hosts, served)
        self._forget(table.remember(*arguments, handler))
        return handler

    def at_new_sizes(
        self,
        arguments: dispatch.Arguments,
        serving: Callable[[Any, Executable, Call], dispatch.ServedCall],
    ) -> Handler | None:
        """The handler of a call of other sizes; None if its bucket is not compiled."""
        if (likes := self.fast_path.other_sizes(*arguments)) is None:
            return None
        table, others, leaves = likes
        if (new := others.call_with(leaves)) is None:
            return None
        call, key, slot = new
        if (entry := slot.entry) is None:
            return None
        served = serving(key, entry, call)
        with self._lock:
            return self._remember(table, arguments, slot, served, leaves, others.hosts)

    def _forget(self, handlers: Sequence[Handler]) -> None:
        for handler in handlers:
            self._counters.close(handler.line)
