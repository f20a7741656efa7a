"""Learns buckets from the sizes of calls, and from what compiling and running have cost.

This is plain arithmetic: what it gets are sizes and seconds, and the same ones give the same
buckets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from bucketjit.strategies._search import Floats, Ints

Bucket = tuple[int, ...]  # a size of each variable, in one order

MOST_SIZES = 512  # combinations of sizes that are counted apart; then they are rounded up
_MOST_CANDIDATES = 1024
_MOST_OF_ONE = 64  # candidates of one variable
_FIRST_LOOK = 8  # calls after which buckets are chosen for the first time
_NEXT_LOOK = 1.5  # they are chosen anew after so many times as many calls
_LEAST_EXPECTED = 500  # calls that are expected in any case
_TIMED = 3  # calls of each bucket that are timed


class Line(NamedTuple):
    """The seconds that a call takes, as a line in the volume of its bucket.

    Attributes:
        start: Seconds of a call of no volume.
        slope: Seconds for each unit of volume.
    """

    start: float
    slope: float

    def at(self, volume: Any) -> Any:
        """The seconds of a call in a bucket of a volume, or in several."""
        return self.start + self.slope * volume


def fitted_line(seconds: Mapping[float, float]) -> Line:
    """The line that is nearest to some seconds by volume, in relative terms; it never falls.

    Examples:
        >>> fitted_line({100: 0.2, 300: 0.4})
        Line(start=0.1, slope=0.001)
        >>> fitted_line({100: 0.5})
        Line(start=0.0, slope=0.005)
    """
    volume, taken = (np.array(list(x), np.float64) for x in (seconds, seconds.values()))
    # Both sides are divided by the seconds: 10 % too many weigh the same in every bucket.
    ones, slopes = 1 / taken, volume / taken
    if len(volume) > 1:
        line = np.linalg.lstsq(np.stack([ones, slopes], 1), np.ones(len(volume)), rcond=None)[0]
        if (line >= 0).all():
            return Line(*(float(f"{x:.12g}") for x in line))
        if line[1] < 0:
            return Line(float(ones.sum() / (ones @ ones)), 0.0)
    return Line(0.0, float(slopes.sum() / (slopes @ slopes)))


class Learnt(NamedTuple):
    """A bucket that was learnt.

    Attributes:
        sizes: Its size of each variable.
        why: Why it was made.
        compile_seconds: What making it has cost.
        calls: The calls that it is the best bucket of.
        saved_seconds: What it has saved beside the other buckets, if they had been there from the
            first call; None if no other holds all its calls.
    """

    sizes: Bucket
    why: str
    compile_seconds: float
    calls: int
    saved_seconds: float | None


class Learner:
    """Chooses the buckets of one program.

    A better bucket is made when the seconds that it would have saved so far reach what it costs:
    the rule by which one buys skis instead of renting them (Karlin, Manasse, Rudolph and Sleator,
    Competitive snoopy caching, 1988), for several buckets at once. Calls of the future are expected
    to be like those of the past, and twice as many.

    Args:
        most: The largest number of buckets.
        rounded: Rounds the sizes of a call up, for a bucket with room above.
        fits: Whether sizes may be a bucket.
        fixed: Positions of variables whose sizes are given; a bucket holds no other ones.
        known: Buckets that are there at the beginning, and what compiling them has cost.
    """

    def __init__(
        self,
        most: int,
        rounded: Callable[[Bucket], Bucket],
        fits: Callable[[Bucket], bool] = lambda bucket: True,
        fixed: Collection[int] = (),
        known: Mapping[Bucket, float] | None = None,
    ) -> None:
        self._most, self._rounded, self._fits, self._fixed = most, rounded, fits, fixed
        self._buckets = dict(known or {})
        self._why = dict.fromkeys(self._buckets, "read from a file")
        self._planned: list[Bucket] = []
        self._compiles: list[float] = list(self._buckets.values())
        self._ran: dict[Bucket, list[float]] = {}
        self._counts: dict[Bucket, int] = {}
        self._calls, self._step = 0, 1
        self._look: float = _FIRST_LOOK
        self._reason = "it holds all first examples"

    def _holds(self, bucket: Bucket, sizes: Bucket) -> bool:
        return all(
            n == m if i in self._fixed else n >= m
            for i, (n, m) in enumerate(zip(bucket, sizes, strict=True))
        )

    def bucket(self, sizes: Bucket) -> Bucket:
        """The bucket of a call: the smallest that is there or planned, or a new one."""
        holding = [b for b in (*self._buckets, *self._planned) if self._holds(b, sizes)]
        if holding:
            return min(holding, key=math.prod)
        return self._rounded(sizes)

    def expect(self, sizes: Bucket) -> None:
        """Plan a first bucket that holds these sizes."""
        if not self._buckets and not self._calls and self._fits(self._rounded(sizes)):
            self._planned = [self._rounded(sizes)]

    def has(self, bucket: Bucket) -> bool:
        """Whether a bucket is there."""
        return bucket in self._buckets

    def why(self, bucket: Bucket) -> str:
        """Why a bucket is there, or would be made."""
        if bucket in self._why:
            return self._why[bucket]
        if bucket not in self._planned:
            return "no bucket held a call"
        return self._reason

    def compiled(self, bucket: Bucket, seconds: float) -> None:
        """Note that a bucket is there, and what it has cost."""
        if bucket not in self._buckets:
            self._why[bucket] = self.why(bucket)
            self._buckets[bucket] = seconds
            self._compiles.append(seconds)
            self._planned = [b for b in self._planned if b != bucket]

    def give_up_plans(self) -> None:
        """Make no bucket that is not there yet, but where none holds a call."""
        self._planned = []

    def gone(self, bucket: Bucket) -> None:
        """Note that a bucket is no longer there."""
        self._buckets.pop(bucket, None)
        self._why.pop(bucket, None)

    def wants_seconds(self, bucket: Bucket) -> bool:
        """Whether it is not well known yet what running a bucket costs."""
        return len(self._ran.get(bucket, ())) < _TIMED

    def ran(self, bucket: Bucket, seconds: float) -> None:
        """Note what a call in a bucket has cost."""
        self._ran.setdefault(bucket, []).append(seconds)

    def count(self, sizes: Bucket, calls: int = 1) -> None:
        """Count calls."""
        self._calls += calls
        step = self._step
        rounded = enumerate(-(-n // step) * step for n in sizes)
        place = tuple(sizes[i] if i in self._fixed else n for i, n in rounded)
        self._counts[place] = self._counts.get(place, 0) + calls
        if len(self._counts) > MOST_SIZES and any(
            n > step for point in self._counts for i, n in enumerate(point) if i not in self._fixed
        ):
            self._step *= 2
            before, self._counts = self._counts, {}
            self._calls -= sum(before.values())
            for sizes, calls in before.items():
                self.count(sizes, calls)

    @property
    def is_due(self) -> bool:
        """Whether there were enough calls for another `look`."""
        return self._calls >= self._look

    @property
    def until_look(self) -> int:
        """After how many calls `look` is to be asked again."""
        return max(1, math.ceil(self._look) - self._calls)

    def look(self, may_add: bool = True) -> bool:
        """Look for better buckets. Returns whether some were planned, or given up."""
        if not self._ran:  # it is not known yet what calls cost
            return False
        self._look = max(self._calls + 1, self._calls * _NEXT_LOOK)
        before, self._planned = self._planned, []
        if may_add and self._compiles and len(self._buckets) < self._most:
            self._planned = self._better()
        self._reason = f"would have paid after {self._calls} calls"
        return self._planned != before

    @property
    def line(self) -> Line:
        """What running a bucket costs."""
        return fitted_line({math.prod(b): min(s) for b, s in self._ran.items()})

    def _better(self) -> list[Bucket]:
        """The buckets that would pay: the best one beside those chosen before, again and again."""
        line, price = self.line, sum(self._compiles) / len(self._compiles)
        points, counts = np.array(list(self._counts)), np.array(list(self._counts.values()), float)
        calls = counts * (max(self._calls, _LEAST_EXPECTED) / self._calls)

        def seconds(buckets: Ints) -> Floats:
            """What each call costs in each bucket; infinite where it does not fit."""
            holds = np.ones((len(buckets), len(points)), bool)
            for i in range(points.shape[1]):
                bound, size = buckets[:, i, None], points[None, :, i]
                holds &= bound == size if i in self._fixed else bound >= size
            return np.where(holds, line.at(np.prod(buckets.astype(float), 1))[:, None], np.inf)

        # Where a bucket takes longer than the line says, smaller ones in its place do so, too.
        largest = np.prod(points.max(0).astype(float))
        base, shares = np.full(len(points), line.at(largest) + price), np.ones(len(points))
        for bucket, costs in zip(
            self._buckets, seconds(np.array(list(self._buckets))), strict=True
        ):
            ran, closer = self._ran.get(bucket), costs < base
            base[closer] = costs[closer]
            shares[closer] = min(ran) / line.at(math.prod(bucket)) if ran else 1.0
        base *= shares
        # Nothing is better than no padding at all.
        least = line.at(np.prod(points.astype(float), 1)) * shares
        if (base - least) @ calls <= price:
            return []
        candidates = self._candidates(points, counts)
        if not len(candidates):
            return []
        costs = seconds(candidates) * shares
        chosen: list[int] = []

        def best(now: Floats) -> tuple[int, float]:
            """The candidate that saves most beside others, and what it saves."""
            gains = np.maximum(now - costs, 0) @ calls - price
            place = int(gains.argmax())
            return place, float(gains[place])

        def with_others(others: Sequence[int]) -> Floats:
            return np.minimum(base, costs[list(others)].min(0)) if others else base

        while len(chosen) + len(self._buckets) < self._most:
            place, gain = best(with_others(chosen))
            if gain <= 0:
                break
            chosen.append(place)
        for i in (i for _ in range(2) for i in range(len(chosen))):
            if i < len(chosen):  # each again, beside those that were chosen after it
                others = [*chosen[:i], *chosen[i + 1 :]]
                place, gain = best(with_others(others))
                chosen = [*others[:i], place, *others[i:]] if gain > 0 else others
        return [tuple(map(int, candidates[place])) for place in chosen]

    def _candidates(self, points: Ints, counts: Floats) -> Ints:
        """The buckets to choose from: combinations of sizes at even shares of the calls."""
        most = min(_MOST_OF_ONE, int(_MOST_CANDIDATES ** (1 / points.shape[1])))
        axes = []
        for column in points.T:
            order = np.argsort(column, kind="stable")
            share = np.cumsum(counts[order]) / counts.sum()
            places = np.searchsorted(share, np.arange(1, most + 1) / most - 1e-9)
            axes.append(sorted({int(column[order[min(i, len(order) - 1)]]) for i in places}))
        candidates = [
            b for b in itertools.product(*axes) if b not in self._buckets and self._fits(b)
        ]
        return np.array(candidates)

    def learnt(self) -> list[Learnt]:
        """The buckets that are there, the smallest first."""
        ordered = sorted(self._buckets, key=math.prod)
        line = self.line if self._ran else Line(0.0, 0.0)
        calls: dict[Bucket, int] = dict.fromkeys(ordered, 0)
        saved: dict[Bucket, float] = dict.fromkeys(ordered, 0.0)
        for sizes, count in self._counts.items():
            holding = [b for b in ordered if self._holds(b, sizes)]
            if holding:
                calls[holding[0]] += count
                next_seconds = line.at(math.prod(holding[1])) if len(holding) > 1 else math.inf
                saved[holding[0]] += count * (next_seconds - line.at(math.prod(holding[0])))
        return [
            Learnt(
                *(b, self._why[b], self._buckets[b], calls[b]),
                saved[b] if math.isfinite(saved[b]) else None,
            )
            for b in ordered
        ]
