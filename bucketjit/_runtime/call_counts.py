"""What is counted of calls: `CallCounter` for the calls of one handler, and their sums.

A warm call adds one to a `CallCounter` without a lock. `bucketjit._runtime.counters` sums them up
when a snapshot is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bucketjit._compile.cache import AtomicCount
from bucketjit._runtime.summary import SHAPES_KEPT

_SIZES_KEPT = 4096  # logical sizes counted one by one for each variable; then they are rounded up


class CountedBatch(NamedTuple):
    """What is counted of a call, or of a batch of examples (see `bucketjit._runtime.rows`).

    Attributes:
        rows: How many examples the batch had; 0 for a call.
        logical: Their logical sizes, each with the number of examples that had them.
        padded: Padded size of each dimension variable; empty at an exact shape.
        padded_rows: How many examples the executable takes.
        real: Elements of the padded arguments that are not padding.
        total: Elements of the padded arguments.
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
    """

    __slots__ = ("calls", "like", "reason")

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
        own = {} if padded is None else {v: padded[v] for v in logical}
        self.like = CountedBatch(0, ((dict(logical), 1),), own, 1, real, total, (key,))
        self.reason = reason


class _Sizes:
    """Calls by logical size of one variable, in at most `_SIZES_KEPT` entries.

    Sizes are rounded up to a multiple of ``step``, which doubles whenever there are too many.
    """

    def __init__(self) -> None:
        self.step = 1
        self.counts: Counter[int] = Counter()

    def add(self, size: int, calls: int) -> None:
        self.counts[-(-size // self.step) * self.step] += calls
        if len(self.counts) > _SIZES_KEPT:
            self.step *= 2
            before, self.counts = self.counts, Counter()
            for known, count in before.items():
                self.add(known, count)


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
