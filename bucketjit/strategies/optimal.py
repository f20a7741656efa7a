"""A strategy whose boundaries are fitted to the sizes that occur."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from bucketjit.errors import BucketOverflowError
from bucketjit.strategies._search.costs import check_total, costs_of
from bucketjit.strategies._search.grid import cheapest_grid
from bucketjit.strategies._search.histogram import Sizes, histogram, largest_bucket, rounded_up
from bucketjit.strategies._search.partition import cheapest_boundaries
from bucketjit.strategies.base import (
    Strategy,
    checked_strategy,
    logical_size,
    number_at_least,
    positive_int,
)
from bucketjit.strategies.boundaries import Boundaries
from bucketjit.strategies.fitting import check_beyond, joint_problem, rounded_beyond


@dataclasses.dataclass(frozen=True, repr=False)
class Optimal(Boundaries):
    """The boundaries that cost least for sizes like those seen; made by `fit`.

    With as many executables it pads far less than a ladder: the buckets are close where sizes are
    frequent and far apart where they are rare.

    Args:
        boundaries: The buckets: positive ints in increasing order.
        beyond: The strategy for sizes beyond the last boundary; None to refuse them.

    Raises:
        StrategyContractError: If ``beyond`` is no strategy.
        TypeError: If ``boundaries`` is not an iterable of ints.
        ValueError: If it is empty, or not positive and strictly increasing.

    Examples:
        >>> plan = Optimal.fit([17, 18, 18, 20, 64, 200], k=3)
        >>> plan
        Optimal([20, 64, 200])
        >>> plan.bucket(17)
        20
    """

    beyond: Strategy | None

    def __init__(self, boundaries: Iterable[int], *, beyond: Strategy | None = None) -> None:
        super().__init__(boundaries)
        if beyond is not None:
            checked_strategy("beyond", beyond)
        object.__setattr__(self, "beyond", beyond)

    @classmethod
    def fit(
        cls,
        sizes: Sizes,
        k: int = 8,
        *,
        cost: Callable[[int], float] | None = None,
        compile_cost: float = 0.0,
        multiple_of: int = 1,
        max: int | None = None,
        beyond: Strategy | None = None,
    ) -> Self:
        """Find the boundaries that cost least for these sizes, exactly.

        The cost of a plan is the sum over ``sizes`` of the cost of their buckets. No other choice
        of at most ``k`` buckets among the sizes seen (rounded up to ``multiple_of``) is cheaper.
        That holds for every cost, also for a measured one that is lower for a larger bucket.

        Args:
            sizes: The sizes seen, in any iterable or array; or a mapping of size to count, such
                as a ``Counter``. Size 0 does not count: such a call runs exact.
            k: The largest number of executables.
            cost: What a call in a bucket of a given size costs: FLOPs, or seconds measured. By
                default the padded size itself. It is called once for each distinct size.
            compile_cost: What one more executable costs, in the unit of ``cost`` summed over
                all of ``sizes``; above 0 the plan may have fewer than ``k``.
            multiple_of: Every bucket is a multiple of this.
            max: The largest bucket, a multiple of ``multiple_of``; by default the largest size
                seen, rounded up. Set it if larger sizes than those seen may come.
            beyond: The strategy for sizes beyond the largest bucket, also for sizes seen that are
                beyond ``max``. By default they raise `BucketOverflowError`.

        Returns:
            The strategy.

        Raises:
            StrategyContractError: If ``beyond`` is no strategy.
            TypeError: If a parameter is of the wrong type, or ``cost`` returns no number.
            ValueError: If there is no size, one is negative, or one is beyond ``max`` and there
                is no ``beyond``; or a parameter or a cost is out of its range.

        Examples:
            >>> from collections import Counter
            >>> from bucketjit.strategies import Pow2
            >>> seen = Counter({17: 800, 18: 700, 33: 300, 40: 90, 512: 1})
            >>> Optimal.fit(seen, k=3)
            Optimal([18, 40, 512])
            >>> Optimal.fit(seen, k=3, multiple_of=8, max=1024)
            Optimal([24, 40, 1024])
            >>> Optimal.fit(seen, k=8, compile_cost=2_500)  # elements
            Optimal([18, 40, 512])
            >>> Optimal.fit(seen, k=3, max=64, beyond=Pow2()).bucket(500)
            512
        """
        k = positive_int("k", k)
        multiple_of = positive_int("multiple_of", multiple_of)
        limit = None if max is None else positive_int("max", max)
        fixed = number_at_least("compile_cost", compile_cost, 0)
        seen = histogram(sizes)
        largest = largest_bucket("max", int(seen.sizes[-1]), multiple_of, limit)
        check_beyond("sizes", int(seen.sizes[-1]), largest, beyond)
        candidates = rounded_up(seen, multiple_of, largest)
        costs = costs_of(candidates.sizes, cost)
        check_total(costs, candidates.counts)
        boundaries = cheapest_boundaries(candidates.sizes, candidates.counts, costs, k, fixed)
        if beyond is not None:
            beyond = rounded_beyond(checked_strategy("beyond", beyond), multiple_of)
        return cls(boundaries, beyond=beyond)

    @classmethod
    def fit_joint(
        cls,
        sizes: Mapping[str, Sizes],
        k: int = 12,
        *,
        cost: Callable[..., float] | None = None,
        multiple_of: Mapping[str, int] | None = None,
        max: Mapping[str, int] | None = None,
        beyond: Mapping[str, Strategy] | None = None,
    ) -> dict[str, Self]:
        """Fit the boundaries of several variables together: batch and sequence, say.

        Each variable gets its own boundaries, and there is one executable for each combination of
        them that occurs: at most ``k`` for the calls seen. If batches are made of a fixed number of
        tokens, say, most combinations do not occur, and the boundaries can be close. A combination
        that was not seen is one more executable when it comes; see `Joint` for a firm bound.

        The boundaries of one variable are fitted exactly while those of the others are fixed, in
        turn, for all numbers of boundaries. The best results are then improved boundary by
        boundary. That finds the cheapest plan nearly always, but not with certainty, which would be
        a hard problem. If a variable has very many sizes, the best of them are candidates: a few
        dozen for two variables, fewer for more, three for nine. The time grows with ``k``: for
        100,000 calls some 2 s at 12, and 20 s at 32. For more than two variables, not all numbers
        of boundaries are tried if there are many.

        Args:
            sizes: The sizes seen of each variable, by its name; the i-th of all variables belong
                to one call. Of a single variable, it may be a mapping of size to count.
            k: The largest number of executables that these calls may need.
            cost: What a call in a bucket costs, a function of the padded sizes by name; it must
                not fall when a size grows. By default their product.
            multiple_of: What the buckets of a variable are multiples of, by its name.
            max: The largest bucket of a variable, by its name; by default the largest size
                seen, rounded up.
            beyond: The strategy for sizes beyond the largest bucket, by the variable's name; by
                default they raise `BucketOverflowError`.

        Returns:
            The strategy of each variable, for ``with_strategy(plan[dim], dim)``.

        Raises:
            StrategyContractError: If a ``beyond`` is no strategy.
            TypeError: If a parameter is of the wrong type, or ``cost`` returns no number.
            ValueError: If there is no size, one is negative, or one is beyond ``max`` and there
                is no ``beyond``; or ``cost`` falls when a size grows; or a parameter or a cost
                is out of its range.

        Examples:
            >>> batch, seq = [32, 32, 31, 4, 4, 3], [10, 12, 11, 100, 90, 95]
            >>> plan = Optimal.fit_joint({"b": batch, "s": seq}, k=2)
            >>> plan
            {'b': Optimal([4, 32]), 's': Optimal([12, 100])}
        """
        problem = joint_problem(sizes, k, cost, multiple_of, max, beyond)
        grid = cheapest_grid(problem.table, problem.k)
        return {
            dim: cls(candidates[list(ends)], beyond=problem.beyond.get(dim))
            for dim, candidates, ends in zip(problem.dims, problem.table.sizes, grid, strict=True)
        }

    def __repr__(self) -> str:
        beyond = "" if self.beyond is None else f", beyond={self.beyond!r}"
        return f"{type(self).__name__}({list(self.boundaries)}{beyond})"

    def bucket(self, n: int, /) -> int:
        """Return the bucket of a logical size.

        Args:
            n: The logical size, 0 or more.

        Returns:
            The smallest boundary that is at least ``n``; beyond the last one, the bucket of
            ``beyond``.

        Raises:
            BucketOverflowError: If ``n`` is larger than the last boundary and there is no
                ``beyond``, or ``n`` is larger than the largest bucket of ``beyond``.
            TypeError: If ``n`` is not an int.
            ValueError: If ``n`` is negative.
        """
        if self.beyond is not None and logical_size(n) > self.boundaries[-1]:
            try:
                return self.beyond.bucket(n)
            except BucketOverflowError as error:  # `beyond` may end below the last boundary
                last = self.boundaries[-1]
                if not isinstance(error.largest, int) or error.largest >= last:
                    raise
                raise BucketOverflowError(error.size, last, error.dim) from None
        return super().bucket(n)
