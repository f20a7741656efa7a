"""Which calls the fast path serves: a call that took the slow path is remembered with its way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from bucketjit._arrays.results import Change
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.executable import Executable
from bucketjit._jax.arrays import on_default_device
from bucketjit._runtime.counters import CallCounter, Counters
from bucketjit._runtime.fast_path.bucket_handler import BucketHandler
from bucketjit._runtime.fast_path.dispatch import (
    CallArguments,
    DispatchTable,
    FastPath,
    make_handler,
)
from bucketjit._runtime.fast_path.handler import Handler
from bucketjit._runtime.fast_path.layout import arguments_of, host_arguments, layout_of
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._tracing.program import Program

_LARGEST_SIZE_CONSTANTS = 4096  # elements that a call keeps on the device for each logical size


class ServedCall(NamedTuple):
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
    line: CallCounter
    note: Callable[[], None] | None = None


class RememberedCalls:
    """The calls that the fast path serves.

    Args:
        cache: The executables.
        counters: Counts calls.
        lock: Held while a way is added or forgotten.

    Attributes:
        fast_path: The ways to serve whole calls.
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
        self._of_chunks: dict[weakref.ref[Program], FastPath] = {}

    def clear(self) -> None:
        """Forget all calls; the counters are cleared, too."""
        self.fast_path.clear()
        self._of_chunks.clear()

    def forget_all(self) -> None:
        """Let every call look for its bucket anew."""
        with self._lock:
            every = [self.fast_path, *self._of_chunks.values()]
            self._forget([handler for fast_path in every for handler in fast_path.clear()])

    def of_chunks(self, program: Program) -> FastPath:
        """The ways to serve the chunks of the calls of a program, whose results are padded."""
        with self._lock:
            for gone in [ref for ref in self._of_chunks if ref() is None]:
                self._forget(self._of_chunks.pop(gone).clear())
            return self._of_chunks.setdefault(weakref.ref(program), FastPath())

    def add(
        self, signed: SignedCall, given: CallArguments, opened: Sequence[int], served: ServedCall
    ) -> Handler | None:
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
            table, gone = given.fast_path.of(layout)
            joined = given.fast_path is not self.fast_path
            plan = make_handler(
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
            self._keep(given, table, gone, plan)
        return plan

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
        """Let the next call like this one, which runs in chunks, skip the slow path."""
        arguments = arguments_of(signed, given.args, given.kwargs)
        layout = layout_of(signed, opened, given.args, given.kwargs, arguments)
        if layout is None:
            return
        with self._lock:
            # Who cleared the fast_path meanwhile does not count its chunks any more.
            if self._counters.counts(handler.lines):
                self._keep(given, *given.fast_path.of(layout), handler)

    def _keep(
        self, given: CallArguments, table: DispatchTable, gone: list[Handler], handler: Handler
    ) -> None:
        gone += table.remember(given.args, given.kwargs, handler)
        if given.fast_path is not self.fast_path and any(other.is_alive for other in gone):
            gone += self.fast_path.clear()  # they may lead to chunks that are not counted any more
        self._forget(gone)

    def _forget(self, handlers: Sequence[Handler]) -> None:
        for handler in handlers:
            if isinstance(handler, BucketHandler):  # the chunks of others count for themselves
                self._counters.close(handler.line)
