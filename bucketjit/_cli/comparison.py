"""Makes the bucket plans that the command ``plan`` compares."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bucketjit.errors import StrategyError
from bucketjit.strategies import (
    Assessment,
    BoundedWaste,
    Exponential,
    Joint,
    Linear,
    Optimal,
    Pow2,
    SizeClasses,
    Strategy,
    assess,
    assess_joint,
)

_MOST_RUNGS = 1024  # rungs of a ladder that are tried for several variables


class Plan(NamedTuple):
    """A bucket plan, and how many executables and how much padding it needs.

    Attributes:
        name: Name of the plan.
        strategy: The strategy, the strategies by variable, or the joint plan.
        assessment: Number of executables, and cost with and without padding.
        buckets: The buckets that are used, each with a size for every variable.
    """

    name: str
    strategy: Strategy | Mapping[str, Strategy] | Joint
    assessment: Assessment
    buckets: list[tuple[int, ...]]


def compare(sizes: list[int], k: int, multiple_of: int) -> list[Plan]:
    """Plans for one variable.

    Args:
        sizes: The sizes seen, each at least 1.
        k: The largest number of executables.
        multiple_of: Every bucket is a multiple of this.

    Returns:
        The ladders without parameters, each other kind of ladder with about ``k`` rungs, the best
        plan with ``k`` executables, and the best plan with as many as ``Pow2`` needs.
    """

    def plan(name: str, strategy: Strategy) -> Plan:
        buckets = sorted({strategy.bucket(n) for n in set(sizes)})
        return Plan(name, strategy, assess(strategy, sizes), [(b,) for b in buckets])

    smallest, largest = min(sizes), max(sizes)
    pow2 = plan("pow2", Pow2(multiple_of=multiple_of))
    plans = [pow2]
    ladders = {
        "ladder": SizeClasses(2, multiple_of=multiple_of),
        "linear": _linear(smallest, largest, k, multiple_of),
        "exponential": _exponential(smallest, largest, k, multiple_of),
        "bounded waste": _bounded_waste(smallest, largest, k, multiple_of),
    }
    for name, ladder in ladders.items():
        if ladder is not None:
            with contextlib.suppress(StrategyError):  # its last rung may exceed what a shape holds
                plans.append(plan(name, ladder))
    plans.append(plan("optimal", Optimal.fit(sizes, k, multiple_of=multiple_of)))
    if (as_many := pow2.assessment.executables) != k:
        optimal = Optimal.fit(sizes, as_many, multiple_of=multiple_of)
        plans.append(plan("optimal, as pow2", optimal))
    return plans


def frontier(sizes: list[int], most: int, multiple_of: int) -> list[Assessment]:
    """The assessments of the best plans with 1, 2, 3, ... executables.

    Args:
        sizes: The sizes seen, each at least 1.
        most: The largest number of executables; at most 64 are assessed.
        multiple_of: Every bucket is a multiple of this.

    Returns:
        The assessments, by number of executables.
    """
    numbers = range(1, min(most, 64) + 1)
    return [assess(Optimal.fit(sizes, k, multiple_of=multiple_of), sizes) for k in numbers]


def _linear(smallest: int, largest: int, k: int, multiple_of: int) -> Linear:
    """The ladder of ``k`` equal steps up to the largest size."""
    return Linear(-(-largest // k), multiple_of=multiple_of)


def _exponential(smallest: int, largest: int, k: int, multiple_of: int) -> Exponential:
    """The geometric ladder of ``k`` rungs from the smallest to the largest size."""
    if k == 1:
        return Exponential(2, min=largest, multiple_of=multiple_of)
    base = (largest / smallest) ** (1 / (k - 1))
    return Exponential(
        max(1.001, math.ceil(base * 1000) / 1000), min=smallest, multiple_of=multiple_of
    )


def _bounded_waste(smallest: int, largest: int, k: int, multiple_of: int) -> BoundedWaste | None:
    """The ladder of at most ``k`` rungs that keeps the least bound on padding, in whole percent.

    None if ``k`` rungs from the smallest to the largest size keep no bound below 100 %.
    """
    for percent in range(1, 100):
        strategy = BoundedWaste(percent / 100, min=smallest, multiple_of=multiple_of)
        bucket, count = strategy.bucket(smallest), 1
        while bucket < largest and count <= k:
            bucket, count = strategy.bucket(bucket + 1), count + 1
        if count <= k:
            return strategy
    return None


def compare_joint(
    sizes: Mapping[str, list[int]], k: int, multiples: Mapping[str, int]
) -> list[Plan]:
    """Plans for several variables.

    Args:
        sizes: The sizes seen of each variable, each at least 1.
        k: The largest number of executables.
        multiples: By variable, a number of which every bucket is a multiple.

    Returns:
        The ladders without parameters; of each other kind the ladders with at most ``k``
        combinations of rungs that waste least; the best boundaries for each variable; and the best
        joint plan.
    """
    calls = [dict(zip(sizes, call, strict=True)) for call in {*zip(*sizes.values(), strict=True)}]

    def plan(name: str, strategy: Mapping[str, Strategy] | Joint) -> Plan:
        if isinstance(strategy, Joint):
            buckets = {tuple(strategy.bucket_of(call).values()) for call in calls}
        else:
            buckets = {tuple(strategy[d].bucket(n) for d, n in call.items()) for call in calls}
        return Plan(name, strategy, assess_joint(strategy, sizes), sorted(buckets))

    def ladders(name: str, make: Callable[[int, int, int, int], Strategy | None]) -> list[Plan]:
        found = []
        # Bound the search: more rungs than calls, or than `_MOST_RUNGS`, hardly waste less.
        for counts in _shares(min(k, max(len(calls), _MOST_RUNGS)), len(sizes)):
            made = {
                dim: make(min(seen), max(seen), count, multiples[dim])
                for (dim, seen), count in zip(sizes.items(), counts, strict=True)
            }
            chosen = {dim: ladder for dim, ladder in made.items() if ladder is not None}
            if len(chosen) == len(made):
                with contextlib.suppress(StrategyError):  # as in `compare`
                    found.append(plan(name, chosen))
        return [min(found, key=lambda p: p.assessment.waste)] if found else []

    return [
        plan("pow2", {dim: Pow2(multiple_of=multiples[dim]) for dim in sizes}),
        plan("ladder", {dim: SizeClasses(2, multiple_of=multiples[dim]) for dim in sizes}),
        *ladders("linear", _linear),
        *ladders("exponential", _exponential),
        *ladders("bounded waste", _bounded_waste),
        plan("optimal grid", Optimal.fit_joint(sizes, k, multiple_of=multiples)),
        plan("joint", Joint.fit(sizes, k, multiple_of=multiples)),
    ]


def _shares(k: int, count: int) -> list[tuple[int, ...]]:
    """Numbers of rungs for each of ``count`` variables, with at most ``k`` combinations.

    Only maximal ones: no number can be raised without more than ``k`` combinations.
    """
    if count == 1:
        return [(k,)]
    firsts = sorted({k // (k // first) for first in range(1, k + 1)})
    return [(first, *rest) for first in firsts for rest in _shares(k // first, count - 1)]
