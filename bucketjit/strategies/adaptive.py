"""A strategy that fits its buckets to the sizes that occur while it is in use."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from bucketjit.strategies._search.costs import check_callable, costs_of
from bucketjit.strategies._search.histogram import Ints, histogram, rounded_up
from bucketjit.strategies._search.partition import cheapest_boundaries
from bucketjit.strategies.base import (
    Changing,
    Strategy,
    checked_strategy,
    number_at_least,
    positive_int,
)
from bucketjit.strategies.multiple_of import MultipleOf
from bucketjit.strategies.optimal import Optimal

# The default cost of a compile, in average calls. A 6-layer transformer on a CPU compiles for as
# long as some 65 of its calls take, a smaller program for more.
_CALLS_PER_COMPILE = 100


@dataclasses.dataclass(frozen=True)
class Replan:
    """A proposed plan that pays for its compiles.

    Attributes:
        plan: The new plan.
        new_buckets: Its buckets that have no executable yet, in increasing order.
        saving: The share of the present cost per call that it saves, 0 to 1, without compiles.
        replaces: The plan that it was compared with.
    """

    plan: Strategy
    new_buckets: tuple[int, ...]
    saving: float
    replaces: Strategy


class Adaptive(Changing):
    """Start with any strategy, watch the sizes, and change the plan if that pays for itself.

    `observe` counts the sizes of calls. `propose` fits boundaries to them that are best *given the
    executables that exist*: keeping one is free, a new one costs its compile. A plan is proposed
    only if it saves more, over as many calls as were watched since the last change, than
    ``margin`` times what its compiles cost. So sizes that occur only for a while change nothing, a
    small advantage must last, and changes cause at most ``k`` compiles in ``patience`` calls. Sizes
    beyond the plan are left to ``start``.

    Between two changes it is an ordinary strategy, `plan`, which keeps the contract and never
    changes itself; `adopt` swaps plans in one step. All methods may be called by many threads. Two
    `Adaptive` are equal only if they are one object.

    Args:
        start: The strategy to begin with, and for sizes beyond the largest of a plan.
        k: The largest number of boundaries of a plan. Executables of earlier plans may live beside
            them until the cache evicts them.
        cost: What a call in a bucket of a given size costs; by default the padded size.
        compile_cost: What a compile costs in the same unit; by default 100 average calls.
        multiple_of: Every bucket of a plan is a multiple of this; ``start`` is rounded too.
        margin: How many times over a change must pay for its compiles; at least 1.
        patience: How many calls to watch before each change; at least 1.
        memory: About how many calls to remember. When twice as many are counted, all
            counts are halved, so the past fades.

    Raises:
        StrategyContractError: If ``start`` is no strategy.
        TypeError: If a parameter is of the wrong type.
        ValueError: If a parameter is out of its range.

    Examples:
        >>> from bucketjit.strategies import Pow2
        >>> strategy = Adaptive(Pow2(), k=2, patience=1000, compile_cost=1000)
        >>> strategy.bucket(17)
        32
        >>> for n in [17, 40] * 1000:
        ...     strategy.observe(n)
        >>> strategy.replan().new_buckets
        (17, 40)
        >>> strategy.bucket(17), strategy.bucket(18), strategy.bucket(41)
        (17, 40, 64)
    """

    def __init__(
        self,
        start: Strategy,
        k: int = 8,
        *,
        cost: Callable[[int], float] | None = None,
        compile_cost: float | None = None,
        multiple_of: int = 1,
        margin: float = 2.0,
        patience: int = 256,
        memory: int = 10_000,
    ) -> None:
        checked_strategy("start", start)
        if isinstance(start, Changing):
            raise TypeError(f"start must be a strategy that does not change, not {start!r}")
        self._k = positive_int("k", k)
        if cost is not None:
            check_callable(cost)
        self._cost = cost
        if compile_cost is not None:
            compile_cost = number_at_least("compile_cost", compile_cost, 0)
        self._compile_cost = compile_cost
        self._multiple_of = positive_int("multiple_of", multiple_of)
        self._margin = number_at_least("margin", margin, 1)
        self._patience = positive_int("patience", patience)
        self._memory = positive_int("memory", memory)
        self._start = start if self._multiple_of == 1 else MultipleOf(start, self._multiple_of)
        self._plan: Strategy = self._start
        self._lock = threading.Lock()
        self._counts: dict[int, float] = {}
        self._remembered = 0.0
        self._watched = 0
        self._made: set[int] = set()

    @property
    def plan(self) -> Strategy:
        """The strategy in use now: ``start``, or an `Optimal`. It itself never changes."""
        return self._plan

    def observe(self, n: int, /) -> None:
        """Count one call.

        Args:
            n: Its logical size. Size 0 does not count.

        Raises:
            BucketOverflowError: If ``n`` has no bucket.
            TypeError: If ``n`` is not an int.
            ValueError: If ``n`` is negative.
        """
        plan = self._plan
        bucket, size = plan.bucket(n), int(n)
        if not size:
            return
        with self._lock:
            self._made.add(bucket)
            self._counts[size] = self._counts.get(size, 0.0) + 1.0
            self._watched += 1
            self._remembered += 1.0
            if self._remembered >= 2 * self._memory:
                # Sizes with a count below 1 are forgotten, so that the dict stays bounded.
                self._counts = {m: c / 2 for m, c in self._counts.items() if c >= 1.0}
                self._remembered = sum(self._counts.values())

    def histogram(self) -> dict[int, float]:
        """Return how often each size occurred; older calls count less.

        Returns:
            Size to count; a copy.
        """
        with self._lock:
            return dict(self._counts)

    def propose(self, made: Collection[int] | None = None) -> Replan | None:
        """Look for a plan that pays for its compiles.

        Takes some milliseconds, so call it once in a while, on a thread of its own. It changes
        nothing: compile ``new_buckets``, then `adopt`.

        Args:
            made: The buckets that have executables now. By default all that were in use.

        Returns:
            The proposal; None if the present plan is good enough, or was used for less than
            ``patience`` calls.

        Raises:
            TypeError: If ``cost`` returns no number.
            ValueError: If a cost is out of its range.
        """
        with self._lock:
            plan, counts, watched = self._plan, dict(self._counts), self._watched
            known = frozenset(self._made if made is None else made)
        if watched < self._patience or not counts:
            return None
        seen = histogram(counts)
        buckets = np.array([plan.bucket(n) for n in seen.sizes.tolist()])
        present = float(costs_of(buckets, self._cost) @ seen.counts)
        compile_cost = self._compile_cost
        if compile_cost is None:
            compile_cost = _CALLS_PER_COMPILE * present / float(seen.counts.sum())
        # As many calls as were watched are expected to come, but the sums are over the calls
        # remembered: scale the cost of a compile to these.
        fixed = self._margin * compile_cost * float(seen.counts.sum()) / watched

        best, least = None, present
        for new in self._candidates(counts, known, fixed):
            cost = float(costs_of(new[np.searchsorted(new, seen.sizes)], self._cost) @ seen.counts)
            missing = tuple(n for n in new.tolist() if n not in known)
            if cost + fixed * len(missing) < least:
                least = cost + fixed * len(missing)
                best = Replan(Optimal(new, beyond=self._start), missing, 1 - cost / present, plan)
        return best

    def _candidates(
        self, counts: dict[int, float], known: Collection[int], fixed: float
    ) -> list[Ints]:
        """The best boundaries up to the largest size, and up to the executable beyond it."""
        seen = histogram(counts)
        multiple = self._multiple_of
        top = -(-int(seen.sizes[-1]) // multiple) * multiple
        beyond = min((n for n in known if n > top), default=top)
        found = []
        for largest in dict.fromkeys((beyond, top)):
            rounded = rounded_up(seen, multiple, largest)
            weights = dict(zip(rounded.sizes.tolist(), rounded.counts.tolist(), strict=True))
            for n in known:
                if n <= largest:
                    weights.setdefault(n, 0.0)
            sizes = np.array(sorted(weights))
            found.append(
                cheapest_boundaries(
                    sizes,
                    np.array([weights[n] for n in sizes.tolist()]),
                    costs_of(sizes, self._cost),
                    self._k,
                    np.array([0.0 if n in known else fixed for n in sizes.tolist()]),
                )
            )
        return found

    def adopt(self, proposal: Replan) -> bool:
        """Use a proposed plan from now on.

        Args:
            proposal: What `propose` returned.

        Returns:
            True; False if the plan has changed since the proposal was made, and so stays.
        """
        with self._lock:
            if self._plan is not proposal.replaces:
                return False
            self._plan = proposal.plan
            self._watched = 0
            self._made.update(proposal.new_buckets)
            return True

    def replan(self) -> Replan | None:
        """Propose and adopt in one step; the new buckets are compiled when they are needed.

        A bucketed function looks for better plans by itself, and uses them for all its calls. A
        plan that is adopted by this method serves only shapes that the bucketed function has not
        seen before: calls of known shapes keep their buckets.

        Returns:
            What was adopted; None if the plan stays.

        Raises:
            TypeError, ValueError: See `propose`.
        """
        proposal = self.propose()
        return proposal if proposal is not None and self.adopt(proposal) else None

    def __repr__(self) -> str:
        plan = "" if self._plan is self._start else f", plan={self._plan!r}"
        return f"{type(self).__name__}({self._start!r}, {self._k}{plan})"

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {**self.__dict__, "_counts": dict(self._counts), "_made": set(self._made)}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
