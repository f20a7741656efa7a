"""A plan that chooses the buckets of several variables together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

from bucketjit.errors import BucketOverflowError
from bucketjit.strategies._extended import extended
from bucketjit.strategies._search.boxes import cheapest_boxes
from bucketjit.strategies._search.histogram import Sizes
from bucketjit.strategies.base import Strategy, checked_strategy, logical_size, positive_int
from bucketjit.strategies.exponential import Exponential
from bucketjit.strategies.fitting import joint_problem


@dataclasses.dataclass(frozen=True, repr=False)
class Joint:
    """Give the sizes of several variables one bucket together, from a list of such buckets.

    Boundaries for each variable make a grid, with an executable for every combination that occurs.
    The buckets of this list are placed where calls are, and there are never more than the list has.
    The bucket of some sizes is the first one in the list that holds them all, so a list that starts
    with the cheapest bucket gives the cheapest; `fit` makes such a list.

    The bucket ``bucket_of(n)`` of sizes ``n`` holds them and is its own bucket. In a list of `fit`,
    it costs no more than the bucket of larger sizes.

    Args:
        buckets: The buckets, the preferred one first: the same variables in each. The last one
            holds all others.
        beyond: The strategy for sizes beyond the last bucket, by variable. A call with such a
            size gets a bucket of that strategy for this variable, and the last bucket for the
            others. A variable without a strategy raises `BucketOverflowError`.

    Raises:
        StrategyContractError: If a ``beyond`` is no strategy.
        TypeError: If ``buckets`` is no sequence of mappings from names to ints.
        ValueError: If it is empty, has different variables, or a bucket is not positive, never
            used, or not held by the last one.

    Examples:
        >>> plan = Joint([{"b": 32, "s": 16}, {"b": 4, "s": 128}, {"b": 32, "s": 128}])
        >>> plan.bucket_of({"b": 3, "s": 17})
        {'b': 4, 's': 128}
        >>> plan.bucket_of({"b": 5, "s": 17})
        {'b': 32, 's': 128}
        >>> plan.bucket_of({"b": 5, "s": 129})
        Traceback (most recent call last):
            ...
        bucketjit.errors.BucketOverflowError: dimension 's' has size 129, beyond ...
    """

    dims: tuple[str, ...]
    buckets: tuple[tuple[int, ...], ...]
    beyond: tuple[Strategy | None, ...]

    # Written out because mappings go in, and tuples, which can be hashed, are kept.
    def __init__(
        self,
        buckets: Sequence[Mapping[str, int]],
        *,
        beyond: Mapping[str, Strategy] | None = None,
    ) -> None:
        wrong = isinstance(buckets, (str, bytes, Mapping)) or not isinstance(buckets, Sequence)
        if wrong or not all(isinstance(bucket, Mapping) for bucket in buckets):
            raise TypeError(
                "buckets must be a sequence of mappings from variables to sizes, such as "
                f"[{{'b': 8, 's': 64}}], not {buckets!r}"
            )
        if not buckets or not buckets[0]:
            raise ValueError(f"buckets must hold at least one bucket of a variable, not {buckets}")
        dims = tuple(buckets[0])
        rows: list[tuple[int, ...]] = []
        for i, bucket in enumerate(buckets):
            if bucket.keys() != set(dims):
                raise ValueError(
                    f"buckets[{i}] must have the variables {list(dims)}, not {list(bucket)}"
                )
            row = tuple(positive_int(f"buckets[{i}][{dim!r}]", bucket[dim]) for dim in dims)
            for j, before in enumerate(rows):
                if _holds(before, row):
                    raise ValueError(f"buckets[{i}] is never used: buckets[{j}] holds all it holds")
            rows.append(row)
        for i, row in enumerate(rows):
            if not _holds(rows[-1], row):
                raise ValueError(f"the last of the buckets must hold all others, not buckets[{i}]")
        rules = {} if beyond is None else beyond
        if not isinstance(rules, Mapping) or not rules.keys() <= set(dims):
            raise TypeError(
                f"beyond must map variables of {list(dims)} to strategies, not {rules!r}"
            )
        for dim, rule in rules.items():
            checked_strategy(f"beyond[{dim!r}]", rule)
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "buckets", tuple(rows))
        object.__setattr__(self, "beyond", tuple(rules.get(dim) for dim in dims))

    @classmethod
    def fit(
        cls,
        sizes: Mapping[str, Sizes],
        k: int = 12,
        *,
        cost: Callable[..., float] | None = None,
        multiple_of: Mapping[str, int] | None = None,
        max: Mapping[str, int] | None = None,
        beyond: Mapping[str, Strategy] | None = None,
    ) -> Self:
        """Find buckets that cost little for these sizes.

        One bucket always holds the largest size of every variable, so that every combination of
        sizes within the range has a bucket, seen before or not; it is compiled only when used.
        The others are added where each saves most, then moved as long as that helps. That finds the
        cheapest plan nearly always, but not with certainty, which would be a hard problem. If a
        variable has very many sizes, the best few dozen of them are candidates.

        Args:
            sizes: The sizes seen of each variable, by its name; the i-th of all variables belong
                to one call. Of a single variable, it may be a mapping of size to count.
            k: The largest number of executables.
            cost: What a call in a bucket costs, a function of the padded sizes by name; it must
                not fall when a size grows. By default their product.
            multiple_of: What the buckets of a variable are multiples of, by its name.
            max: The largest bucket of a variable, by its name; by default the largest size
                seen, rounded up.
            beyond: The strategy for sizes beyond the largest bucket, by the variable's name; by
                default they raise `BucketOverflowError`.

        Returns:
            The plan.

        Raises:
            StrategyContractError: If a ``beyond`` is no strategy.
            TypeError: If a parameter is of the wrong type, or ``cost`` returns no number.
            ValueError: If there is no size, one is negative, or one is beyond ``max`` and there
                is no ``beyond``; or ``cost`` falls when a size grows; or a parameter or a cost
                is out of its range.

        Examples:
            >>> batch, seq = [32, 32, 31, 4, 4, 3], [10, 12, 11, 100, 90, 95]
            >>> Joint.fit({"b": batch, "s": seq}, k=3)
            Joint([{'b': 32, 's': 12}, {'b': 4, 's': 100}, {'b': 32, 's': 100}])
        """
        problem = joint_problem(sizes, k, cost, multiple_of, max, beyond)
        boxes = cheapest_boxes(problem.table, problem.k)
        buckets = [
            {
                dim: int(candidates[i])
                for dim, candidates, i in zip(problem.dims, problem.table.sizes, box, strict=True)
            }
            for box in boxes
        ]
        return cls(buckets, beyond=problem.beyond)

    def bucket_of(self, sizes: Mapping[str, int], /) -> dict[str, int]:
        """Return the bucket of the sizes of all variables.

        Args:
            sizes: The logical size of each of `dims`, 0 or more.

        Returns:
            The padded size of each, in the order of ``sizes``.

        Raises:
            BucketOverflowError: If a size is beyond the last bucket and its variable has no
                strategy in ``beyond``.
            TypeError: If a size is not an int.
            ValueError: If the variables are not those of the plan, or a size is negative.
        """
        if sizes.keys() != set(self.dims):
            raise ValueError(f"sizes must be of the variables {list(self.dims)}, not {dict(sizes)}")
        point = tuple(logical_size(sizes[dim]) for dim in self.dims)
        bucket = next((b for b in self.buckets if _holds(b, point)), None)
        if bucket is None:
            bucket = tuple(map(self._extended, self.dims, point, self.buckets[-1], self.beyond))
        by_dim = dict(zip(self.dims, bucket, strict=True))
        return {dim: by_dim[dim] for dim in sizes}

    def extended(self, dims: Iterable[str] | None = None) -> Self:
        """This plan, extended beyond its last bucket.

        Args:
            dims: The variables that may outgrow the last bucket; all of them by default.

        Returns:
            A plan whose ``beyond`` has a strategy for each of these variables: its own one,
            extended as by ``overflow="extend"``, or without one, buckets of twice the size each
            time.

        Raises:
            ValueError: If the plan has no such variable.

        Examples:
            >>> plan = Joint([{"b": 8, "s": 64}])
            >>> plan.extended(["s"]).bucket_of({"b": 3, "s": 100})
            {'b': 8, 's': 128}
        """
        wanted = self.dims if dims is None else tuple(dims)
        if unknown := [dim for dim in wanted if dim not in self.dims]:
            raise ValueError(f"dims must be among {list(self.dims)}, not {unknown}")
        given = zip(self.dims, self.beyond, strict=True)
        rules = {dim: rule for dim, rule in given if rule is not None}
        for dim, last in zip(self.dims, self.buckets[-1], strict=True):
            if dim in wanted:
                rule = rules.get(dim)
                rules[dim] = Exponential(2, min=last) if rule is None else extended(rule)
        buckets = [dict(zip(self.dims, bucket, strict=True)) for bucket in self.buckets]
        return type(self)(buckets, beyond=rules)

    def _extended(self, dim: str, size: int, largest: int, beyond: Strategy | None) -> int:
        """The bucket of one variable in a call with a size beyond the last bucket."""
        if size <= largest:
            return largest
        if beyond is None:
            raise BucketOverflowError(size, largest, dim)
        try:
            return beyond.bucket(size)
        except BucketOverflowError as error:  # `beyond` may end below the last bucket of the plan
            raise BucketOverflowError(size, max(error.largest, largest), dim) from None

    def __repr__(self) -> str:
        buckets = [dict(zip(self.dims, bucket, strict=True)) for bucket in self.buckets]
        rules = {dim: b for dim, b in zip(self.dims, self.beyond, strict=True) if b is not None}
        beyond = f", beyond={rules}" if rules else ""
        return f"{type(self).__name__}({buckets}{beyond})"


def _holds(bucket: tuple[int, ...], point: tuple[int, ...]) -> bool:
    return all(size <= room for size, room in zip(point, bucket, strict=True))
