"""The bucket of a call, and what happens to sizes beyond the largest one.

Those are an error, go on by a rule, run at their exact size, or run in chunks.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import cachetools

from bucketjit import strategies
from bucketjit._config import Config, Overflow
from bucketjit._errors import BucketOverflowError
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._tracing.program import Program
from bucketjit.strategies.base import checked_bucket, checked_joint
from bucketjit.strategies.extended import extended

_CUT = 1024  # sizes of a program whose cut bucket is remembered


def policy_of(config: Config, variable: str) -> Overflow:
    """What happens to sizes of a variable that are beyond its largest bucket."""
    return config.overflow_per_dim.get(variable, config.overflow)


def padded_sizes(config: Config, sizes: Mapping[str, int]) -> dict[str, int]:
    """The bucket of each variable.

    Raises:
        BucketOverflowError: A size is beyond the largest bucket, and its policy is to raise or
            to split.
    """
    planned, _ = _planned(config, sizes)
    return {v: planned[v] if v in planned else padded_size(config, v, n) for v, n in sizes.items()}


def _planned(
    config: Config, sizes: Mapping[str, int]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The buckets that the joint plan chooses; and of those left as they are, the largest."""
    plan = config.plan
    if plan is None or any(dim not in sizes for dim in plan.dims):
        return {}, {}
    grows = tuple(d for d in plan.dims if policy_of(config, d) is Overflow.EXTEND)
    if grows and hasattr(plan, "extended"):
        plan = plan.extended(grows)
    wanted = {dim: sizes[dim] for dim in plan.dims}
    beyond: dict[str, int] = {}
    while True:
        try:
            chosen = checked_joint(plan, wanted)
        except BucketOverflowError as error:
            dim = error.dim
            if dim is None or dim in beyond or policy_of(config, dim) is not Overflow.EXACT:
                raise
            beyond[dim] = wanted[dim] = error.largest
            continue
        return {**chosen, **{dim: sizes[dim] for dim in beyond}}, beyond


def padded_size(config: Config, variable: str, n: int) -> int:
    """The bucket of one variable.

    Raises:
        BucketOverflowError: The size is beyond the largest bucket, and its policy is to raise or
            to split.
    """
    strategy = config.strategy_of(variable)
    try:
        return checked_bucket(strategy, variable, n)
    except BucketOverflowError:
        match policy_of(config, variable):
            case Overflow.EXTEND:
                return checked_bucket(extended(strategy), variable, n)
            case Overflow.EXACT:
                return n
        raise


def bucket_or_size(config: Config, variable: str, n: int) -> tuple[bool, int]:
    """Whether the size of one variable, by itself, has a bucket; and that bucket, or the size."""
    if config.plan is not None and variable in config.plan.dims:
        return False, n
    try:
        return True, padded_size(config, variable, n)
    except Exception:  # it is told of where the size is looked at
        return False, n


class Exactly(NamedTuple):
    """A call with variables at their exact size.

    Attributes:
        reason: Why, in words.
        wholly: Whether no variable is padded, so that nothing need be masked.
    """

    reason: str
    wholly: bool


def exactly(config: Config, sizes: Mapping[str, int]) -> Exactly | None:
    """Which of these sizes are beyond the largest bucket and left as they are; None if none is."""
    planned, beyond = _planned(config, sizes)
    found = dict(beyond)
    exact = len(found)
    for variable, n in sizes.items():
        if variable in planned:
            continue
        strategy = config.strategy_of(variable)
        if isinstance(strategy, strategies.Exact):
            exact += 1
        elif policy_of(config, variable) is Overflow.EXACT:
            try:
                checked_bucket(strategy, variable, n)
            except BucketOverflowError as error:
                found[variable] = error.largest
                exact += 1
    if not found:
        return None
    told = ", ".join(f"{v} is beyond its largest bucket {n}" for v, n in found.items())
    return Exactly(f"the size of {told} (Overflow.EXACT)", exact == len(sizes))


class Buckets:
    """Chooses the bucket of each call of one configuration.

    Args:
        config: Names the strategies.
        lock: Held while something is remembered of a program.
    """

    def __init__(self, config: Config, lock: AbstractContextManager[Any]) -> None:
        self._config = config
        self._lock = lock
        self._cut: weakref.WeakKeyDictionary[Program, Any] = weakref.WeakKeyDictionary()
        self._largest: weakref.WeakKeyDictionary[Program, dict[Any, dict[str, int]]]
        self._largest = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Forget what was remembered of programs."""
        self._cut.clear()
        self._largest.clear()

    def of(self, program: Program, call: ResolvedCall) -> dict[str, int]:
        """The padded size of each variable of a call, those of its program's own included.

        Raises:
            BucketOverflowError: A size is beyond the largest bucket, and its policy is to raise or
                to split.
        """
        bucket = self.chosen(program, call.sizes)
        if not program.unfitted:
            return bucket
        # Nothing bounds these over the bucket, so room is made for the largest seen in it.
        there = program.unfitted_sizes(bucket) or {}
        with self._lock:
            seen = self._largest.setdefault(program, {}).setdefault(tuple(bucket.values()), {})
            for name, size in zip(program.unfitted, call.size_constants.sizes, strict=True):
                known = max(there.get(name, 0), seen.get(name, 0))
                seen[name] = known if size <= known else max(size, 2 * known)
            return {**bucket, **seen}

    def chosen(self, program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
        """The padded size of each variable: what the strategies choose, or the guards allow of it.

        Raises:
            BucketOverflowError: See `of`.
        """
        bucket = padded_sizes(self._config, sizes)
        if program.fits(bucket):
            return bucket
        key = (*sizes.items(), *bucket.items())  # a strategy may change its mind
        with self._lock:
            known = self._cut.setdefault(program, cachetools.LRUCache(_CUT))
            if key not in known:
                known[key] = _cut_bucket(program, sizes, bucket)
            found: dict[str, int] = known[key]
            return found


def _cut_bucket(
    program: Program, sizes: Mapping[str, int], bucket: Mapping[str, int]
) -> dict[str, int]:
    """The largest sizes up to the bucket that satisfy the guards: one for all its sizes."""
    for variable, size in sizes.items():
        trial = dict(bucket)
        for n in range(bucket[variable], size - 1, -1):
            trial[variable] = n
            if program.fits(trial):
                return trial
    return dict(sizes)
