"""Remembers calls that took the slow path, so that the fast path serves the next one like them.

It makes the handlers, puts them into dispatch tables, and closes their call counters when they are
dropped.
"""

from __future__ import annotations

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

    def forget_all(self) -> None:
        """Forget all calls, so that each one looks for its bucket again; counts are kept."""
        with self._lock:
            self._forget(self.fast_path.clear())

    def serve_otherwise(
        self, table: DispatchTable, first: Handler, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """Serve a call by the handlers after one whose program computed other sizes than presumed.

        The handler that serves the call is the first to be tried for the next one.
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

    def add(
        self, signed: SignedCall, given: CallArguments, opened: Sequence[int], served: ServedCall
    ) -> None:
        """Let the next call like this one take the fast path.

        Nothing is done if the executable has left the cache, or the arguments have no layout (see
        `layout_of`).
        """
        slot = self._cache.slot(served.key)
        if slot is None:
            return
        arguments = arguments_of(signed, given.args, given.kwargs)
        layout = layout_of(signed, opened, given.args, given.kwargs, arguments)
        if layout is None:
            return
        hosts = host_arguments(arguments, opened)
        with self._lock:
            self._counters.open(served.line)
            table, gone = self.fast_path.of(layout)
            handler = make_handler(
                layout,
                slot,
                served.sizes,
                signed.leaves,
                served.finish,
                served.line,
                hosts,
            )
            self._forget([*gone, *table.remember(given.args, given.kwargs, handler)])

    def add_masked(
        self, signed: SignedCall, given: CallArguments, call: ResolvedCall, served: ServedCall
    ) -> None:
        """Let the next call like this one, which was masked, skip the slow path; see `add`.

        Its sizes are put on the device once. A call whose size constants are large is not
        remembered: each logical size would keep them there.
        """
        if sum(x.size for x in call.size_constants.values) > _LARGEST_SIZE_CONSTANTS:
            return
        opened = signed.signature.open_leaves(call.tokens)
        on_device = served._replace(sizes=on_default_device(served.sizes))
        self.add(signed, given, opened, on_device)

    def _forget(self, handlers: Sequence[Handler]) -> None:
        for handler in handlers:
            self._counters.close(handler.line)
