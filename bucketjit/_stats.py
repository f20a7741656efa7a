"""What an executor has done so far: counters behind a lock, and frozen snapshots of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from bucketjit._cache import Tally


class FrozenDict(dict[str, int]):
    """A dict that cannot be changed; unlike a mapping proxy it can be hashed, copied, pickled."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a snapshot cannot be changed")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


@dataclass(frozen=True)
class BucketStats:
    """One executable of the cache.

    Attributes:
        sizes: Size of each dimension variable: padded, or logical where ``exact``.
        hits: Calls it has served after the one that compiled it.
        compile_seconds: What tracing, lowering and compiling it took, or reading it from a file.
        exact: True if it runs one exact shape, without masks.
    """

    sizes: Mapping[str, int]
    hits: int
    compile_seconds: float
    exact: bool


@dataclass(frozen=True)
class Stats:
    """A snapshot of an executor's counters.

    Attributes:
        calls: Calls so far, those inlined into another transformation aside.
        hits: Calls that found their executable in the cache.
        misses: Calls that had to compile it.
        compiles: Executables compiled.
        compile_seconds: Seconds spent on that.
        evictions: Executables dropped to make room.
        fallback_calls: Calls that ran at their exact shape because they cannot be masked.
        fallback_reasons: How often, by reason.
        padding_waste: Padding among all elements of padded arguments, 0 to 1.
        buckets: The executables in the cache, in the order of their compiles.
        loads: Executables that were read from files, see `BucketedExec.with_persistence`.
        load_seconds: Seconds spent on that.
    """

    calls: int
    hits: int
    misses: int
    compiles: int
    compile_seconds: float
    evictions: int
    fallback_calls: int
    fallback_reasons: Mapping[str, int]
    padding_waste: float
    buckets: tuple[BucketStats, ...]
    loads: int = 0
    load_seconds: float = 0.0


class Line:
    """Calls of one kind, counted without a lock.

    Attributes:
        calls: How many.
        real: Elements of their padded arguments that are real.
        total: All of them.
        reason: Why they are not masked, or None.
    """

    __slots__ = ("calls", "real", "reason", "total")

    def __init__(self, real: int, total: int, reason: str | None = None) -> None:
        self.calls = Tally()
        self.real = real
        self.total = total
        self.reason = reason


class Counters:
    """The counters that only the executor knows; the cache keeps hits and misses itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Start again from zero."""
        with self._lock:
            self.calls = 0
            self.compiles = 0
            self.compile_seconds = 0.0
            self.loads = 0
            self.load_seconds = 0.0
            self.reasons: dict[str, int] = {}
            self.real_elements = 0
            self.all_elements = 0
            self._lines: dict[int, Line] = {}

    def call(self, real: int, total: int) -> None:
        """Count a call whose padded arguments have ``total`` elements, ``real`` of them real."""
        with self._lock:
            self._add(1, real, total)

    def _add(self, calls: int, real: int, total: int) -> None:
        self.calls += calls
        self.real_elements += calls * real
        self.all_elements += calls * total

    def open(self, line: Line) -> None:
        """Count what a line counts, from now on."""
        with self._lock:
            self._lines[id(line)] = line

    def close(self, line: Line) -> None:
        """Keep what a line has counted, and let go of it."""
        with self._lock:
            if self._lines.pop(id(line), None) is not None:
                calls = line.calls.read()
                self._add(calls, line.real, line.total)
                if line.reason is not None and calls:
                    self.reasons[line.reason] = self.reasons.get(line.reason, 0) + calls

    def compile(self, seconds: float) -> None:
        """Count a compile."""
        with self._lock:
            self.compiles += 1
            self.compile_seconds += seconds

    def load(self, seconds: float) -> None:
        """Count an executable that was read from a file."""
        with self._lock:
            self.loads += 1
            self.load_seconds += seconds

    def fallback(self, reason: str) -> bool:
        """Count a fallback; True if the reason is new."""
        with self._lock:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
            return self.reasons[reason] == 1

    def snapshot(
        self, hits: int, misses: int, evictions: int, buckets: tuple[BucketStats, ...]
    ) -> Stats:
        """The counters as they are now, with those of the cache."""
        with self._lock:
            calls, real, total = self.calls, self.real_elements, self.all_elements
            reasons = dict(self.reasons)
            for line in self._lines.values():
                count = line.calls.read()
                calls += count
                real += count * line.real
                total += count * line.total
                if line.reason is not None:
                    reasons[line.reason] = reasons.get(line.reason, 0) + count
            return Stats(
                calls=calls,
                hits=hits,
                misses=misses,
                compiles=self.compiles,
                compile_seconds=self.compile_seconds,
                evictions=evictions,
                fallback_calls=sum(reasons.values()),
                fallback_reasons=FrozenDict(reasons),
                padding_waste=(total - real) / total if total else 0.0,
                buckets=buckets,
                loads=self.loads,
                load_seconds=self.load_seconds,
            )
