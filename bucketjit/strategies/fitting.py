"""Checks the options of the strategies that are fitted to sizes: `Optimal` and `Joint`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from bucketjit.strategies._search.histogram import Sizes, joint_histogram, largest_bucket
from bucketjit.strategies._search.table import Table, lay_out
from bucketjit.strategies.base import Strategy, checked_strategy, positive_int
from bucketjit.strategies.multiple_of import MultipleOf

_T = TypeVar("_T")


class JointProblem(NamedTuple):
    """The checked arguments of a fit of several variables.

    Attributes:
        dims: The names of the variables.
        table: The candidates for buckets, with their costs.
        k: The largest number of executables.
        beyond: Strategies for larger sizes, by variable.
    """

    dims: tuple[str, ...]
    table: Table
    k: int
    beyond: Mapping[str, Strategy]


def joint_problem(
    sizes: Mapping[str, Sizes],
    k: int,
    cost: Callable[..., float] | None,
    multiple_of: Mapping[str, int] | None,
    max: Mapping[str, int] | None,
    beyond: Mapping[str, Strategy] | None,
) -> JointProblem:
    """Check the arguments of `Optimal.fit_joint` and `Joint.fit`, and lay out the candidates.

    Args:
        sizes: See `Joint.fit`.
        k: See `Joint.fit`.
        cost: See `Joint.fit`.
        multiple_of: See `Joint.fit`.
        max: See `Joint.fit`.
        beyond: See `Joint.fit`.

    Returns:
        The problem.

    Raises:
        StrategyContractError: See `Joint.fit`.
        TypeError: See `Joint.fit`.
        ValueError: See `Joint.fit`.
    """
    k = positive_int("k", k)
    seen = joint_histogram(sizes)
    dims = seen.dims
    multiple_of = _by_dim("multiple_of", multiple_of, dims)
    max = _by_dim("max", max, dims)
    beyond = _by_dim("beyond", beyond, dims)
    multiples, largest, rules = [], [], {}
    for dim, top in zip(dims, seen.largest, strict=True):
        multiple = positive_int(f"multiple_of[{dim!r}]", multiple_of.get(dim, 1))
        limit = positive_int(f"max[{dim!r}]", max[dim]) if dim in max else None
        bound = largest_bucket(f"max[{dim!r}]", top, multiple, limit)
        # Sizes seen beyond the largest bucket are not fitted to; `beyond` must serve them.
        check_beyond(f"sizes[{dim!r}]", top, bound, beyond.get(dim))
        if dim in beyond:
            rules[dim] = rounded_beyond(checked_strategy(f"beyond[{dim!r}]", beyond[dim]), multiple)
        multiples.append(multiple)
        largest.append(bound)
    return JointProblem(dims, lay_out(seen, cost, multiples, largest), k, rules)


def _by_dim(name: str, option: Mapping[str, _T] | None, dims: tuple[str, ...]) -> Mapping[str, _T]:
    """An option by variable, checked."""
    if option is None:
        return {}
    if not isinstance(option, Mapping) or not option.keys() <= set(dims):
        raise TypeError(
            f"{name} must be a mapping from some of the variables {list(dims)}, not {option!r}"
        )
    return option


def check_beyond(name: str, seen: int, largest: int, beyond: Strategy | None) -> None:
    """Check that every size has a bucket.

    Args:
        name: Name of the sizes in messages.
        seen: The largest size seen.
        largest: The largest bucket.
        beyond: The strategy for larger sizes, or None.

    Raises:
        ValueError: If ``seen`` is larger than ``largest`` and there is no ``beyond``.
    """
    if beyond is None and seen > largest:
        raise ValueError(
            f"{name} must not be beyond max ({largest}), not {seen}; leave them out, raise max, "
            "or give the strategy for them by beyond"
        )


def rounded_beyond(beyond: Strategy, multiple_of: int) -> Strategy:
    """The strategy for sizes beyond the last boundary, its buckets rounded up to multiples."""
    return beyond if multiple_of == 1 else MultipleOf(beyond, multiple_of)
