"""The counters of an executor. A warm call adds one to a number, without a lock."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bucketjit._compile.cache_slot import AtomicCount, Slot
from bucketjit._runtime.statistics import (
    BucketStats,
    FrozenDict,
    ProgramStats,
    Reasons,
    Stats,
    share,
)
from bucketjit._runtime.timeline import Clock, Reading

_SIZES_KEPT = 4096

_RETIRED = 256  # lines whose plans gave way, and whose last calls may still be under way


class CallCounter:
    """Calls of one kind, counted without a lock.

    Args:
        logical: Logical size of each dimension variable.
        padded: Their padded sizes; None where the calls run exact.
        real: Elements of their padded arguments that are real.
        total: All of them.
        flops: Floating point operations of a call; NaN if not known.
        reason: Why they are not masked, or None.

    Attributes:
        calls: How many, see `count`.
        clock: Takes moments.
    """

    __slots__ = (
        "_before",
        "calls",
        "clock",
        "flops",
        "logical",
        "padded",
        "real",
        "reason",
        "total",
    )

    def __init__(
        self,
        logical: Mapping[str, int],
        padded: Mapping[str, int] | None = None,
        real: int = 0,
        total: int = 0,
        flops: float = math.nan,
        reason: str | None = None,
    ) -> None:
        self.calls = AtomicCount()
        self._before = 0
        self.clock: Clock  # set where it is opened
        self.logical = tuple(logical.items())
        self.padded = () if padded is None else tuple(padded[v] for v in logical)
        self.real = real
        self.total = total
        self.flops = flops
        self.reason = reason

    def count(self) -> int:
        """Calls since the counters started."""
        return self.calls.read() - self._before

    def start_again(self) -> None:
        """Count from zero."""
        self._before = self.calls.read()


@dataclass
class _Sizes:
    """Calls by logical size of one variable."""

    step: int = 1
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, size: int, calls: int) -> None:
        key = -(-size // self.step) * self.step
        self.counts[key] = self.counts.get(key, 0) + calls
        while len(self.counts) > _SIZES_KEPT:
            self.step *= 2
            before, self.counts = self.counts, {}
            for known, count in before.items():
                key = -(-known // self.step) * self.step
                self.counts[key] = self.counts.get(key, 0) + count


@dataclass
class _Sums:
    """What calls add up to."""

    calls: int = 0
    real: int = 0
    total: int = 0
    flops: float = 0.0
    wasted_flops: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    seen: Reasons = field(default_factory=Reasons)  # copies share it: no reason changes its name
    logical: dict[str, int] = field(default_factory=dict)
    padded: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, _Sizes] = field(default_factory=dict)

    def add(self, line: CallCounter, calls: int) -> None:
        if not calls:
            return
        self.calls += calls
        self.real += calls * line.real
        self.total += calls * line.total
        if line.total and line.flops >= 0:
            self.flops += calls * line.flops
            self.wasted_flops += calls * line.flops * (line.total - line.real) / line.total
        if line.reason is not None:
            self.add_reason(line.reason, calls)
        for variable, size in line.logical:
            self.sizes.setdefault(variable, _Sizes()).add(size, calls)
        for (variable, size), padded in zip(line.logical, line.padded, strict=False):
            self.logical[variable] = self.logical.get(variable, 0) + calls * size
            self.padded[variable] = self.padded.get(variable, 0) + calls * padded

    def add_reason(self, reason: str, calls: int) -> None:
        name, _ = self.seen.see(reason)
        self.reasons[name] = self.reasons.get(name, 0) + calls

    def copy(self) -> _Sums:
        sizes = {v: _Sizes(s.step, dict(s.counts)) for v, s in self.sizes.items()}
        return dataclasses.replace(
            self,
            reasons=dict(self.reasons),
            logical=dict(self.logical),
            padded=dict(self.padded),
            sizes=sizes,
        )


class Counters:
    """The counters that only the executor knows; the cache keeps hits and misses itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[int, CallCounter] = {}
        self._retired: deque[CallCounter] = deque()
        self._clock = Clock()
        alive = weakref.ref(self)  # lines have the clock: no cycle

        def read() -> Reading:
            counters = alive()
            return (0, 0, 0, 0.0) if counters is None else counters._reading()

        self._clock.watch(read)
        self.clear()

    def clear(self) -> None:
        """Start again from zero, and count no line any more."""
        with self._lock:
            self._lines.clear()
            self._retired.clear()
            self._warned = Reasons()
        self.reset()

    def reset(self) -> None:
        """Start again from zero, and go on counting what the lines count."""
        with self._lock:
            self._sums = _Sums()
            self._missed = 0
            self._compiles = 0
            self._compile_seconds = 0.0
            self._loads = 0
            self._load_seconds = 0.0
            for line in self._every_line():
                line.start_again()
            # Taken once: snapshots of the same counters are equal.
            self._since, self._started = time.time(), time.monotonic()
        self._clock.start(self._started)

    def call(self, line: CallCounter, compiled: bool = False) -> None:
        """Count one call of a kind, and whether it had to compile."""
        with self._lock:
            self._sums.add(line, 1)
            self._missed += compiled
        now = time.monotonic()
        if now >= self._clock.due:
            self._clock.tick(now)

    def open(self, line: CallCounter) -> None:
        """Count what a line counts, from now on."""
        with self._lock:
            line.clock = self._clock
            self._lines[id(line)] = line

    def counts(self, lines: Iterable[CallCounter]) -> bool:
        """Whether it counts what all of these lines count."""
        with self._lock:
            return all(id(line) in self._lines for line in lines)

    def close(self, line: CallCounter) -> None:
        """Keep what a line has counted, and let go of it before long."""
        with self._lock:
            if self._lines.pop(id(line), None) is not None:
                self._retired.append(line)
                if len(self._retired) > _RETIRED:
                    last = self._retired.popleft()
                    self._sums.add(last, last.count())

    def _every_line(self) -> Iterable[CallCounter]:
        return itertools.chain(self._lines.values(), self._retired)

    def compile(self, seconds: float) -> None:
        """Count a compile."""
        with self._lock:
            self._compiles += 1
            self._compile_seconds += seconds
        self._clock.mark(time.monotonic())

    def load(self, seconds: float) -> None:
        """Count an executable that was read from a file."""
        with self._lock:
            self._loads += 1
            self._load_seconds += seconds

    def fallback(self, reason: str, counted: bool = True) -> bool:
        """Count a fallback, unless the call was counted with its reason; True if that is new.

        Of all reasons beyond the first `REASONS_KEPT`, one is new.
        """
        with self._lock:
            if not counted:
                self._sums.add_reason(reason, 1)
            return self._warned.see(reason)[1]

    def _reading(self) -> Reading:
        with self._lock:
            calls, real, total = self._sums.calls, self._sums.real, self._sums.total
            for line in self._every_line():
                count = line.count()
                calls += count
                real += count * line.real
                total += count * line.total
            return calls, calls - self._missed, self._compiles, share(total - real, total)

    def bucket(self, slot: Slot[Any]) -> BucketStats | None:
        """The numbers of one executable; None if it has just left the cache."""
        entry = slot.entry
        if entry is None:
            return None
        return BucketStats(
            sizes=FrozenDict(entry.sizes),
            hits=slot.hits(),
            compile_seconds=entry.compile_seconds,
            exact=entry.exact,
            last_used=self._since + (slot.last_used - self._started),
            nbytes=entry.nbytes,
            flops=entry.flops if entry.flops >= 0 else None,
            pinned=slot.pinned,
        )

    def snapshot(
        self,
        hits: int,
        misses: int,
        evictions: int,
        slots: Iterable[Slot[Any]],
        programs: tuple[ProgramStats, ...] = (),
    ) -> Stats:
        """The counters as they are now, with those of the cache."""
        buckets = tuple(b for b in map(self.bucket, slots) if b is not None)
        with self._lock:
            sums = self._sums.copy()
            for line in self._every_line():
                sums.add(line, line.count())
            missed, compiles, seconds = self._missed, self._compiles, self._compile_seconds
            loads, load_seconds = self._loads, self._load_seconds
        waste = share(sums.total - sums.real, sums.total)
        reading = (sums.calls, sums.calls - missed, compiles, waste)
        return Stats(
            calls=sums.calls,
            hits=hits,
            misses=misses,
            compiles=compiles,
            compile_seconds=seconds,
            evictions=evictions,
            fallback_calls=sum(sums.reasons.values()),
            fallback_reasons=FrozenDict(sums.reasons),
            padding_waste=waste,
            buckets=buckets,
            loads=loads,
            load_seconds=load_seconds,
            dimension_waste=FrozenDict(
                {v: share(n - sums.logical[v], n) for v, n in sums.padded.items()}
            ),
            flop_waste=share(sums.wasted_flops, sums.flops),
            programs=programs,
            size_counts=FrozenDict(
                {v: FrozenDict(sorted(s.counts.items())) for v, s in sums.sizes.items()}
            ),
            history=self._clock.moments(time.monotonic(), reading),
            since=self._since,
        )
