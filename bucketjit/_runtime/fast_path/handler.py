"""The types of the fast path: `Handler`, which serves calls of one set of shapes, and its parts.

`BucketHandler` serves in one bucket, `ChunkedHandler` (`bucketjit._runtime.chunks`) in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from bucketjit._compile.cache_slot import Slot
from bucketjit._compile.executable import Executable
from bucketjit._runtime.call_counts import CallCounter

Where = int | str  # position or name of an argument

Prepared = tuple[Sequence[Any], Mapping[str, Any]]  # arguments as the executable takes them

Prepare = Callable[[Sequence[Any], Mapping[str, Any]], Prepared]  # of the arguments of a call

After = Callable[[Sequence[Any], Mapping[str, Any]], None]  # called when the executable has run

Serve = Callable[[Sequence[Any], Mapping[str, Any]], Any]  # from arguments to the result


class Evicted(Exception):
    """The executable of a handler has left the cache; the call takes the slow path."""


class Handler(Protocol):
    """Serves calls with one set of shapes, in one bucket or in chunks.

    Attributes:
        next: The handler to try if this one does not fit the call; None if it is the last.
        is_alive: Whether all its executables are in the cache.
        slots: The slots of its executables in the cache.
        lines: The call counters.
        serve: Serves a call. Raises `Evicted` if an executable has left the cache, and
            `SignatureChanged` if an argument without open axes differs from what the executable
            was built for. Raises `NotPlaced` if a padded array cannot be placed on the devices.
    """

    next: Handler | None

    @property
    def is_alive(self) -> bool: ...

    @property
    def slots(self) -> tuple[Slot[Executable], ...]: ...

    @property
    def lines(self) -> tuple[CallCounter, ...]: ...

    @property
    def serve(self) -> Serve: ...
