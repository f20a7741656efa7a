"""What an engine is made of: what it shares with derivatives, and where programs come from.

`bucketjit._runtime.engine` gets them from a traced function, `bucketjit._artifact.saved_engine`
from a file, and `bucketjit._stages.compiled` from what was compiled ahead of calls.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from bucketjit._compile.budget import Allowance
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.executable import Executable
from bucketjit._compile.provider import ExecutableProvider
from bucketjit._compile.requests import Requests
from bucketjit._config import Config
from bucketjit._events import Event, emit
from bucketjit._ir.interface import Interface
from bucketjit._runtime.buckets import Buckets, ChoosesBuckets
from bucketjit._runtime.counters import Counters
from bucketjit._tracing.signer import Signer


def alive(engines: weakref.WeakKeyDictionary[Any, None]) -> list[Any]:
    """The engines that exist now; other threads may add some meanwhile."""
    return [engine for reference in engines.keyrefs() if (engine := reference()) is not None]


class SharedState:
    """Cache, provider and counters of a function and its derivatives; it keeps no engine alive."""

    def __init__(self, config: Config, name: str, counters: Counters | None = None) -> None:
        self.counters = counters = counters or Counters()
        self.engines: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        engines = self.engines
        tell = functools.partial(emit, listeners=config.listeners)
        allowance = Allowance(name, config.budget, tell)

        # The cache holds these functions, so none of them holds the cache, the provider or `self`:
        # without a cycle, a bucketed function that is dropped frees its executables at once.

        def evicted(key: Any, entry: Executable, why: str) -> None:
            if isinstance(key[0], Interface):  # a signature, if the shape is exact
                for engine in alive(engines):
                    of_rows = entry.rows is not None
                    learning = engine.buckets.learning(key[0], of_rows=of_rows)
                    if learning is not None:
                        with engine.lock:
                            learning.gone(key[1][1:] if of_rows else key[1])
                    engine.signer.release(key[0])
            tell(Event("evict", name, entry.sizes, detail=why))

        def compiled(entry: Executable) -> None:
            counters.built(entry.compile_seconds, entry.loaded)
            entry.on_compile = again

        def again(entry: Executable) -> None:
            counters.built(0.0)  # jit has compiled it by itself; how long that took is not known
            allowance.compiled_again(entry)

        self.cache: ExecutableCache[Any, Executable] = ExecutableCache(
            config.maxsize,
            max_bytes=config.max_bytes,
            weigh=None if config.max_bytes is None else lambda entry: entry.nbytes,
            on_evict=evicted,
            on_change=functools.partial(counters.history.settle, but="counts"),
        )
        self.provider = ExecutableProvider(
            self.cache, name, allowance, config.background, compiled, tell
        )

    def clear(self) -> None:
        """Drop every executable and engine, and reset the counters."""
        self.counters.clear()
        self.provider.clear()
        self.cache.clear()
        self.engines.clear()


class Parts(NamedTuple):
    """What makes the parts of an engine that know where its programs come from."""

    signer: Callable[[Config], Signer] = Signer
    requests: Callable[..., Requests] = Requests
    buckets: Callable[..., ChoosesBuckets] = Buckets
    lock: Callable[[], AbstractContextManager[Any]] = threading.RLock


TRACED = Parts()
"""The parts of an engine that traces its function."""
