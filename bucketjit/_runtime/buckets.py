"""Chooses the bucket of a call, and handles sizes beyond the largest bucket.

Per variable such a size raises, is extended to further buckets, or runs at its exact size; see
`Overflow`. `bucketjit._runtime.decisions` turns the result into a decision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager
from typing import Any, Protocol

import cachetools

from bucketjit import strategies
from bucketjit._compile.requests import Requests
from bucketjit._config import Config, Overflow
from bucketjit._ir.interface import Interface
from bucketjit._ir.program import Program
from bucketjit._jax.arrays import other_platforms
from bucketjit._runtime.learning.learning import Learning, rounded_up
from bucketjit._tracing.call import Call
from bucketjit.errors import BucketOverflowError
from bucketjit.strategies.base import Strategy, checked_bucket
from bucketjit.strategies.rounding import extended

_CUT = 1024  # cut buckets remembered per program, see `_cut_bucket`


# What compilers compute fast, by platform and whether an attention meets the size: the smallest
# bucket, what steps are multiples of, and why. The table is in ``docs/accelerators.md``.
_FAST = {
    ("tpu", False): (16, 8, "smaller sizes, and those between multiples of 8, save no cycles"),
    ("tpu", True): (128, 128, "an attention is one fused kernel at multiples of 128"),
    ("gpu", False): (8, 8, "matrix products take multiples of 8"),
}
_FAST["gpu", True] = _FAST["gpu", False]


def on_platforms(
    strategy: Strategy, variable: str, program: Interface, platforms: Set[str]
) -> tuple[Strategy, str]:
    """A strategy whose first bucket and steps fit a platform, and why; else as it is.

    What the user has said stays: ``min``, ``multiple_of``, and a ``max`` that is no such multiple.
    """
    platform = "gpu" if platforms <= {"cuda", "rocm", "gpu"} else min(platforms)
    ladder = strategies.Pow2() if isinstance(strategy, strategies.Auto) else strategy
    if not isinstance(program, Program) or not isinstance(
        ladder, strategies.Pow2 | strategies.Linear
    ):
        return strategy, ""
    from bucketjit._masking.padding_plan import planned

    key = platform, variable in planned(program.jaxpr).attended
    least, multiple, reason = _FAST.get(key, (1, 1, ""))
    multiple = 1 if isinstance(ladder, strategies.Pow2) else multiple
    is_free = (ladder.min, ladder.multiple_of) == (1, 1) and not (ladder.max or 0) % multiple
    if not reason or not is_free:
        return strategy, ""
    least = min(least, ladder.max or least)
    fitted = dataclasses.replace(ladder, min=least, multiple_of=multiple)
    return fitted, f"{variable}: on a {platform.upper()}, {reason}"


def padded_sizes(
    config: Config,
    fitted: Mapping[str, Strategy],
    multiples: Mapping[str, int],
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """The bucket of each variable, a multiple of what meshes and kernels demand."""
    bucket = {v: padded_size(config, v, n, fitted.get(v)) for v, n in sizes.items()}
    return rounded_up(bucket, multiples) if multiples else bucket


def padded_size(config: Config, variable: str, n: int, strategy: Strategy | None = None) -> int:
    strategy = strategy or config.strategy_of(variable)
    try:
        return checked_bucket(strategy, variable, n)
    except BucketOverflowError as error:
        match config.overflow_per_dim.get(variable, config.overflow):
            case Overflow.EXTEND:
                return checked_bucket(extended(strategy, error.largest), variable, n)
            case Overflow.EXACT:
                return n
        raise


def bucket_or_size(
    config: Config, variable: str, n: int, strategy: Strategy | None = None
) -> tuple[bool, int]:
    """The bucket of one variable, if its size alone decides it."""
    try:
        return True, padded_size(config, variable, n, strategy)
    except Exception:  # the decision on the call raises it again
        return False, n


class ChoosesBuckets(Protocol):
    """Chooses the bucket of each call: by strategies, or among fixed ones, as those of a file.

    All but the choice has a default, which is that of fixed buckets.
    """

    def of(self, program: Interface, call: Call, learns: bool = True) -> dict[str, int]:
        """The padded size of each variable of a call; without what was learnt, by strategies."""

    def beyond(self, program: Interface, sizes: Mapping[str, int]) -> tuple[str, bool] | None:
        """Why some sizes are beyond their largest bucket and stay exact, in words; or None.

        And whether no variable is padded, so that masks are not needed.
        """
        return None

    def learning(
        self, program: Interface | None, call: Call | None = None, of_rows: bool = False
    ) -> Learning | None:
        """What learns the buckets of a program; None if nothing does.

        Without a call, None too if none was served yet. Rows of batches have other buckets than
        calls: they have executables of their own.
        """
        return None

    def why(self, program: Interface, call: Call, bucket: Mapping[str, int]) -> str:
        """Why a bucket was learnt, or which of its sizes fit the device of a call; or ``""``."""
        return ""


class Buckets:
    """Chooses the bucket of each call of one configuration; what it learns goes with a program."""

    def __init__(
        self, config: Config, lock: AbstractContextManager[Any], requests: Requests
    ) -> None:
        self._config, self._requests = config, requests
        self._learns = config.learns
        self._learning = weakref.WeakKeyDictionary[Interface, dict[bool, Learning | None]]()
        self._lock = lock
        self._cut: weakref.WeakKeyDictionary[Interface, Any] = weakref.WeakKeyDictionary()
        self._largest = weakref.WeakKeyDictionary[Interface, dict[Any, dict[str, int]]]()
        self._demanded = weakref.WeakKeyDictionary[Interface, Mapping[str, int]]()

    def learning(
        self, program: Interface | None, call: Call | None = None, of_rows: bool = False
    ) -> Learning | None:
        if not self._learns or program is None:
            return None
        with self._lock:
            learners = self._learning.setdefault(program, {})
            if call is not None and of_rows not in learners:
                learners[of_rows] = self._learner(program, call, of_rows)
            return learners.get(of_rows)

    def _learner(self, program: Interface, call: Call, of_rows: bool) -> Learning | None:
        """What is to learn the buckets of a program; None if no variable has learnt buckets."""
        strategies_of = {v: self._config.strategy_of(v) for v in call.sizes}
        auto = {
            v: strategy
            for v, strategy in strategies_of.items()
            if isinstance(strategy, strategies.Auto)
        }
        if not auto or program.grown:  # results that come back need room: a power of two has it
            return None
        most = max(strategy.buckets for strategy in auto.values())
        most = min(most, self._config.maxsize or most)
        multiples, fitted = self._multiples(program, call), self._fitted(program, call)
        rounded = functools.partial(padded_sizes, self._config, fitted, multiples)
        files = () if of_rows else self._requests.kept(call)
        kept = [(record.sizes, record.seconds) for record in files]
        return Learning(program, tuple(call.sizes), tuple(auto), most, rounded, kept, multiples)

    def _multiples(self, program: Interface, call: Call) -> Mapping[str, int]:
        """What meshes and kernels demand of the size of each variable."""
        multiples = self._demanded.get(program)
        if multiples is None:
            multiples = call.signature.shardings.multiples(call.tokens, program)
            self._demanded[program] = multiples
        return multiples

    def _fitted(self, program: Interface, call: Call) -> dict[str, Strategy]:
        """The strategies that fit the devices of a call where that makes a difference."""
        if not (platforms := other_platforms(call.leaves, call.signature.target)):
            return {}
        every = {v: self._config.strategy_of(v) for v in call.sizes}
        return {v: on_platforms(s, v, program, platforms)[0] for v, s in every.items()}

    def why(self, program: Interface, call: Call, bucket: Mapping[str, int]) -> str:
        learning, reasons = self.learning(program), []
        platforms = other_platforms(call.leaves, call.signature.target)
        multiples = self._multiples(program, call)
        for v, n in call.sizes.items() if platforms or multiples else ():
            fitted, reason = self._config.strategy_of(v), ""
            if platforms:
                fitted, reason = on_platforms(fitted, v, program, platforms)
            usual, suited = (bucket_or_size(self._config, v, n, s)[1] for s in (None, fitted))
            even = rounded_up({v: suited}, multiples)[v]
            reasons += [reason] if usual != suited and even == bucket[v] else []
            if suited != even == bucket[v]:
                reasons.append(f"{v}: a kernel or a mesh takes multiples of {multiples[v]}")
        learnt = "" if learning is None else learning.why(bucket)
        return "; ".join(filter(None, (learnt, *reasons)))

    def of(self, program: Interface, call: Call, learns: bool = True) -> dict[str, int]:
        """The padded size of each variable of a call, unfitted sizes of its program included."""
        bucket = self.chosen(program, call, learns)
        if not program.unfitted:
            return bucket
        # No guard bounds an unfitted size over the bucket, so the bucket has room for the largest
        # one seen in it. Growing at least twofold keeps the number of compiles logarithmic.
        there = program.unfitted_sizes(bucket) or {}
        with self._lock:
            seen = self._largest.setdefault(program, {}).setdefault(tuple(bucket.values()), {})
            for name, size in zip(program.unfitted, call.size_constants.sizes, strict=True):
                largest = max(there.get(name, 0), seen.get(name, 0))
                seen[name] = largest if size <= largest else max(size, 2 * largest)
            return {**bucket, **seen}

    def beyond(self, program: Interface, sizes: Mapping[str, int]) -> tuple[str, bool] | None:
        beyond: dict[str, int] = {}
        exact, policies = 0, self._config.overflow_per_dim
        for variable, n in sizes.items():
            strategy = self._config.strategy_of(variable)
            if isinstance(strategy, strategies.Exact):
                exact += 1
            elif policies.get(variable, self._config.overflow) is Overflow.EXACT:
                try:
                    checked_bucket(strategy, variable, n)
                except BucketOverflowError as error:
                    beyond[variable] = error.largest
                    exact += 1
        if not beyond:
            return None
        words = ", ".join(f"{v} is beyond its largest bucket {n}" for v, n in beyond.items())
        return f"the size of {words} (overflow='exact')", exact == len(sizes)

    def chosen(self, program: Interface, call: Call, learns: bool = True) -> dict[str, int]:
        """The padded size of each variable, unfitted sizes left out."""
        sizes = call.sizes
        learning = self.learning(program, call) if learns else None
        fitted, multiples = self._fitted(program, call), self._multiples(program, call)
        for strategies_of in (fitted, {}) if fitted else ({},):
            rounded = functools.partial(padded_sizes, self._config, strategies_of, multiples)
            bucket = rounded(sizes) if learning is None else learning.bucket(sizes)
            if growth := program.growth(bucket):
                # The results have to fit into the buffers of a bucket, so its largest size is
                # smaller.
                longer = {v: n + growth.get(v, 0) for v, n in sizes.items()}
                with contextlib.suppress(BucketOverflowError):
                    roomy = rounded(longer)
                    bucket = {v: n - growth.get(v, 0) for v, n in roomy.items()}
            if program.fits(bucket):
                return bucket
        key = tuple(sizes.items())
        with self._lock:
            cuts = self._cut.setdefault(program, cachetools.LRUCache(_CUT))
            if key not in cuts:
                cuts[key] = _cut_bucket(program, sizes, bucket)
            return cuts[key]


def _cut_bucket(
    program: Interface, sizes: Mapping[str, int], bucket: Mapping[str, int]
) -> dict[str, int]:
    """A smaller bucket that satisfies the guards.

    One variable is lowered at a time, from its bucket down to its logical size, so calls of
    several logical sizes get the same cut bucket. If no variable alone helps, the call keeps its
    logical sizes.
    """
    for variable, size in sizes.items():
        trial = dict(bucket)
        for n in range(bucket[variable], size - 1, -1):
            trial[variable] = n
            if program.fits(trial):
                return trial
    return dict(sizes)
