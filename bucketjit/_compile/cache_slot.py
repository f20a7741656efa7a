"""One entry of the cache, with the count of its uses."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Generic, TypeVar

V = TypeVar("V")


class AtomicCount:
    """A count that threads increase without a lock: ``add`` is one C call, which is atomic.

    Attributes:
        add: Adds 1. What it returns has no meaning.
    """

    __slots__ = ("_lock", "_reads", "add")

    def __init__(self) -> None:
        self.add = itertools.count().__next__  # the one way to read it is to draw the next number
        self._reads = 0
        self._lock = threading.Lock()

    def read(self) -> int:
        """How often `add` was called. Reading draws a number too; these are subtracted."""
        with self._lock:
            count = self.add() - self._reads
            self._reads += 1
            return count


class Slot(Generic[V]):
    """The place of one entry in the cache.

    A fast path keeps the slot of its executable, so that a call need not look up the cache. The
    call counts a use by ``uses.add()`` and sets ``last_used``. If ``entry`` is None, the entry has
    left the cache.

    Attributes:
        entry: The entry; None once it has left the cache.
        uses: Hits, those from before `start_again` included.
        last_used: Time of the last use, in seconds (``time.monotonic``).
        weight: Weight of the entry in bytes, counted against ``max_bytes``.
        pinned: Whether it is protected from eviction.
    """

    __slots__ = ("_uses_before", "entry", "last_used", "pinned", "uses", "weight")

    def __init__(self, entry: V, weight: int = 0) -> None:
        self.entry: V | None = entry
        self.uses = AtomicCount()
        self.last_used = time.monotonic()
        self.weight = weight
        self.pinned = False
        self._uses_before = 0  # uses at the last `start_again`

    def hits(self) -> int:
        """Hits since `start_again`."""
        return self.uses.read() - self._uses_before

    def start_again(self) -> None:
        """Count hits from 0. The number of uses that the eviction policy compares stays."""
        self._uses_before = self.uses.read()

    def use(self) -> V | None:
        """Mark the entry as just used and return it."""
        self.last_used = time.monotonic()
        self.uses.add()
        return self.entry
