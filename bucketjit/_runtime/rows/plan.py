"""Choose how many rows each batch has: pure arithmetic, without arrays.

Examples of one length bucket form a group. A group of ``count`` rows is covered by batches of at
most two row counts, powers of two, so that a batch stays within the token budget:

    100 rows of 16 tokens, budget 1024        32 + 32 + 32 + 4

One executable belongs to each row count and length bucket. A second row count makes the last batch
of a group smaller, and costs an executable, so only the groups that gain most by it get one.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from bucketjit._compile.executable import Executable
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.rows.kinds import Batched, Kinds

_LEAST_FLOPS = 1e7  # of a row: a few milliseconds
_ROWS_IN_TURN, _TOKENS_IN_TURN = 16, 4096  # the most of an executable whose rows take turns
_LEAST_RUNS, _MOST_RUNS = 3, 16  # of a batch in each way
_MOST_SECONDS = 0.5  # after which no more runs begin
_WORTH_TURNS = 1.25  # how much longer a row may take, as fewer executables are compiled


def may_take_turns(engine: Engine, entry: Executable, way: Batched, kinds: Kinds) -> bool:
    """Whether it is worth finding out: for batches of rows that take long, on one CPU."""
    return (
        way.program not in engine.takes_turns
        and (entry.rows or 1) > 1
        and entry.flops >= _LEAST_FLOPS * (entry.rows or 1)
        and entry.on_host
        and kinds.sharding is None
        and not any(jax.dtypes.issubdtype(d, jax.dtypes.extended) for d, _ in way.program.out_types)
    )


def rows_in_turn(way: Batched) -> int:
    """How many rows an executable takes at most whose rows take turns."""
    most = max(1, _TOKENS_IN_TURN // way.tokens)
    return min(_ROWS_IN_TURN, 1 << (most.bit_length() - 1))


def is_faster_in_turn(at_once: Callable[[], Any], in_turn: Callable[[], Any], share: float) -> bool:
    """Compare a batch with the share of its rows that a run in turn takes.

    The ways take turns themselves, and the least of many runs counts. Elapsed time tells how many
    cores a way keeps busy, and on a busy machine also what others do; CPU time does not. So the
    mean of both ratios decides.
    """
    times: dict[Callable[[], Any], list[tuple[float, float]]] = {at_once: [], in_turn: []}
    until = time.perf_counter() + _MOST_SECONDS
    for i in range(_MOST_RUNS):  # the first run sets the executable up
        if i >= _LEAST_RUNS and time.perf_counter() > until:
            break
        for run, seconds in times.items():
            elapsed, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            seconds.append((time.perf_counter() - elapsed, time.process_time() - cpu))
    (elapsed, cpu), (own_elapsed, own_cpu) = (
        map(min, zip(*seconds, strict=True)) for seconds in times.values()
    )
    ratio = own_elapsed * own_cpu / max(elapsed * cpu, 1e-12)
    return ratio < (_WORTH_TURNS * share) ** 2


_LEAST_BUDGET, _MOST_BUDGET = 2048, 8192  # tokens of a batch that the budget is chosen from
_BATCHES = 16  # the budget is such that a call has about so many batches

# The price of running one more batch, in tokens: measured where a token costs little.
_PER_RUN = 40

# Row counts that have an executable are taken if they cost at most so much more than a new one.
_WORSE = 1.1

# One group in four may have a second row count that is new, if that saves one token in two hundred,
# and 128 tokens.
_GROUPS_PER_SECOND, _WORTH, _LEAST_WORTH = 4, 200, 128


@dataclass(frozen=True)
class Group:
    """The rows of one length bucket.

    Attributes:
        count: How many rows there are.
        tokens: Padded tokens of one row.
        known: The row counts that have an executable.
        most: The most rows of a batch, whatever the budget; None for no limit.
        fixed: Whether only the known row counts may be taken, whatever the budget: the user has
            chosen them, or nothing may be compiled.
    """

    count: int
    tokens: int
    known: frozenset[int] = frozenset()
    most: int | None = None
    fixed: bool = False


@dataclass(frozen=True)
class Planned:
    """The batches of one program and bucket: ``rows`` of each, ``members`` of the window."""

    way: Batched
    members: Sequence[int]
    rows: Sequence[int]
    in_turn: bool = False

    def batches(self) -> Iterator[tuple[int, Sequence[int]]]:
        """The row count and the examples of each batch."""
        for rows, end in zip(self.rows, itertools.accumulate(self.rows), strict=True):
            yield rows, self.members[end - rows : end]


class _Cover(NamedTuple):
    """The batches of a group: their cost in tokens, their rows, and row counts that are new."""

    cost: int
    rows: tuple[int, ...]
    new: frozenset[int]


def default_budget(groups: Sequence[Group]) -> int:
    """The token budget of a call whose user has not set one."""
    tokens = sum(group.count * group.tokens for group in groups)
    return min(_MOST_BUDGET, max(_LEAST_BUDGET, _power_of_two_below(tokens // _BATCHES)))


@functools.lru_cache(maxsize=256)
def row_counts(groups: tuple[Group, ...], budget: int) -> tuple[tuple[int, ...], ...]:
    """The row count of each batch, for each group; calls in a loop often have the same groups."""
    options = [_options(group, budget) for group in groups]
    chosen = [_first(group, budget, by_new) for group, by_new in zip(groups, options, strict=True)]
    gains = sorted(
        (
            (first.cost - better.cost, i, better)
            for i, (first, by_new) in enumerate(zip(chosen, options, strict=True))
            for better in by_new.values()
            if better.cost < first.cost
        ),
        key=lambda gain: (-gain[0], gain[1]),
    )
    worth = max(_LEAST_WORTH, sum(cover.cost for cover in chosen) // _WORTH)
    # Earlier calls have had theirs: a call like the one before compiles nothing.
    had = sum(max(0, len(group.known) - 1) for group in groups)
    spare = max(1, len(groups) // _GROUPS_PER_SECOND) - had
    improved: set[int] = set()
    for gain, i, better in gains:
        more = len(better.new) - len(chosen[i].new)
        if i not in improved and more <= spare and (more <= 0 or gain >= worth):
            chosen[i] = better
            improved.add(i)
            spare -= more
    return tuple(cover.rows for cover in chosen)


def _options(group: Group, budget: int) -> dict[int, _Cover]:
    """The cheapest cover of a group for each number of new executables, from 0 to 2."""
    best: dict[int, _Cover] = {}
    for cover in _covers(group, budget):
        cheapest = best.get(len(cover.new))
        if cheapest is None or cover.cost < cheapest.cost:
            best[len(cover.new)] = cover
    return best


def _first(group: Group, budget: int, by_new: dict[int, _Cover]) -> _Cover:
    """The cover by known row counts, unless the best one of a single row count is much cheaper.

    That one is what a call without known row counts begins with, so a call like an earlier one
    begins with what that has compiled.
    """
    single = min(
        (cover for cover in _covers(group, budget) if len(set(cover.rows)) == 1),
        key=lambda cover: cover.cost,
        default=None,
    )
    compiled = by_new.get(0)
    if compiled is None:
        return by_new[min(by_new)] if single is None else single
    return single if single is not None and compiled.cost > _WORSE * single.cost else compiled


def _covers(group: Group, budget: int) -> Iterator[_Cover]:
    """The covers of a group by full batches of one row count, and smaller ones of another."""
    sizes = (
        sorted(group.known, reverse=True)
        if group.fixed and group.known
        else _row_counts(group, budget)
    )
    for i, large in enumerate(sizes):
        full, rest = divmod(group.count, large)
        for small in sizes[i:]:
            few = -(-rest // small)
            rows = (large,) * full + (small,) * few
            cost = sum(rows) * group.tokens + _PER_RUN * len(rows)
            yield _Cover(cost, rows, frozenset(rows) - group.known)


def _row_counts(group: Group, budget: int) -> list[int]:
    """The row counts of a group within the budget, largest first: powers of two."""
    allowed = max(1, budget // max(1, group.tokens))
    if group.most is not None:
        allowed = min(allowed, group.most)
    most = min(_power_of_two_below(allowed), 1 << (group.count - 1).bit_length())
    return [most >> i for i in range(most.bit_length())]


def _power_of_two_below(n: int) -> int:
    """The largest power of two that is at most ``n``, at least 1."""
    return 1 << (max(1, n).bit_length() - 1)
