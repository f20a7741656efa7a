"""Run a call of `map`: sign the examples, group them, run the batches, keep the order.

Nothing runs before all examples of a window are signed and decided. Lists are one window; an
iterator is taken in windows of `_WINDOW` tokens, so that its examples are not in memory at once.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from bucketjit._compile.executable import Executable, SignatureChanged
from bucketjit._compile.rows import Rows, rows_key
from bucketjit._config import Check, Fallback
from bucketjit._events import LONGEST, Event, printable
from bucketjit._ragged.batchable import OF_FILE
from bucketjit._ragged.batches import (
    SharedArguments,
    counted_batch,
    launch,
    results_of,
)
from bucketjit._ragged.checked_batches import checked_results
from bucketjit._ragged.examples import Examples
from bucketjit._ragged.kinds import NO_SIZES, Alone, Batched, Kinds, Row
from bucketjit._ragged.options import Options
from bucketjit._ragged.plan import Group, batches, default_budget
from bucketjit._raised import frames_inside
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.open_outputs import has_empty_axis, open_axes
from bucketjit._sizes.expressions import is_symbolic
from bucketjit._tracing.interface import Interface
from bucketjit.errors import FallbackError, FallbackWarning, MaskingError

_WINDOW = 1 << 17  # padded tokens of examples that are taken from an iterator at a time
_WINDOW_ROWS = 1 << 16  # and the most examples
_LEAST_SUMMED = 1 << 16  # bytes of a batch that is summed, if the shared arguments have fewer
_UNDER_WAY = 8  # batches that run while later ones are filled
_LEAST_FLOPS = 1e7  # of a row: a few milliseconds; see `may_take_turns`
_ROWS_IN_TURN, _TOKENS_IN_TURN = 16, 4096  # the most of an executable whose rows take turns
_RUNS_TIMED = 3  # of a batch in each way
_WORTH_TURNS = 1.25  # how much longer a row may take, as fewer executables are compiled

PLACED = MaskingError("its arguments are placed in another way than its program was traced for")


@dataclass(frozen=True)
class Planned:
    """The batches of the examples that have one program and one bucket.

    Attributes:
        way: The program and the bucket.
        members: The examples, by their place in the window.
        rows: How many rows the executable of each batch takes.
        in_turn: Whether rows are computed one after the other.
    """

    way: Batched
    members: Sequence[int]
    rows: Sequence[int]
    in_turn: bool = False

    def batches(self) -> Iterator[tuple[int, Sequence[int]]]:
        """The row count and the examples of each batch."""
        start = 0
        for count in self.rows:
            yield count, self.members[start : start + count]
            start += count


class MapCall:
    """One call of `map`."""

    def __init__(self, engine: Engine, examples: Examples, options: Options) -> None:
        self._engine = engine
        self._examples = examples
        self._options = options
        self.kinds = Kinds(engine, examples)
        self._opened: dict[Any, Sequence[Sequence[int]] | None] = {}

    @property
    def open_axes(self) -> list[frozenset[int]] | None:
        """The axes of each result that are open for one of the examples; None if all may be."""
        every = [axes for axes in self._opened.values() if axes is not None]
        if not every:
            return None
        return [frozenset().union(*axes) for axes in zip(*every, strict=False)]

    def results(self) -> Iterator[Any]:
        """The results of the examples, in their order."""
        for window in self.windows():
            yield from self._run(window)

    def windows(self) -> Iterator[list[Row]]:
        """The examples, signed: all of them, or some at a time if an iterator has them."""
        rows = (self.kinds.row(i, values) for i, values in enumerate(self._examples))
        if self._examples.count is not None:
            window = list(rows)
            if window:
                yield window
            return
        while True:
            window, tokens = [], 0
            for row in itertools.islice(rows, _WINDOW_ROWS):
                window.append(row)
                tokens += row.kind.way.tokens if isinstance(row.kind.way, Batched) else 1
                if tokens >= _WINDOW:
                    break
            if not window:
                return
            yield window

    def plan(self, window: Sequence[Row], summed: bool = False) -> list[Planned]:
        """Group the examples of a window that run in batches."""
        ways: dict[Any, Batched] = {}
        members: defaultdict[Any, list[int]] = defaultdict(list)
        for i, row in enumerate(window):
            if isinstance(way := row.kind.way, Batched):
                key = way.program, tuple(way.bucket.values())
                ways.setdefault(key, way)
                members[key].append(i)
        takes_turns = self._engine.takes_turns
        in_turn = [] if summed else [k for k, way in ways.items() if takes_turns.get(way.program)]
        planned = [self._planned_in_turn(ways.pop(k), members[k], window) for k in in_turn]
        if not ways:
            return planned
        known, asked = self._known_counts(summed)
        if not self._engine.provider.allowance.affordable():
            asked = set(known)
        groups = [
            Group(
                len(members[key]),
                way.tokens,
                frozenset(known[key]),
                # A scan over the rows of a batch copies them.
                max(way.shared_bytes, _LEAST_SUMMED) // max(1, way.nbytes) or 1 if summed else None,
                key in asked,
            )
            for key, way in ways.items()
        ]
        budget = self._options.token_budget or default_budget(groups)
        return planned + [
            # Rows of like lengths go together: a loop of a batch runs as long as the longest row.
            Planned(ways[key], sorted(members[key], key=lambda i: window[i].kind.real), counts)
            for key, counts in zip(ways, batches(groups, budget), strict=True)
        ]

    def _planned_in_turn(
        self, way: Batched, members: Sequence[int], window: Sequence[Row]
    ) -> Planned:
        """The batches of examples that take turns: all take equally many rows."""
        count = rows_in_turn(way)
        ordered = sorted(members, key=lambda i: window[i].kind.real)
        return Planned(way, ordered, [count] * -(-len(ordered) // count), True)

    def _known_counts(self, summed: bool) -> tuple[defaultdict[Any, set[int]], set[Any]]:
        """The row counts that have an executable, by program and bucket."""
        found: defaultdict[Any, set[int]] = defaultdict(set)
        asked: set[Any] = set()
        for (owner, *rest), entry in self._engine.cache.items():
            if entry.rows is not None:
                rows, *bucket = rest[0]
                if rows == self.kinds.rows(entry.rows, summed):
                    found[owner, tuple(bucket)].add(entry.rows)
                    if entry.asked:
                        asked.add((owner, tuple(bucket)))
        return found, asked

    def _note_open_axes(self, row: Row) -> None:
        """Note which axes of the results of an example are open.

        A program of all sizes tells it. One that is for some sizes only, of which there may be no
        others in this call, does not: then the function is asked.
        """
        call, signature = row.kind.call, row.like.signature
        is_for_all = call.program is not None and not call.program.guards
        if call.program is not None:
            self._opened[call.program] = _open_axes_of(call.program)
        signed = self.kinds.call_of(row)
        if (is_for_all and not has_empty_axis(signed.shapes)) or signature in self._opened:
            return
        found = open_axes(signed)
        if found is None and (program := self._engine.program_beside(signed)) is not None:
            found = _open_axes_of(program)
        if found is not None or call.program is None:
            self._opened[signature] = found

    # --- running ---

    def _run(self, window: Sequence[Row]) -> list[Any]:
        """The results of the examples of a window."""
        results: list[Any] = [None] * len(window)
        if self._options.is_stacked:
            for row in {row.kind: row for row in window}.values():
                self._note_open_axes(row)
        shared = SharedArguments(self.mapped)
        under_way: deque[tuple[Sequence[int], Callable[[], list[Any]]]] = deque()

        def finish() -> None:
            members, wait = under_way.popleft()
            for i, result in zip(members, wait(), strict=True):
                results[i] = result

        for planned in self.plan(window):
            for count, members in planned.batches():
                rows = [window[i] for i in members]
                wait = self._start(planned, count, rows, shared)
                under_way.append((members, wait))
                while len(under_way) > _UNDER_WAY:
                    finish()
        while under_way:
            finish()
        for i, row in enumerate(window):
            if isinstance(row.kind.way, Alone):
                results[i] = self.run_alone([row], row.kind.way.why)[0]
        return results

    def _start(
        self, planned: Planned, count: int, rows: Sequence[Row], shared: SharedArguments
    ) -> Callable[[], list[Any]]:
        """Start a batch."""
        engine, way = self._engine, planned.way
        found = self.executable(way, self.kinds.rows(count, in_turn=planned.in_turn), rows[0])
        if isinstance(found, Alone):
            return lambda: self.run_alone(rows, found.why)
        entry, is_compiled = found
        checked = engine.config.check is not Check.OFF
        try:
            if is_compiled and not checked and may_take_turns(engine, entry, way, self.kinds):
                self._compare_ways(way, entry, rows, shared)
            if checked:
                given = rows, self.kinds, shared, self._options.out
                results = checked_results(engine, entry, *given)
            else:
                launched = launch(entry, rows, self.kinds, shared)
        except SignatureChanged:
            return lambda: self.run_alone(rows, PLACED)
        engine.counters.batch(counted_batch(entry, rows, self.mapped))
        return (lambda: results) if checked else (lambda: results_of(launched, self._options.out))

    def _compare_ways(
        self, way: Batched, entry: Executable, rows: Sequence[Row], shared: SharedArguments
    ) -> None:
        """Run a batch in both ways, and note whether the rows of the program take turns."""
        engine = self._engine
        found = self.executable(way, self.kinds.rows(rows_in_turn(way), in_turn=True), rows[0])
        if isinstance(found, Alone):
            engine.takes_turns[way.program] = False
            return
        seconds = []
        for each in (entry, found[0]):
            part, runs = rows[: each.rows], []
            for _ in range(_RUNS_TIMED):  # the first run sets the executable up
                began = time.perf_counter()
                jax.block_until_ready(launch(each, part, self.kinds, shared).outs)
                runs.append((time.perf_counter() - began) / len(part))
            seconds.append(min(runs))
        engine.takes_turns[way.program] = seconds[1] < seconds[0] * _WORTH_TURNS

    def executable(self, way: Batched, rows: Rows, like: Row) -> tuple[Executable, bool] | Alone:
        """The executable of a batch."""
        engine, kind = self._engine, like.kind
        refused = engine.refusals.of_batches(way.program)  # when another batch was built
        if refused is not None:
            return Alone(refused)
        try:
            entry, source, _ = engine.provider.get(
                rows_key(way.program, way.bucket, rows),
                lambda: engine.requests.rows(self.kinds.call_of(like), kind.call, way.bucket, rows),
            )
        except MaskingError as error:
            return Alone(self._note_refusal(way, error))
        if source == "compile" and self._is_first(way):
            engine.recompiles.note(self.kinds.call_of(like), kind.call.sizes)
        return entry, source == "compile"

    def _is_first(self, way: Batched) -> bool:
        """Whether a bucket has an executable for one number of rows: others are no new sizes."""
        bucket, keys = tuple(way.bucket.values()), (key for key, _ in self._engine.cache.items())
        own = [k for k in keys if k[0] is way.program and k[1][-len(bucket) :] == bucket]
        return len(own) == 1

    @property
    def mapped(self) -> tuple[int, ...]:
        """The mapped leaves."""
        return self.kinds.mapped

    def _note_refusal(self, way: Batched, error: MaskingError) -> MaskingError | None:
        """Remember that a program does not build for batches."""
        engine = self._engine
        if not error.is_defect:  # no rule masks an equation, for one example neither
            engine.refusals.note(engine.requests.masked_key(way.program, way.bucket), error)
            return None
        why = MaskingError(f"it does not build for several examples: {error.reason}")
        engine.refusals.note_batches(way.program, why)
        return why

    def run_alone(self, rows: Sequence[Row], why: MaskingError | None) -> list[Any]:
        """Run examples one by one, each as a call of its own, and say why."""
        engine = self._engine
        if why is not None:
            note_alone(engine, why, len(rows))
        return [engine.serve(self.kinds.call_of(row), None, self._options.out) for row in rows]


def _open_axes_of(program: Interface) -> list[list[int]]:
    """The open axes of each result of a program."""
    return [[i for i, n in enumerate(shape) if is_symbolic(n)] for shape in program.out_shapes]


def may_take_turns(engine: Engine, entry: Executable, way: Batched, kinds: Kinds) -> bool:
    """Whether it is worth finding out if the rows of a program are as fast one after the other.

    Then one executable serves every number of rows. It is for programs whose rows take long, on
    one CPU: elsewhere, and for short ones, a loop is slower.
    """
    return (
        way.program not in engine.takes_turns
        and entry.rows is not None
        and entry.flops >= _LEAST_FLOPS * entry.rows
        and entry.on_host
        and kinds.sharding is None
        and not any(jax.dtypes.issubdtype(d, jax.dtypes.extended) for d, _ in way.program.out_types)
    )


def rows_in_turn(way: Batched) -> int:
    """How many rows an executable takes at most whose rows take turns."""
    most = max(1, _TOKENS_IN_TURN // way.tokens)
    return min(_ROWS_IN_TURN, 1 << (most.bit_length() - 1))


def note_alone(engine: Engine, why: MaskingError, examples: int) -> None:
    """Count examples that run one by one, and warn of each reason once."""
    if engine.config.fallback is Fallback.ERROR and why not in (NO_SIZES, OF_FILE):
        raise FallbackError(why.reason, why.remedy) from why
    if engine.counters.alone(why.reason, examples):
        engine.emit(Event("fallback", engine.name, detail=f"map, one example at a time: {why}"))
        message = f"{engine.name}.map runs one example at a time: {why}"
        warnings.warn(printable(message, LONGEST), FallbackWarning, stacklevel=frames_inside())
