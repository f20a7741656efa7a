"""Counts what a bucketed function does: calls, compiles, loads, fallbacks, padding.

A warm call adds one to a `CallCounter` without a lock; sums are made when a snapshot is taken.
`bucketjit._runtime.statistics` has the snapshots, `bucketjit._runtime.timeline` their history.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from bucketjit._compile.cache_slot import Slot
from bucketjit._runtime.call_counts import CallCounter, CallSums, CountedBatch, SelectedRows
from bucketjit._runtime.statistics import (
    BucketStats,
    FrozenDict,
    ProgramStats,
    Reasons,
    Stats,
    share,
)
from bucketjit._runtime.timeline import Clock, Reading
from bucketjit._tracing.interface import Interface

# Call counters kept after their handler was dropped: its last calls may still be running.
_RETIRED = 256


class Counters:
    """The counters of a bucketed function, without those of its cache: hits, misses, evictions.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[int, CallCounter] = {}
        self._retired: deque[CallCounter] = deque()
        self._clock = Clock()
        # Call counters hold the clock, and the clock holds `read`: a strong reference would be a
        # cycle that keeps a dropped bucketed function alive until the garbage collector runs.
        alive = weakref.ref(self)

        def read() -> Reading:
            counters = alive()
            return (0, 0, 0, 0.0) if counters is None else counters._reading()

        self._clock.watch(read)
        self.clear()

    def clear(self) -> None:
        """Reset to zero, and drop all call counters."""
        with self._lock:
            self._lines.clear()
            self._retired.clear()
            self._warned = Reasons()
            self._alone = Reasons()
            self._has_inlined = False
        self.reset()

    def reset(self) -> None:
        """Reset to zero, and keep the call counters."""
        with self._lock:
            self._sums = CallSums()
            self._missed = 0
            self._inlined = 0
            self._compiles = 0
            self._compile_seconds = 0.0
            self._loads = 0
            self._load_seconds = 0.0
            self._dropped_runs = 0
            self._selected: weakref.WeakKeyDictionary[Interface, dict[str, SelectedRows]]
            self._selected = weakref.WeakKeyDictionary()
            for line in self._every_line():
                line.start_again()
            # Both times are read once here, so snapshots of the same counters are equal.
            self._since, self._started = time.time(), time.monotonic()
        self._clock.start(self._started)

    def call(self, line: CallCounter, compiled: bool = False) -> None:
        """Count one call of the slow path."""
        with self._lock:
            self._sums.add(line, 1)
            self._missed += compiled
        self._tick()

    def batch(self, batch: CountedBatch, compiled: bool) -> None:
        """Count a batch of examples; it is one call."""
        with self._lock:
            self._sums.add_batch(batch)
            self._missed += compiled
        self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._clock.due:
            self._clock.tick(now)

    def alone(self, reason: str, examples: int) -> bool:
        """Count examples that ran one by one."""
        with self._lock:
            name, is_new = self._alone.see(reason)
            self._sums.alone[name] = self._sums.alone.get(name, 0) + examples
            return is_new

    def inlined(self) -> bool:
        """Count a call inside a transformation, where the function itself runs."""
        with self._lock:
            self._inlined += 1
            is_first, self._has_inlined = not self._has_inlined, True
            return is_first

    def open(self, line: CallCounter) -> None:
        """Add a call counter of the fast path, and give it the clock."""
        with self._lock:
            line.clock = self._clock
            self._lines[id(line)] = line

    def close(self, line: CallCounter) -> None:
        """Retire the call counter of a handler that was dropped.

        Its last calls may still be running, so it goes on counting. It is added to the sums and
        dropped once `_RETIRED` others were retired after it.
        """
        with self._lock:
            if self._lines.pop(id(line), None) is not None:
                self._retired.append(line)
                if len(self._retired) > _RETIRED:
                    last = self._retired.popleft()
                    self._sums.add(last, last.count())

    def _every_line(self) -> Iterable[CallCounter]:
        return itertools.chain(self._lines.values(), self._retired)

    def compile(self, seconds: float) -> None:
        """Count a compile that took so many seconds."""
        with self._lock:
            self._compiles += 1
            self._compile_seconds += seconds
        self._clock.mark(time.monotonic())

    def load(self, seconds: float) -> None:
        """Count an executable that was read from a file, and the seconds that took."""
        with self._lock:
            self._loads += 1
            self._load_seconds += seconds

    def selected(self, program: Interface, rows: Mapping[str, tuple[int, int]]) -> None:
        """Count rows that a run selected; see `bucketjit._compile.computed_results.Selected`."""
        with self._lock:
            known = self._selected.setdefault(program, {})
            for variable, (selected, of) in rows.items():
                known.setdefault(variable, SelectedRows()).add(selected, of)

    def dropped(self) -> None:
        """Count a run whose results were dropped, as its computed sizes were not as presumed."""
        with self._lock:
            self._dropped_runs += 1

    def selected_by(self, program: Interface) -> Mapping[str, SelectedRows]:
        """What runs of a program have selected, by variable."""
        with self._lock:
            known = self._selected.get(program, {})
            return {v: dataclasses.replace(rows) for v, rows in known.items()}

    def fallback(self, reason: str, counted: bool = True) -> bool:
        """Count a fallback."""
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
        """The statistics of the executable in a slot; None if it has just left the cache."""
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
        """A snapshot of the counters."""
        buckets = tuple(b for b in map(self.bucket, slots) if b is not None)
        with self._lock:
            sums = self._sums.copy()
            for line in self._every_line():
                sums.add(line, line.count())
            missed, compiles, seconds = self._missed, self._compiles, self._compile_seconds
            loads, load_seconds = self._loads, self._load_seconds
            dropped_runs, inlined = self._dropped_runs, self._inlined
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
            dropped_runs=dropped_runs,
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
            rows=sums.rows,
            rows_alone=FrozenDict(sums.alone),
            shapes=len(sums.shapes),
            inlined_calls=inlined,
        )
