"""Counts what a bucketed function does: calls, compiles, loads, fallbacks, padding.

A warm call adds one to a `CallCounter` without a lock; sums are made when a snapshot is taken.
`bucketjit._runtime.statistics` has the snapshots.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bucketjit._compile.cache import AtomicCount, Slot
from bucketjit._ir.interface import Interface
from bucketjit._runtime.statistics import (
    MOMENTS,
    SHAPES_KEPT,
    BucketStats,
    FrozenDict,
    History,
    Moment,
    Stats,
    share,
    shown_reason,
)

_SIZES_KEPT = 4096  # logical sizes counted one by one for each variable; then they are rounded up


REASONS_KEPT = 64  # distinct reasons counted by name; each is a time series in `bucketjit.metrics`
OTHER = "other"  # the name under which all further reasons are counted


class CountedBatch(NamedTuple):
    """What is counted of a call, or of a batch of examples (see `bucketjit._runtime.rows`).

    Attributes:
        rows: How many examples the batch had; 0 for a call.
        logical: Their logical sizes, each with the number of examples that had them.
        padded: Padded size of each dimension variable; empty at an exact shape.
        padded_rows: How many examples the executable takes.
        real, total: Elements of the padded arguments, without and with padding.
        keys: `Call.shape_key` of the examples, each once.
    """

    rows: int
    logical: Sequence[tuple[Mapping[str, int], int]]
    padded: Mapping[str, int]
    padded_rows: int
    real: int
    total: int
    keys: Sequence[int | None] = ()


class CallCounter:
    """Counts, without a lock, calls that have the same sizes and executable.

    Attributes:
        calls: The atomic count.
        like: What is counted of each call.
        reason: Why they run exact; None if they do not.
        history: Asked before it counts on the fast path, see `History`.
        also: Counts each such call, too, if it is a fallback.
    """

    __slots__ = ("__weakref__", "also", "calls", "history", "like", "reason")

    def __init__(
        self,
        logical: Mapping[str, int],
        padded: Mapping[str, int] | None = None,
        real: int = 0,
        total: int = 0,
        *,
        reason: str | None = None,
        key: int | None = None,
    ) -> None:
        self.calls = AtomicCount()
        self.history: History
        self.also: Callable[[], object] | None
        bucket = {} if padded is None else {v: padded[v] for v in logical}
        self.like = CountedBatch(0, ((dict(logical), 1),), bucket, 1, real, total, (key,))
        self.reason = reason

    def told(self) -> int:
        return self.calls.read()


class _Sizes:
    """Calls by logical size of one variable, in at most `_SIZES_KEPT` entries.

    Sizes are rounded up to a multiple of ``step``, which doubles whenever there are too many.
    """

    def __init__(self, step: int = 1, counts: Mapping[int, int] = {}) -> None:
        self.step = step
        self.counts: Counter[int] = Counter(counts)

    def add(self, size: int, calls: int) -> None:
        self.counts[-(-size // self.step) * self.step] += calls
        if len(self.counts) > _SIZES_KEPT:
            self.step *= 2
            before, self.counts = self.counts, Counter()
            for rounded, count in before.items():
                self.add(rounded, count)


@dataclass
class CallSums:
    """Sums over calls."""

    calls: int = 0
    rows: int = 0
    real: int = 0
    total: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    logical: Counter[str] = field(default_factory=Counter)  # only where there is a padded size
    padded: Counter[str] = field(default_factory=Counter)
    sizes: dict[str, _Sizes] = field(default_factory=dict)
    shapes: set[int] = field(default_factory=set)

    def copied(self) -> CallSums:
        """A copy that counts on by itself."""
        copies = {name: copy.copy(value) for name, value in vars(self).items()}
        copies["sizes"] = {v: _Sizes(s.step, s.counts) for v, s in self.sizes.items()}
        return CallSums(**copies)

    def add(self, batch: CountedBatch, calls: int = 1, reason: str | None = None) -> None:
        if not calls:
            return
        self.calls += calls
        self.rows += calls * batch.rows
        self.real += calls * batch.real
        self.total += calls * batch.total
        if reason is not None:
            self.reasons[reason] += calls
        for key in batch.keys:
            if key is not None and len(self.shapes) < SHAPES_KEPT:
                self.shapes.add(key)
        for sizes, rows in batch.logical:
            for variable, size in sizes.items():
                self.sizes.setdefault(variable, _Sizes()).add(size, calls * rows)
                if variable in batch.padded:
                    self.logical[variable] += calls * rows * size
        for variable, size in batch.padded.items():
            self.padded[variable] += calls * batch.padded_rows * size


# Of the runs that told one computed size: how many, the rows that they selected, those that they
# selected from, and the largest number that one of them selected.
SelectedRows = tuple[int, int, int, int]

# Call counters kept after their handler was dropped: its last calls may still be running.
_RETIRED = 256


class Counters:
    """The counters of a bucketed function, without those of its cache. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.history = History()
        self._fallbacks = AtomicCount()
        self.clear()

    def clear(self) -> None:
        """Reset to zero, drop all call counters, and forget which reasons are known."""
        self.history.settle()
        with self._lock:
            self._lines: dict[int, CallCounter] = {}
            self._retired: deque[CallCounter] = deque()
            self._reasons: set[str] = set()  # by name, the first `REASONS_KEPT`
            self._noted: set[tuple[str, str]] = set()
            self._has_inlined = False
        self.reset()

    def reset(self) -> None:
        """Reset to zero, and keep the call counters."""
        self.history.settle()
        with self._lock:
            self._own_sums, self._sums_at = CallSums(), self.history.taken
            self._fallbacks.reset()
            self._totals: dict[str, Any] = {
                **dict.fromkeys(("compiles", "loads", "inlined_calls"), 0),
                **dict.fromkeys(("compile_seconds", "load_seconds"), 0.0),
            }
            self._selected = weakref.WeakKeyDictionary[Interface, dict[str, SelectedRows]]()
            self.history.keep(*self._every_line())  # for snapshots that threads have just taken
            for line in self._every_line():
                line.calls.reset()
            # Both times are read once here, so snapshots of the same counters are equal.
            self._since, self._started = time.time(), time.monotonic()

    @property
    def _sums(self) -> CallSums:
        """The sums, to be changed: those that a snapshot may still ask for are copied before."""
        if self._sums_at != self.history.taken:
            self._sums_at = self.history.taken
            if self.history.moments():
                self._own_sums = self._own_sums.copied()
        return self._own_sums

    def call(self, line: CallCounter) -> None:
        """Count one call of the slow path."""
        with self._lock:
            if line.reason is not None:
                line.reason = self._name(line.reason)
                self._fallbacks.add()
            self._sums.add(line.like, reason=line.reason)

    def batch(self, batch: CountedBatch) -> None:
        """Count a batch of examples; it is one call."""
        with self._lock:
            self._sums.add(batch)

    def alone(self, reason: str, examples: int) -> bool:
        """Count examples that ran one by one. Returns whether the reason is new."""
        with self._lock:
            name = self._name(reason)
            self._sums.alone[name] += examples
            return self._is_new("alone", name)

    def fallback(self, reason: str, counted: bool = True) -> bool:
        """Count a fallback, if its call did not. Returns whether the reason is new."""
        with self._lock:
            name = self._name(reason)
            if not counted:
                self._sums.reasons[name] += 1
                self._fallbacks.add()
            return self._is_new("fallback", name)

    def inlined(self) -> bool:
        """Count a call inside a transformation. Returns whether it is the first one."""
        with self._lock:
            self._totals["inlined_calls"] += 1
            is_first, self._has_inlined = not self._has_inlined, True
            return is_first

    def open(self, line: CallCounter) -> None:
        """Add a call counter of the fast path."""
        with self._lock:
            line.history, line.also = self.history, None
            if line.reason is not None:
                line.reason, line.also = self._name(line.reason), self._fallbacks.add
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
                    self.history.keep(last)
                    self._sums.add(last.like, last.calls.read(), last.reason)

    def _every_line(self) -> Iterable[CallCounter]:
        return (*self._lines.values(), *self._retired)

    def _name(self, reason: str) -> str:
        name = shown_reason(reason)
        if name not in self._reasons:
            if len(self._reasons) >= REASONS_KEPT:
                return OTHER
            self._reasons.add(name)
        return name

    def _is_new(self, what: str, name: str) -> bool:
        """Whether a reason is counted for this purpose for the first time."""
        count = len(self._noted)
        self._noted.add((what, name))
        return len(self._noted) > count

    def built(self, seconds: float, is_loaded: bool = False) -> None:
        """Count an executable that was compiled or read from a file, and the seconds that took."""
        what = "load" if is_loaded else "compile"
        with self._lock:
            self._totals[f"{what}s"] += 1
            self._totals[f"{what}_seconds"] += seconds

    def selected(self, program: Interface, rows: Mapping[str, tuple[int, int]]) -> None:
        """Count rows that a run selected; see `bucketjit._tracing.computed.sizes.Selected`."""
        self.history.settle(but="counts")
        with self._lock:
            sums = self._selected.setdefault(program, {})
            for variable, (selected, of) in rows.items():
                runs, total, bounds, most = sums.get(variable, (0, 0, 0, 0))
                sums[variable] = runs + 1, total + selected, bounds + of, max(most, selected)

    def selected_by(self, program: Interface) -> Mapping[str, SelectedRows]:
        """What runs of a program have selected, by variable."""
        with self._lock:
            return dict(self._selected.get(program, {}))

    def buckets(self, slots: Iterable[Slot[Any]], moment: Moment) -> tuple[BucketStats, ...]:
        """The statistics of the executables in the slots of a cache."""
        return tuple(
            BucketStats(
                sizes=FrozenDict(entry.sizes),
                hits=hits,
                compile_seconds=entry.compile_seconds,
                exact=entry.exact,
                last_used=self._since + (last_used - self._started),
                nbytes=entry.nbytes,
                flops=entry.flops if entry.flops >= 0 else None,
                pinned=slot.pinned,
                device="" if entry.origin is None else entry.origin.signature.device,
                memory=FrozenDict(entry.memory),
            )
            for slot in slots
            if (entry := slot.entry) is not None
            for hits, last_used in [moment.told(slot)]
        )

    def snapshot(
        self, misses: int = 0, evictions: int = 0, **parts: Callable[[Moment], Any]
    ) -> Stats:
        """A snapshot of the counters; ``parts`` compute further fields when they are asked for."""
        if len(self.history.moments()) >= MOMENTS:  # they need not be told of changes then
            self.history.settle()
        with self._lock:
            sums = self._own_sums
            moment = Moment({**parts, "counts": lambda moment: self._counts(sums, moment)})
            now = {**self._totals, "misses": misses, "evictions": evictions, "since": self._since}
            stats = object.__new__(Stats)
            vars(stats).update(now, fallback_calls=self._fallbacks.read(), _moment=moment)
            self.history.add(moment)
        return stats

    def _counts(self, before: CallSums, moment: Moment) -> dict[str, Any]:
        """The fields that are sums over calls."""
        with self._lock:
            lines = {*self._every_line(), *moment.kept}
        sums = before.copied()
        for line in lines:
            if isinstance(line, CallCounter):
                sums.add(line.like, moment.told(line), line.reason)
        return {
            "calls": sums.calls,
            "fallback_reasons": FrozenDict(+sums.reasons),
            "padding_waste": share(sums.total - sums.real, sums.total),
            "dimension_waste": FrozenDict(
                {v: share(n - sums.logical[v], n) for v, n in sums.padded.items()}
            ),
            "size_counts": FrozenDict(
                {v: FrozenDict(sorted(s.counts.items())) for v, s in sums.sizes.items()}
            ),
            "rows": sums.rows,
            "rows_alone": FrozenDict(sums.alone),
            "shapes": len(sums.shapes),
        }
