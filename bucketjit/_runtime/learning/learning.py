"""Learns the buckets of a program while calls are served, by `.learner`.

A call is counted, and may be timed, on the slow path. Handlers of the fast path count their own
calls. They share a clock: when it runs out, or when buckets have changed, a call takes the slow
path once more, and gets the bucket that is best by now.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from bucketjit._arrays.padded import Padded
from bucketjit._ir.interface import Interface
from bucketjit._runtime.counters import CallCounter
from bucketjit._runtime.fast_path.bucket_handler import Clock
from bucketjit._runtime.statistics import FrozenDict, LearntBucket

Sizes = Mapping[str, int]


def rounded_up(sizes: Sizes, multiples: Sizes) -> dict[str, int]:
    """Each size, or the next one that is a multiple."""
    return {v: n + -n % multiples.get(v, 1) for v, n in sizes.items()}


class Learning:
    """The buckets of one program, and what its calls have told.

    Args:
        program: The program. It is not kept alive.
        variables: The dimension variables.
        learnt: Those that buckets are learnt of; the others are rounded up by ``rounded``.
        most: The largest number of buckets that are learnt.
        rounded: Rounds all sizes up, each by its own strategy.
        kept: Buckets that are in files, and what compiling them has cost.
        multiples: What sizes are rounded up to multiples of, by variable, before they are counted.

    Attributes:
        clock: The clock of the handlers that are made now.
    """

    def __init__(
        self,
        program: Interface,
        variables: Sequence[str],
        learnt: Sequence[str],
        most: int,
        rounded: Callable[[Sizes], Sizes],
        kept: Sequence[tuple[Sizes, float]],
        multiples: Sizes,
    ) -> None:
        from bucketjit._runtime.learning.learner import Learner

        self._variables, self._rounded, self._multiples = tuple(variables), rounded, multiples
        self._fixed = [v for v in variables if v not in learnt]
        alive = weakref.ref(program)

        def fits(bucket: tuple[int, ...]) -> bool:
            program = alive()
            return program is not None and program.fits(self._named(bucket))

        self._learner = Learner(
            most,
            lambda sizes: tuple(rounded(self._named(sizes)).values()),
            fits,
            [self._variables.index(v) for v in self._fixed],
            {
                tuple(sizes[v] for v in variables): seconds
                for sizes, seconds in kept
                if sizes.keys() == set(variables)
            },
        )
        self.clock = Clock(self._learner.until_look)
        # What was read last of each call counter. It keeps none alive.
        self._lines: weakref.WeakKeyDictionary[CallCounter, int] = weakref.WeakKeyDictionary()

    def _named(self, sizes: tuple[int, ...]) -> dict[str, int]:
        return dict(zip(self._variables, sizes, strict=True))

    def _sizes_of(self, bucket: Sizes) -> tuple[int, ...]:
        return tuple(bucket[v] for v in self._variables)

    def _ordered(self, sizes: Sizes) -> tuple[int, ...]:
        if self._multiples:
            sizes = rounded_up(sizes, self._multiples)
        if self._fixed:
            rounded = self._rounded(sizes)
            sizes = {**sizes, **{v: rounded[v] for v in self._fixed}}
        return self._sizes_of(sizes)

    def bucket(self, sizes: Sizes) -> dict[str, int]:
        """The bucket of a call."""
        return self._named(self._learner.bucket(self._ordered(sizes)))

    def expect(self, *every: Sizes) -> None:
        """Choose a first bucket that holds calls of all these sizes."""
        self._learner.expect(tuple(map(max, zip(*map(self._ordered, every), strict=True))))

    def count(self, sizes: Sizes, calls: int = 1) -> None:
        """Count calls."""
        self._learner.count(self._ordered(sizes), calls)

    def look(self, may_compile: Callable[[], bool]) -> bool:
        """Look for better buckets if there were enough calls. Returns whether there are some."""
        self._read_counters()
        has_changed = self._learner.is_due and self._learner.look(may_compile())
        if has_changed:
            self.renew()
        self.clock.wind(self._learner.until_look)
        return has_changed

    def _read_counters(self, count_of: Callable[[CallCounter], int] = CallCounter.told) -> None:
        for line, before in list(self._lines.items()):
            calls = count_of(line)
            more = calls - before if calls >= before else calls  # they may have been reset
            if more:
                self._lines[line] = calls
                ((logical, _),) = line.like.logical
                self._learner.count(self._ordered(logical), more)

    def watch(self, line: CallCounter) -> None:
        """Count the calls that a counter counts."""
        self._lines[line] = 0

    def renew(self) -> None:
        """Let each handler that there is send its next call to the slow path."""
        self.clock.end()
        self.clock = Clock(self._learner.until_look)

    def give_up_plans(self) -> None:
        """Make no better bucket: nothing may be compiled."""
        self._learner.give_up_plans()

    def compiled(self, bucket: Sizes, seconds: float) -> None:
        """Note an executable, and what compiling it has cost."""
        sizes = self._sizes_of(bucket)
        if not self._learner.has(sizes):
            self._learner.compiled(sizes, seconds)
            self.renew()

    def gone(self, bucket: tuple[int, ...]) -> None:
        """Note that the executable of a bucket has left the cache."""
        self._learner.gone(bucket)
        self.renew()

    def wants_seconds(self, bucket: Sizes) -> bool:
        """Whether a call in a bucket is to be timed."""
        return self._learner.wants_seconds(self._sizes_of(bucket))

    def timed(
        self, lock: Any, bucket: Sizes, leaves: Any, run: Callable[[], Any], calls: int = 1
    ) -> Any:
        """Run a call, or several in one. If its bucket is timed, wait for arguments and results.

        The lock of the engine is held only to note the seconds.
        """
        if not self.wants_seconds(bucket):
            return run()
        _wait(leaves)
        began = time.perf_counter()
        result = run()
        _wait(result)
        seconds = (time.perf_counter() - began) / calls
        with lock:
            self._learner.ran(self._sizes_of(bucket), seconds)
        return result

    def why(self, bucket: Sizes) -> str:
        """Why a bucket is there, or would be made."""
        return self._learner.why(self._sizes_of(bucket))

    def learnt(self, count_of: Callable[[CallCounter], int]) -> list[LearntBucket]:
        """What was learnt of each bucket, by what counters tell."""
        self._read_counters(count_of)
        return [
            LearntBucket(FrozenDict(self._named(bucket.sizes)), *bucket[1:])
            for bucket in self._learner.learnt()
        ]


def _wait(values: Any) -> None:
    leaves = jax.tree_util.tree_leaves(values)
    jax.block_until_ready([x.array if isinstance(x, Padded) else x for x in leaves])
