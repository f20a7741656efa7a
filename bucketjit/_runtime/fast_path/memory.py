"""Remembers calls that took the slow path, so that the fast path serves the next one like them.

It makes the handlers, puts them into dispatch tables, and closes their call counters when they are
dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from bucketjit._arrays.results import Change
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.computed_results import SizesDiffer
from bucketjit._compile.executable import Executable, SignatureChanged
from bucketjit._jax.arrays import NotPlaced, on_default_device
from bucketjit._runtime.call_counts import CallCounter
from bucketjit._runtime.counters import Counters
from bucketjit._runtime.fast_path.bucket_handler import BucketHandler
from bucketjit._runtime.fast_path.dispatch import (
    CallArguments,
    DispatchTable,
    FastPath,
    make_handler,
)
from bucketjit._runtime.fast_path.handler import Evicted, Handler
from bucketjit._runtime.fast_path.layout import arguments_of, host_arguments, layout_of
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._tracing.interface import Interface

_LARGEST_SIZE_CONSTANTS = 4096  # elements that a call keeps on the device for each logical size


class ServedCall(NamedTuple):
    """How a call was served.

    Attributes:
        key: The key of its executable.
        sizes: The first argument of the executable, on the device; None if it runs exact.
        finish: Makes the result of the call from that of the executable, or None.
        line: Counts calls like it.
    """

    key: Any
    sizes: Any
    finish: Change | None
    line: CallCounter


class RememberedCalls:
    """The calls that the fast path serves.

    Args:
        cache: The executables.
        counters: Holds the call counters of the handlers.
        lock: Held while handlers are added or dropped. Looking one up takes no lock.

    Attributes:
        fast_path: Serves whole calls; those of chunks are in `of_chunks`.
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
        self._of_chunks: dict[weakref.ref[Interface], FastPath] = {}

    def clear(self) -> None:
        """Forget all calls. The caller clears the counters: call counters are not closed here."""
        self.fast_path.clear()
        self._of_chunks.clear()

    def forget_all(self) -> None:
        """Forget all calls, so that each one looks for its bucket again; counts are kept."""
        with self._lock:
            every = [self.fast_path, *self._of_chunks.values()]
            self._forget([handler for fast_path in every for handler in fast_path.clear()])

    def serve_otherwise(
        self, table: DispatchTable, first: Handler, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """Serve a call by the handlers after one whose program computed other sizes than presumed.

        The handler that serves the call is the first to be tried for the next one.

        Args:
            table: The table of the handlers.
            first: The handler that was tried.
            args: The positional arguments.
            kwargs: The keyword arguments.

        Returns:
            Whether one of them has served the call, and its result.
        """
        handler = first.next
        while handler is not None:
            try:
                result = handler.serve(args, kwargs)
            except (SizesDiffer, SignatureChanged, NotPlaced):
                handler = handler.next
                continue
            except Evicted:
                break
            with self._lock:
                table.prefer(table.key(args, kwargs), handler)
            return True, result
        return False, None

    def of_chunks(self, program: Interface) -> FastPath:
        """The fast path of the chunks of a program's calls, whose results stay padded."""
        with self._lock:
            for gone in [ref for ref in self._of_chunks if ref() is None]:
                self._forget(self._of_chunks.pop(gone).clear())
            return self._of_chunks.setdefault(weakref.ref(program), FastPath())

    def add(
        self, signed: SignedCall, given: CallArguments, opened: Sequence[int], served: ServedCall
    ) -> Handler | None:
        """Let the next call like this one take the fast path.

        Args:
            signed: The call.
            given: Its arguments as they came.
            opened: Positions of its leaves that have open axes.
            served: How it was served.

        Returns:
            The handler; None if the executable has left the cache, or the arguments have no layout
            (see `layout_of`).
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
            # First, because it sets the clock of the call counter, which the handler holds.
            self._counters.open(served.line)
            # A handler in a fast path of chunks serves them; their results are joined on the host.
            table, gone = given.fast_path.of(layout)
            joined = given.fast_path is not self.fast_path
            handler = make_handler(
                layout,
                slot,
                served.sizes,
                signed.leaves,
                served.finish,
                served.line,
                hosts,
                joined,
            )
            self._keep(given, table, gone, handler)
        return handler

    def add_masked(
        self, signed: SignedCall, given: CallArguments, call: ResolvedCall, served: ServedCall
    ) -> Handler | None:
        """Let the next call like this one, which was masked, skip the slow path; see `add`.

        Its sizes are put on the device once. A call whose size constants are large is not
        remembered: each logical size would keep them there.
        """
        if sum(x.size for x in call.size_constants.values) > _LARGEST_SIZE_CONSTANTS:
            return None
        opened = signed.signature.open_leaves(call.tokens)
        on_device = served._replace(sizes=on_default_device(served.sizes))
        return self.add(signed, given, opened, on_device)

    def add_chunked(
        self, signed: SignedCall, given: CallArguments, opened: Sequence[int], handler: Handler
    ) -> None:
        """Let the next call like this one, which runs in chunks, take the fast path.

        Args:
            signed: The call.
            given: Its arguments as they came.
            opened: Positions of its leaves that have open axes.
            handler: Serves calls like it.
        """
        arguments = arguments_of(signed, given.args, given.kwargs)
        layout = layout_of(signed, opened, given.args, given.kwargs, arguments)
        if layout is None:
            return
        with self._lock:
            # If the fast path was cleared meanwhile, the counters of the chunks are closed, and
            # calls by this handler would not be counted.
            if self._counters.counts(handler.lines):
                self._keep(given, *given.fast_path.of(layout), handler)

    def _keep(
        self, given: CallArguments, table: DispatchTable, gone: list[Handler], handler: Handler
    ) -> None:
        gone += table.remember(given.args, given.kwargs, handler)
        if given.fast_path is not self.fast_path and any(other.is_alive for other in gone):
            # A handler of a chunk was dropped whose counter is closed below. A chunked handler of
            # a whole call may still use it, and its calls would not be counted.
            gone += self.fast_path.clear()
        self._forget(gone)

    def _forget(self, handlers: Sequence[Handler]) -> None:
        for handler in handlers:
            # A chunked handler has no counter: it uses those of the handlers of its chunks.
            if isinstance(handler, BucketHandler):
                self._counters.close(handler.line)
