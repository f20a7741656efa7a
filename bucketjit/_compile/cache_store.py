"""The entries of a cache: how many there may be, which one leaves first, and the counters.

`bucketjit._compile.cache` adds compiling, `bucketjit._compile.cache_slot` is one entry.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from cachetools import Cache

from bucketjit._compile.cache_slot import AtomicCount, Slot

V = TypeVar("V")

K = TypeVar("K", bound=Hashable)

CLEARED = "cleared"  # why all entries left

_RETIRED = 256  # evicted entries whose use counts are still read: calls under way may add to them

_GOES_FIRST = {"lru": "least recently used", "lfu": "least frequently used"}

POLICIES = tuple(_GOES_FIRST)


class _Store(Cache[K, Slot[V]]):
    """The slots by key. `popitem` removes the one that the policy names, and never a pinned one.

    `cachetools.LRUCache` and the like learn of a use by a look-up. The warm path looks nothing up:
    it marks the slot that it holds.
    """

    def __init__(self, maxsize: float, policy: str) -> None:
        super().__init__(maxsize)
        self._policy = policy

    def popitem(self) -> tuple[K, Slot[V]]:
        """Remove the entry that is worth least."""
        loose = [key for key, slot in self.items() if not slot.pinned]
        if not loose:
            raise KeyError("everything is pinned")
        key = min(loose, key=self._worth)
        return key, self.pop(key)

    def _worth(self, key: K) -> tuple[float, ...]:
        """The worth of an entry: the number of uses if the policy is "lfu", then the last use."""
        slot = self[key]
        uses = (slot.uses.read(),) if self._policy == "lfu" else ()
        return (*uses, slot.last_used)

    @property
    def weight(self) -> int:
        """The weight of all entries, in bytes."""
        return sum(slot.weight for slot in self.values())


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


class CacheStore(Generic[K, V]):
    """The entries of a cache; see `bucketjit._compile.cache.ExecutableCache` for the arguments."""

    def __init__(
        self,
        maxsize: int | None,
        *,
        max_bytes: int | None = None,
        policy: str = "lru",
        weigh: Callable[[V], int] | None = None,
        on_evict: Callable[[K, V, str], object] | None = None,
    ) -> None:
        for name, bound in (("maxsize", maxsize), ("max_bytes", max_bytes)):
            if bound is None:
                continue
            if isinstance(bound, bool) or not isinstance(bound, int):
                raise TypeError(
                    f"{name} must be a positive int or None, not {bound!r} ({type(bound).__name__})"
                )
            if bound < 1:
                raise ValueError(f"{name} must be a positive int or None, not {bound}")
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, not {policy!r}")
        self._maxsize = maxsize
        self._max_bytes = max_bytes
        self._policy = policy
        self._weigh = weigh
        self._on_evict = on_evict
        self._lock = threading.Lock()
        self._slots: _Store[K, V] = _Store(math.inf, policy)
        self._retired: deque[AtomicCount] = deque()
        self._hits = 0  # those that no slot and no retired count holds
        self._hits_before = 0  # all hits at the last `reset_counts`
        self._misses = 0
        self._evictions = 0

    def get(self, key: K) -> V | None:
        """Return a stored entry and mark it as just used."""
        with self._lock:
            slot = self._slots.get(key)
            return None if slot is None else slot.use()

    def slot(self, key: K) -> Slot[V] | None:
        """The slot of a stored entry, or None. Nothing is counted or marked as used."""
        with self._lock:
            return self._slots.get(key)

    def __contains__(self, key: K) -> bool:
        """Whether a key is stored. Nothing is counted or marked as used."""
        with self._lock:
            return key in self._slots

    def _make_room(self, weight: int, evicted: list[tuple[K, V, str]]) -> None:
        """Evict entries until one more of this weight fits."""
        most = math.inf if self._maxsize is None else self._maxsize
        heaviest = math.inf if self._max_bytes is None else self._max_bytes
        while (full := len(self._slots) >= most) or self._slots.weight + weight > heaviest:
            bound = f"maxsize={most}" if full else f"max_bytes={heaviest}"
            why = f"the {_GOES_FIRST[self._policy]}, for want of room ({bound})"
            # All others may be pinned: then there is one entry too many.
            try:
                evicted.append((*self._retire(*self._slots.popitem()), why))
            except KeyError:
                break
            self._evictions += 1

    def pin(self, key: K, pinned: bool = True) -> bool:
        """Protect an entry from eviction, or end the protection."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                slot.pinned = pinned
            return slot is not None

    def _retire(self, key: K, slot: Slot[V]) -> tuple[K, V]:
        """Take the entry out of a slot that has left the store.

        Fast paths that hold the slot see that it is empty. A call under way may still count a use,
        so the count is added to the hits only when `_RETIRED` others have left later.
        """
        entry, slot.entry = slot.entry, None
        assert entry is not None
        self._retired.append(slot.uses)
        if len(self._retired) > _RETIRED:
            self._hits += self._retired.popleft().read()
        return key, entry

    def reset_counts(self) -> None:
        """Set the counters to 0. The entries stay."""
        with self._lock:
            self._hits_before = self._all_hits()
            for slot in self._slots.values():
                slot.start_again()
            self._misses = self._evictions = 0

    def _all_hits(self) -> int:
        """Hits since the last `clear`. `reset_counts` does not change this number."""
        tallies = [*self._retired, *(slot.uses for slot in self._slots.values())]
        return self._hits + sum(tally.read() for tally in tallies)

    def _tell_evicted(self, entries: list[tuple[K, V, str]]) -> None:
        """Call ``on_evict`` for each entry; without the lock, as it may call the cache."""
        if self._on_evict is not None:
            for item in entries:
                self._on_evict(*item)

    def __len__(self) -> int:
        """Return the number of entries stored."""
        return len(self._slots)

    def keys(self) -> list[K]:
        """Return the stored keys, a snapshot in the order of their compiles."""
        with self._lock:
            return list(self._slots)

    def slots(self) -> list[tuple[K, Slot[V]]]:
        """Return the stored keys and their slots, in the order of their compiles."""
        with self._lock:
            return list(self._slots.items())

    def items(self) -> list[tuple[K, V]]:
        """Return the stored keys and entries, a snapshot that marks none of them as used."""
        with self._lock:
            return [(k, s.entry) for k, s in self._slots.items() if s.entry is not None]

    def info(self) -> CacheInfo:
        """Return hits, misses, maxsize and currsize, all read at one moment."""
        with self._lock:
            hits = self._all_hits() - self._hits_before
            return CacheInfo(hits, self._misses, self._maxsize, len(self._slots))

    @property
    def is_full(self) -> bool:
        """Whether one more entry, as heavy as the heaviest one stored, would evict another."""
        if self._maxsize is not None and len(self._slots) >= self._maxsize:
            return True
        if self._max_bytes is None:
            return False
        with self._lock:
            heaviest = max((slot.weight for slot in self._slots.values()), default=0)
            return self._slots.weight + heaviest > self._max_bytes

    @property
    def nbytes(self) -> int:
        """The weight of the stored entries, in bytes."""
        with self._lock:
            return self._slots.weight

    @property
    def evictions(self) -> int:
        """How many entries were evicted because there was no room."""
        return self._evictions
