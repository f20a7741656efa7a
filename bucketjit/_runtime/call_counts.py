"""What is counted of calls: `CallCounter` for the calls of one handler, and their sums.

A warm call adds one to a `CallCounter` without a lock. `bucketjit._runtime.counters` sums them up
when a snapshot is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bucketjit._compile.cache_slot import AtomicCount
from bucketjit._runtime.statistics import Reasons
from bucketjit._runtime.summary import SHAPES_KEPT
from bucketjit._runtime.timeline import Clock

_SIZES_KEPT = 4096  # logical sizes counted one by one for each variable; then they are rounded up


class CallCounter:
    """Counts, without a lock, calls that have the same sizes and executable.

    Attributes:
        calls: The atomic count; never reset, see `count`.
        clock: Takes moments. Set by `Counters.open`.
    """

    __slots__ = (
        "_before",
        "calls",
        "clock",
        "flops",
        "key",
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
        key: int | None = None,
    ) -> None:
        self.calls = AtomicCount()
        self._before = 0
        self.clock: Clock  # set by `Counters.open`
        self.logical = tuple(logical.items())
        self.padded = () if padded is None else tuple(padded[v] for v in logical)
        self.real = real
        self.total = total
        self.flops = flops
        self.reason = reason
        self.key = key

    def count(self) -> int:
        """Calls since the counters started or were reset."""
        return self.calls.read() - self._before

    def start_again(self) -> None:
        """Reset `count` to zero."""
        self._before = self.calls.read()


@dataclass(frozen=True)
class CountedBatch:
    """A batch of examples that was run, see `bucketjit._ragged`.

    Attributes:
        rows: How many examples it had.
        logical: Their logical sizes, each with the number of examples that had them.
        padded: Padded size of each dimension variable.
        padded_rows: How many examples the executable takes.
        real: Elements of the padded arguments that are not padding.
        total: Elements of the padded arguments.
        flops: Floating point operations of the batch; NaN if not known.
        keys: `SignedCall.shape_key` of the examples, each once.
    """

    rows: int
    logical: Sequence[tuple[Mapping[str, int], int]]
    padded: Mapping[str, int]
    padded_rows: int
    real: int
    total: int
    flops: float
    keys: Sequence[int | None] = ()


@dataclass
class _Sizes:
    """Calls by logical size of one variable, in at most `_SIZES_KEPT` entries.

    Sizes are rounded up to a multiple of ``step``, which doubles whenever there are too many.
    """

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
class CallSums:
    """Sums over calls."""

    calls: int = 0
    real: int = 0
    total: int = 0
    flops: float = 0.0
    wasted_flops: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    # Copies share `seen`, so that a reason is counted under the same name in all of them.
    seen: Reasons = field(default_factory=Reasons)
    logical: dict[str, int] = field(default_factory=dict)
    padded: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, _Sizes] = field(default_factory=dict)
    rows: int = 0
    alone: dict[str, int] = field(default_factory=dict)
    shapes: set[int] = field(default_factory=set)

    def add(self, line: CallCounter, calls: int) -> None:
        if not calls:
            return
        self._add_elements(calls, line.real, line.total, line.flops)
        self.add_shape(line.key)
        if line.reason is not None:
            self.add_reason(line.reason, calls)
        for variable, size in line.logical:
            self.sizes.setdefault(variable, _Sizes()).add(size, calls)
        for (variable, size), padded in zip(line.logical, line.padded, strict=False):
            self.logical[variable] = self.logical.get(variable, 0) + calls * size
            self.padded[variable] = self.padded.get(variable, 0) + calls * padded

    def add_batch(self, batch: CountedBatch) -> None:
        self._add_elements(1, batch.real, batch.total, batch.flops)
        self.rows += batch.rows
        for key in batch.keys:
            self.add_shape(key)
        for sizes, rows in batch.logical:
            for variable, size in sizes.items():
                self.sizes.setdefault(variable, _Sizes()).add(size, rows)
                self.logical[variable] = self.logical.get(variable, 0) + rows * size
        for variable, size in batch.padded.items():
            known = self.padded.get(variable, 0)
            self.padded[variable] = known + batch.padded_rows * size

    def _add_elements(self, calls: int, real: int, total: int, flops: float) -> None:
        """Add calls of so many elements and floating point operations each."""
        self.calls += calls
        self.real += calls * real
        self.total += calls * total
        if total and flops >= 0:
            self.flops += calls * flops
            self.wasted_flops += calls * flops * (total - real) / total

    def add_shape(self, key: int | None) -> None:
        if key is not None and len(self.shapes) < SHAPES_KEPT:
            self.shapes.add(key)

    def add_reason(self, reason: str, calls: int) -> None:
        name, _ = self.seen.see(reason)
        self.reasons[name] = self.reasons.get(name, 0) + calls

    def copy(self) -> CallSums:
        sizes = {v: _Sizes(s.step, dict(s.counts)) for v, s in self.sizes.items()}
        return dataclasses.replace(
            self,
            reasons=dict(self.reasons),
            logical=dict(self.logical),
            padded=dict(self.padded),
            sizes=sizes,
            alone=dict(self.alone),
            shapes=set(self.shapes),
        )


@dataclass
class SelectedRows:
    """What runs of one program have selected by one computed size.

    Attributes:
        runs: The number of runs that told it.
        selected: The rows that they selected, in all.
        rows: The rows that they selected from.
        most: The largest number of rows that one of them selected.
    """

    runs: int = 0
    selected: int = 0
    rows: int = 0
    most: int = 0

    def add(self, selected: int, rows: int) -> None:
        """Add a run."""
        self.runs += 1
        self.selected += selected
        self.rows += rows
        self.most = max(self.most, selected)
