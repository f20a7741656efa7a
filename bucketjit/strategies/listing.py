"""Lists all buckets of a strategy that has a largest one."""

from __future__ import annotations

from typing import Any

from bucketjit.strategies._extended import Extended
from bucketjit.strategies.base import Changing, Ladder, Strategy
from bucketjit.strategies.boundaries import Boundaries
from bucketjit.strategies.multiple_of import MultipleOf

MOST_LISTED = 65_536  # buckets of a strategy that are listed at most


def buckets_of(strategy: object) -> tuple[int, ...] | None:
    """List the buckets of a strategy, to compile them before calls need them.

    A strategy that continues beyond its planned buckets (an `Optimal` with ``beyond``, say) lists
    only the planned ones. One that changes (`Adaptive`) lists those of its present plan.

    Args:
        strategy: A strategy.

    Returns:
        The buckets of the sizes from 1 on, in increasing order. None if there is no largest one
        (``Pow2()``, `Exact`), if it is not known (a strategy of your own), or if there are more
        than 65,536.

    Examples:
        >>> from bucketjit.strategies import Boundaries, Linear, MultipleOf, Pow2
        >>> buckets_of(Pow2(min=8, max=48))
        (8, 16, 32, 48)
        >>> buckets_of(MultipleOf(Boundaries([10, 20, 35]), 8))
        (16, 24, 40)
        >>> buckets_of(Linear(16)) is None
        True
    """
    plan = _planned(strategy)
    largest = _largest(plan)
    if largest is None:
        return None
    found: list[int] = []
    while not found or found[-1] < largest:
        if len(found) == MOST_LISTED:
            return None
        found.append(plan.bucket(found[-1] + 1 if found else 1))
    return tuple(found)


def _planned(strategy: Any) -> Strategy:
    """The present plan of a strategy, without an extension beyond its largest bucket."""
    if isinstance(strategy, Changing):
        return _planned(strategy.plan)
    if isinstance(strategy, Extended):
        return _planned(strategy.inner)
    if isinstance(strategy, MultipleOf):
        return MultipleOf(_planned(strategy.inner), strategy.multiple)
    return strategy


def _largest(strategy: Strategy) -> int | None:
    """A size whose bucket is the largest one; None if there is none or it is not known."""
    if isinstance(strategy, MultipleOf):
        return _largest(strategy.inner)
    if isinstance(strategy, Ladder):
        return strategy.max
    return strategy.boundaries[-1] if isinstance(strategy, Boundaries) else None
