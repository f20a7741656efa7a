"""A bounded cache of executables that compiles each key once, however many threads ask for it.

It knows hashable keys and a ``compile`` callable, and nothing of what is compiled. How entries
are stored and evicted is in `bucketjit._compile.cache_store`.
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Generic, TypeVar

from bucketjit._compile.cache_slot import Slot
from bucketjit._compile.cache_store import CLEARED, CacheStore

V = TypeVar("V")

K = TypeVar("K", bound=Hashable)


class _Flight(Generic[V]):
    """One compile under way.

    Attributes:
        owner: Identifier of the thread that compiles.
        future: The entry or the exception, for the threads that wait.
        traceback: Traceback of the exception at the compile.
    """

    __slots__ = ("future", "owner", "traceback")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.future: Future[V] = Future()
        self.traceback: TracebackType | None = None


class ExecutableCache(CacheStore[K, V]):
    """A thread-safe cache that evicts the least recently used entry when it is full.

    However many threads ask for one key, it is compiled once and all of them get that entry.
    Different keys compile at the same time: no lock is held during a compile, so a ``compile``
    may itself ask the cache for other keys.

    A *miss* is a request that had to compile. A *hit* is a request that got an entry without
    compiling, stored or from another thread's compile.

    Args:
        maxsize: The most entries to keep, at least 1; None for no limit. Pinned entries count, but
            are never evicted, and neither is the entry that was just added: if all others are
            pinned, there is one entry more.
        max_bytes: The most that entries may weigh together, in bytes; None for no limit. A single
            entry that weighs more is kept alone.
        policy: Which entry is evicted first: ``"lru"``, the least recently used, or ``"lfu"``, the
            least frequently used.
        weigh: Returns the weight of an entry in bytes.
        on_evict: Called as ``on_evict(key, entry, why)`` for every entry that leaves the cache: by
            eviction, by :meth:`discard` or by :meth:`clear` (``why`` is `CLEARED` then). It runs
            without the lock, in the thread that made the entry leave, after the cache is
            consistent again. What it raises is raised to that thread's caller.

    Raises:
        TypeError: If ``maxsize`` or ``max_bytes`` is neither an int nor None.
        ValueError: If one of them is below 1, or there is no such ``policy``.

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
        policy: str = "lru",
        weigh: Callable[[V], int] | None = None,
        on_evict: Callable[[K, V, str], object] | None = None,
    ) -> None:
        super().__init__(
            maxsize, max_bytes=max_bytes, policy=policy, weigh=weigh, on_evict=on_evict
        )
        self._flights: dict[K, _Flight[V]] = {}
        self._waiting: dict[int, _Flight[V]] = {}  # thread -> the compile that it waits for

    def get_or_compile(
        self,
        key: K,
        compile: Callable[[], V],
        stored: Callable[[], None] | None = None,
        is_use: bool = True,
    ) -> V:
        """Return the entry of a key, compiled if it is not stored.

        If another thread is compiling the key, wait for it and return its entry, or raise its
        exception. A failed compile stores and counts nothing: the next request compiles again. An
        interrupt (``KeyboardInterrupt``, ``SystemExit``) is raised only in the thread that it hits;
        another thread that waits then compiles instead.
        """
        me = threading.get_ident()
        own: _Flight[V] | None = None
        try:
            while True:
                with self._lock:
                    slot = self._slots.get(key)
                    if slot is not None:
                        entry = slot.use() if is_use else slot.entry
                        if entry is not None:
                            return entry
                    flight = self._flights.get(key)
                    if flight is None:
                        own = self._flights[key] = _Flight(me)
                        break
                    self._refuse_deadlock(key, flight, me)
                    self._waiting[me] = flight
                try:
                    error = flight.future.exception()
                except CancelledError:  # the compiling thread was interrupted: compile here
                    continue
                finally:
                    with self._lock:
                        del self._waiting[me]
                if error is not None:
                    try:
                        # Each raise of an exception object appends to its traceback. Start again
                        # from that of the compile, or it grows with every thread that waited.
                        raise error.with_traceback(flight.traceback)
                    finally:
                        # Else there is a cycle: the traceback holds this frame, and the frame holds
                        # the error.
                        del error, flight
                if is_use:
                    with self._lock:
                        slot = self._slots.get(key)
                        if slot is not None:
                            slot.uses.add()
                        else:  # discarded or evicted meanwhile, and a hit all the same
                            self._hits += 1
                return flight.future.result()
            return self._compile(key, own, compile, stored)
        except BaseException:
            # Wake the threads that wait: after an interrupt, one of them compiles.
            if own is not None:
                self._forget(key, own)
                own.future.cancel()
            raise
        finally:
            del own

    def _refuse_deadlock(self, key: K, flight: _Flight[V], me: int) -> None:
        """Raise if the thread of ``flight`` waits for this one, directly or through other threads.

        The lock is held, so that no thread of the chain begins or ends its wait.
        """
        owner = flight.owner
        while owner != me:
            waits_for = self._waiting.get(owner)
            if waits_for is None or waits_for.future.done():
                return
            owner = waits_for.owner
        raise RuntimeError(
            f"compiling {reprlib.repr(key)} needs its own result: the compile asked the cache for "
            "the very key that is being compiled"
        )

    def _compile(
        self,
        key: K,
        flight: _Flight[V],
        compile: Callable[[], V],
        stored: Callable[[], None] | None,
    ) -> V:
        """Compile, store the entry, and wake the threads that wait for it."""
        try:
            entry = compile()
        except Exception as error:
            self._forget(key, flight)
            flight.traceback = error.__traceback__
            flight.future.set_exception(error)
            del flight
            raise
        evicted: list[tuple[K, V, str]] = []
        try:
            with self._lock:
                self._misses += 1
                # Only if neither `discard` nor `clear` came meanwhile: they removed the flight.
                if self._flights.get(key) is flight:
                    slot = Slot(entry, 0 if self._weigh is None else self._weigh(entry))
                    self._make_room(slot.weight, evicted)
                    self._slots[key] = slot
                    del self._flights[key]
            flight.future.set_result(entry)
            if stored is not None:
                stored()
        finally:
            self._tell_evicted(evicted)
        return entry

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        """End a flight: the next request for its key starts another compile."""
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]

    def discard(self, key: K) -> bool:
        """Remove the entry of a key.

        If the key is being compiled, that compile continues for the threads that wait for it, but
        its entry is not stored, and the next request compiles again.
        """
        with self._lock:
            self._flights.pop(key, None)
            slot = self._slots.pop(key, None)
            if slot is None:
                return False
            dropped = self._retire(key, slot)
        self._tell_evicted([(*dropped, "discarded")])
        return True

    def clear(self) -> None:
        """Remove all entries and set the counters to 0.

        Compiles under way continue for the threads that wait for them, but their entries are not
        stored, and the next request compiles again: no entry from before a clear appears after it.
        """
        with self._lock:
            entries = [self._retire(key, slot) for key, slot in self._slots.items()]
            self._slots.clear()
            self._flights.clear()
            self._retired.clear()
            self._hits = self._hits_before = self._misses = self._evictions = 0
        self._tell_evicted([(*item, CLEARED) for item in entries])
