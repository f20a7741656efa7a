"""A bounded cache of executables that compiles each key once, however many threads ask for it.

It knows hashable keys and a ``compile`` callable, and nothing of what is compiled.
"""

from __future__ import annotations

import itertools
import math
import reprlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")

K = TypeVar("K", bound=Hashable)

_GONE = 256  # slots that have left and are still read: calls under way may count a use


class AtomicCount:
    """A count that threads increase without a lock: ``add`` is one C call, which is atomic."""

    __slots__ = ("_lock", "_not_counted", "add")

    def __init__(self) -> None:
        self.add = itertools.count().__next__  # the one way to read it is to draw the next number
        self._not_counted = 0  # draws by `read`, and all from before `reset`
        self._lock = threading.Lock()

    def read(self) -> int:
        """How often `add` was called since the last `reset`."""
        with self._lock:
            count = self.add() - self._not_counted
            self._not_counted += 1
            return count

    def reset(self) -> None:
        with self._lock:
            self._not_counted = self.add() + 1


class Slot(Generic[V]):
    """The place of one entry in the cache.

    A fast path keeps the slot of its executable, so that a call need not look up the cache. The
    call counts a use by ``uses.add()`` and sets ``last_used``.

    Attributes:
        entry: The entry; None once it has left the cache.
        uses: Hits.
        last_used: Time of the last use, in seconds (``time.monotonic``).
        weight: Weight of the entry in bytes, counted against ``max_bytes``.
        pinned: Whether it is protected from eviction.
    """

    __slots__ = ("entry", "last_used", "pinned", "uses", "weight")

    def __init__(self, entry: V, weight: int = 0) -> None:
        self.entry: V | None = entry
        self.uses = AtomicCount()
        self.last_used = time.monotonic()
        self.weight = weight
        self.pinned = False

    def told(self) -> tuple[int, float]:
        """Hits, and the time of the last use."""
        return self.uses.read(), self.last_used

    def use(self) -> V | None:
        self.last_used = time.monotonic()
        self.uses.add()
        return self.entry


class CacheInfo(NamedTuple):
    """The numbers of a cache, with the fields of :func:`functools.lru_cache`'s.

    Attributes:
        hits: Requests that an entry served without a compile.
        misses: Requests that compiled.
        maxsize: The most entries; None for no limit.
        currsize: How many entries there are.
    """

    hits: int
    misses: int
    maxsize: int | None
    currsize: int


class _Flight(Generic[V]):
    """One compile under way.

    No `Future`: it is entered by Python code, and an interrupt may leave that with a lock held.

    Attributes:
        owner: The thread that compiles.
        landed: The owner holds it until the compile is done.
        result: The slot and the entry; None if the compile failed.
        error: Why it failed; None after an interrupt, which is for the owner only.
    """

    __slots__ = ("error", "landed", "owner", "result")

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.landed = threading.Lock()
        self.result: tuple[Slot[V], V] | None = None
        self.error: Exception | None = None


class ExecutableCache(Generic[K, V]):
    """A thread-safe cache that evicts the least recently used entry when it is full.

    However many threads ask for one key, it is compiled once and all of them get that entry.
    Different keys compile at the same time: no lock is held during a compile, so a ``compile``
    may itself ask the cache for other keys.

    A *miss* is a request that had to compile. A *hit* is a request that got an entry without
    compiling, stored or from another thread's compile.

    Args:
        maxsize: The most entries to keep; None for no limit. Pinned entries count, but are never
            evicted, and neither is the entry that was just added: if all others are pinned, there
            is one entry more.
        max_bytes: The most that entries may weigh together, in bytes; None for no limit. A single
            entry that weighs more is kept alone.
        weigh: Returns the weight of an entry in bytes.
        on_change: Called without the lock before anything changes that the looking methods tell.
        on_evict: Called as ``on_evict(key, entry, why)`` for every entry that leaves the cache. It
            runs without the lock, in the thread that made the entry leave, after the cache is
            consistent again. What it raises is raised to that thread's caller.

    Examples:
        >>> cache = ExecutableCache(maxsize=2)
        >>> cache.get_or_compile("a", lambda: "A")
        'A'
        >>> cache.get("a"), cache.get("b")
        ('A', None)
        >>> cache.info()
        CacheInfo(hits=1, misses=1, maxsize=2, currsize=1)
    """

    def __init__(
        self,
        maxsize: int | None,
        *,
        max_bytes: int | None = None,
        weigh: Callable[[V], int] | None = None,
        on_evict: Callable[[K, V, str], object] | None = None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        self._maxsize = maxsize
        self._max_bytes = max_bytes
        self._weigh = weigh
        self._on_evict = on_evict
        self._on_change = on_change
        self._lock = threading.Lock()
        # No `cachetools.LRUCache`, which learns of a use by a look-up. The warm path looks nothing
        # up: it marks the slot that it holds.
        self._slots: dict[K, Slot[V]] = {}
        self._flights: dict[K, _Flight[V]] = {}
        self._gone: deque[Slot[V]] = deque()
        self._hits = 0  # of the slots that are no longer read
        self.misses = 0
        self.evictions = 0

    def get(self, key: K) -> V | None:
        self._on_change()
        with self._lock:
            slot = self._slots.get(key)
            return None if slot is None else slot.use()

    def get_or_compile(self, key: K, compile: Callable[[], V], is_use: bool = True) -> V:
        """Return the entry of a key, compiled if it is not stored.

        If another thread is compiling the key, wait for it and return its entry, or raise its
        exception. A failed compile stores and counts nothing: the next request compiles again. An
        interrupt (``KeyboardInterrupt``, ``SystemExit``) is raised only in the thread that it hits;
        another thread that waits then compiles instead.
        """
        self._on_change()
        attempt = flight = _Flight[V]()
        evicted: list[tuple[K, V, str]] = []
        try:
            with attempt.landed:
                try:
                    while True:
                        with self._lock:
                            slot = self._slots.get(key)
                            if slot is not None:
                                entry = slot.use() if is_use else slot.entry
                                assert entry is not None  # it leaves the slot and the table at once
                                return entry
                            flight = self._flights.setdefault(key, attempt)
                        if flight is attempt:
                            entry = compile()
                            self._store(key, attempt, entry, evicted)
                            return entry
                        if flight.owner == attempt.owner:
                            raise RuntimeError(
                                f"compiling {reprlib.repr(key)} needs its own result: the compile "
                                "asked the cache for the very key that is being compiled"
                            )
                        with flight.landed:
                            pass
                        if flight.error is not None:
                            raise flight.error
                        if flight.result is not None:  # else it was interrupted: compile here
                            slot, entry = flight.result
                            if is_use:
                                slot.uses.add()
                            return entry
                except BaseException as error:
                    with self._lock:
                        if self._flights.get(key) is attempt:
                            del self._flights[key]
                    if isinstance(error, Exception):
                        attempt.error = error
                    raise
        finally:
            # Else there is a cycle: a flight holds an error, whose traceback holds this frame.
            del attempt, flight
            self._tell(evicted)

    def _store(self, key: K, flight: _Flight[V], entry: V, evicted: list[tuple[K, V, str]]) -> None:
        """Store the entry of a flight, unless `clear` came meanwhile."""
        self._on_change()
        with self._lock:
            self.misses += 1
            slot = Slot(entry, 0 if self._weigh is None else self._weigh(entry))
            if self._flights.get(key) is flight:
                self._make_room(slot.weight, evicted)
                self._slots[key] = slot
                del self._flights[key]
            else:
                self._take_out(slot)
            flight.result = slot, entry

    def _make_room(self, weight: int, evicted: list[tuple[K, V, str]]) -> None:
        """Evict entries until one more of this weight fits. Pinned ones stay, fit or not."""
        most = math.inf if self._maxsize is None else self._maxsize
        heaviest = math.inf if self._max_bytes is None else self._max_bytes
        while True:
            total = sum(slot.weight for slot in self._slots.values())
            if not (full := len(self._slots) >= most) and total + weight <= heaviest:
                return
            loose = [(slot.last_used, key) for key, slot in self._slots.items() if not slot.pinned]
            if not loose:
                return
            _, key = min(loose, key=lambda item: item[0])
            bound = f"maxsize={most}" if full else f"max_bytes={heaviest}"
            why = f"the least recently used, for want of room ({bound})"
            evicted.append((key, self._take_out(self._slots.pop(key)), why))
            self.evictions += 1

    def _take_out(self, slot: Slot[V]) -> V:
        """Empty a slot that is not stored any more.

        Fast paths that hold the slot see that it is empty. A call under way may still count a use,
        so its uses are added to the hits only when `_GONE` others have left later.
        """
        entry, slot.entry = slot.entry, None
        assert entry is not None
        self._gone.append(slot)
        if len(self._gone) > _GONE:
            self._hits += self._gone.popleft().uses.read()
        return entry

    def _tell(self, entries: list[tuple[K, V, str]]) -> None:
        """Call ``on_evict`` for each entry; without the lock, as it may call the cache."""
        if self._on_evict is not None:
            for item in entries:
                self._on_evict(*item)

    def clear(self) -> None:
        """Remove all entries and set the counters to 0.

        Compiles under way continue for the threads that wait for them, but their entries are not
        stored, and the next request compiles again: no entry from before a clear appears after it.
        """
        with self._lock:
            left = [(k, self._take_out(slot), "cleared") for k, slot in self._slots.items()]
            self._slots.clear()
            self._flights.clear()
            self._gone.clear()
            self._hits = self.misses = self.evictions = 0
        self._tell(left)

    def reset_counts(self) -> None:
        """Set the counters to 0. The entries stay."""
        with self._lock:
            for slot in (*self._gone, *self._slots.values()):
                slot.uses.reset()
            self._hits = self.misses = self.evictions = 0

    def pin(self, key: K, pinned: bool = True) -> bool:
        """Protect an entry from eviction, or end the protection."""
        self._on_change()
        slot = self.slot(key)
        if slot is not None:
            slot.pinned = pinned
        return slot is not None

    # --- looking: nothing is counted or marked as used ---

    def slot(self, key: K) -> Slot[V] | None:
        with self._lock:
            return self._slots.get(key)

    def slots(self) -> list[tuple[K, Slot[V]]]:
        """The stored keys and their slots, a snapshot in the order of their compiles."""
        with self._lock:
            return list(self._slots.items())

    def items(self) -> list[tuple[K, V]]:
        return [(key, slot.entry) for key, slot in self.slots() if slot.entry is not None]

    def __contains__(self, key: K) -> bool:
        return self.slot(key) is not None

    def __len__(self) -> int:
        return len(self._slots)

    def info(self, count: Callable[[Slot[V]], tuple[int, float]] = Slot.told) -> CacheInfo:
        """Hits, misses, maxsize and currsize, all read at one moment."""
        with self._lock:
            hits = self._hits + sum(count(s)[0] for s in (*self._gone, *self._slots.values()))
            return CacheInfo(hits, self.misses, self._maxsize, len(self._slots))
