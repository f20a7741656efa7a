"""One entry of the cache, with the count of its users."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Generic, TypeVar

V = TypeVar("V")


class AtomicCount:
    """A count that threads add to without a lock: ``add`` is one C call, which is atomic."""

    __slots__ = ("_lock", "_reads", "add")

    def __init__(self) -> None:
        self.add = itertools.count().__next__
        self._reads = 0
        self._lock = threading.Lock()

    def read(self) -> int:
        """How often `add` was called. Reading draws a number too, so reads are taken off."""
        with self._lock:
            count = self.add() - self._reads
            self._reads += 1
            return count


class Slot(Generic[V]):
    """The place of one entry in the cache.

    Whoever serves calls by one keeps it, and need not ask the cache: a use is ``uses.add()`` and
    a new ``last_used``, and an ``entry`` of None says that it has left.

    Attributes:
        entry: What is stored; None once it has left the cache.
        uses: Hits.
        last_used: When that was (``time.monotonic``).
        weight: What it counts for the bound in bytes.
        pinned: Whether eviction passes it over.
    """

    __slots__ = ("_uses_before", "entry", "last_used", "pinned", "uses", "weight")

    def __init__(self, entry: V, weight: int = 0) -> None:
        self.entry: V | None = entry
        self.uses = AtomicCount()
        self.last_used = time.monotonic()
        self.weight = weight
        self.pinned = False
        self._uses_before = 0

    def hits(self) -> int:
        """Uses since the counters started."""
        return self.uses.read() - self._uses_before

    def start_again(self) -> None:
        """Count hits from zero; what the eviction policy looks at stays."""
        self._uses_before = self.uses.read()

    def use(self) -> V | None:
        """The entry, marked as just used."""
        self.last_used = time.monotonic()
        self.uses.add()
        return self.entry
