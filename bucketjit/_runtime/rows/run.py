"""Run a call of `map`: sign the examples, group them, run the batches, keep the order.

Nothing runs before all examples of a window are signed and decided. Lists are one window; an
iterator is taken in windows of `_WINDOW` tokens, so that its examples are not in memory at once.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bucketjit._compile.executable import Executable, SignatureChanged
from bucketjit._compile.rows import Rows
from bucketjit._config import Check, Fallback, Out
from bucketjit._events import Event, warn
from bucketjit._ir.expressions import is_symbolic
from bucketjit._ir.interface import Interface
from bucketjit._runtime.decisions import OF_FILE
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.learning.learning import Learning
from bucketjit._runtime.rows import batches, plan
from bucketjit._runtime.rows.examples import Examples
from bucketjit._runtime.rows.kinds import NO_SIZES, Alone, Batched, Kind, Kinds, Row
from bucketjit._runtime.rows.plan import Planned
from bucketjit._runtime.runs import open_axes
from bucketjit.errors import FallbackError, FallbackWarning, MaskingError

_WINDOW = 1 << 17  # padded tokens of examples that are taken from an iterator at a time
_WINDOW_ROWS = 1 << 16  # and the most examples
_LEAST_SUMMED = 1 << 16  # bytes of a batch that is summed, if the shared arguments have fewer
_UNDER_WAY = 8  # batches that run while later ones are filled

_PLACED = MaskingError("its arguments are placed in another way than its program was traced for")


class Summed(NamedTuple):
    """The sum of the results of some examples, in ``values`` whose dtypes hold it."""

    tree: Any
    dtypes: Sequence[Any]
    values: list[Any]
    rows: int


Wait = Callable[[], list[Any]]  # waits for a batch, and returns results or one `Summed`


class MapCall:
    """One call of `map`, whose ``kinds`` sign its examples."""

    def __init__(
        self, engine: Engine, examples: Examples, out: Out, budget: int | None, is_stacked: bool
    ) -> None:
        self.engine = engine
        self.kinds = Kinds(engine, examples)
        self._examples, self._out, self._budget = examples, out, budget
        self._is_stacked = is_stacked
        self._opened: dict[Any, Sequence[Sequence[int]] | None] = {}
        self._ways: dict[Any, Batched] = {}

    def windows(self) -> Iterator[list[Row]]:
        """The examples, signed: all of them, or some at a time if an iterator has them."""
        rows = (self.kinds.row(i, values) for i, values in enumerate(self._examples))
        if self._examples.count is not None:
            if window := list(rows):
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

    def results(self) -> list[Any]:
        every: list[Any] = []
        for window in self.windows():
            results: list[Any] = [None] * len(window)
            for members, parts in self.run(window):
                for i, result in zip(members, parts, strict=True):
                    results[i] = result
            every += results
        return every

    def run(self, window: Sequence[Row], summed: bool = False) -> Iterator[tuple[Any, list[Any]]]:
        """The places of some examples, and their results or the sum of them; all, bit by bit."""
        if self._is_stacked:
            for row in {row.kind: row for row in window}.values():
                self._note_open_axes(row)
        under_way: deque[tuple[Sequence[int], Wait]] = deque()
        engine, counts = self.engine, Counter(row.kind for row in window)
        engine.counters.history.settle(but="counts")
        learners = self.expect(window)
        with engine.lock:
            for learning, kinds in learners.items():
                for kind in kinds:
                    learning.count(kind.call.sizes, counts[kind])
        for planned, rows, members in self._batches(window, summed):
            examples = [window[i] for i in members]
            under_way.append((members, self._start(planned, rows, examples, summed)))
            if len(under_way) > _UNDER_WAY:
                done, wait = under_way.popleft()
                yield done, wait()
        yield from ((members, wait()) for members, wait in under_way)
        for i, row in enumerate(window):
            if isinstance(row.kind.way, Alone):
                yield [i], self._run_alone([row], row.kind.way.why)

    # --- planning ---

    def _learning(self, kind: Kind) -> Learning | None:
        """What learns the buckets of examples; None if nothing does."""
        program = kind.way.program if isinstance(kind.way, Batched) else None
        learns = program is not None and not program.unfitted
        buckets = self.engine.buckets
        return buckets.learning(program, kind.call, of_rows=True) if learns else None

    def expect(self, window: Sequence[Row]) -> Mapping[Learning, Sequence[Kind]]:
        """Choose the first buckets of the examples whose buckets are learnt."""
        learners = defaultdict[Learning, list[Kind]](list)
        for kind in dict.fromkeys(row.kind for row in window):
            if (learning := self._learning(kind)) is not None:
                learners[learning].append(kind)
        with self.engine.lock:
            for learning, kinds in learners.items():
                self.engine.tell_compiled(learning, kinds[0].call.program, of_rows=True)
                learning.expect(*(kind.call.sizes for kind in kinds))
        return learners

    def _batches(
        self, window: Sequence[Row], summed: bool
    ) -> Iterator[tuple[Planned, int, Sequence[int]]]:
        """The batches of a window. Where better buckets were learnt, the rest is planned anew."""
        done: set[int] = set()
        has_news = True
        while has_news:
            has_news = False
            left = [i for i in range(len(window)) if i not in done]
            plans = self.plan(window, summed, left)
            for planned, rows, members in ((p, *batch) for p in plans for batch in p.batches()):
                yield planned, rows, members
                done.update(members)
                learning = self._learning(window[members[0]].kind)
                if learning is not None:
                    self.engine.counters.history.settle(but="counts")
                    with self.engine.lock:
                        has_news = learning.look(self.engine.provider.allowance.affordable)
                if has_news:
                    break

    def _way(self, kind: Kind) -> Batched:
        """How an example runs, in the bucket that is best by now."""
        way, learning = kind.way, self._learning(kind)
        assert isinstance(way, Batched)
        if learning is None:
            return way
        if not self.engine.provider.allowance.affordable():
            learning.give_up_plans()
        bucket = learning.bucket(kind.call.sizes)
        if bucket == way.bucket or not way.program.fits(bucket):
            return way
        key = kind, tuple(bucket.values())
        if key not in self._ways:
            self._ways[key] = self.kinds.batched(kind.call, way.program, bucket)
        return self._ways[key]

    def plan(
        self, window: Sequence[Row], summed: bool = False, left: Sequence[int] | None = None
    ) -> list[Planned]:
        """Group the examples of a window that run in batches."""
        every = range(len(window)) if left is None else left
        batched = [i for i in every if isinstance(window[i].kind.way, Batched)]
        way_of = {kind: self._way(kind) for kind in dict.fromkeys(window[i].kind for i in batched)}
        members: dict[Any, tuple[Batched, list[int]]] = {}
        for i in batched:
            way = way_of[window[i].kind]
            key = way.program, tuple(way.bucket.values())
            members.setdefault(key, (way, []))[1].append(i)
        planned: list[Planned] = []
        rest: list[tuple[Batched, list[int], plan.Group]] = []
        compiled, asked = self._known_counts(summed)
        for key, (way, places) in members.items():
            # Rows of like lengths go together: a loop of a batch runs as long as the longest row.
            places.sort(key=lambda i: window[i].kind.real)
            size = len(places)
            if not summed and self.engine.takes_turns.get(way.program):
                rows = plan.rows_in_turn(way)
                planned.append(Planned(way, places, [rows] * -(-size // rows), True))
                continue
            # A loop over the rows of a batch copies them.
            most = max(way.shared_bytes, _LEAST_SUMMED) // max(1, way.nbytes) or 1
            counts = frozenset(compiled[key])
            group = plan.Group(size, way.tokens, counts, most if summed else None, key in asked)
            rest.append((way, places, group))
        groups = tuple(group for _, _, group in rest)
        rows_of = plan.row_counts(groups, self._budget or plan.default_budget(groups))
        for (way, places, _), batch_rows in zip(rest, rows_of, strict=True):
            planned.append(Planned(way, places, batch_rows))
        return planned

    def _known_counts(self, summed: bool) -> tuple[defaultdict[Any, set[int]], set[Any]]:
        """The row counts of each bucket that have an executable, and those that are to stay."""
        counts: defaultdict[Any, set[int]] = defaultdict(set)
        asked: set[Any] = set()
        for (owner, *rest), entry in self.engine.cache.items():
            if entry.rows is not None and rest[0][0] == self.kinds.rows(entry.rows, summed):
                key = owner, rest[0][1:]
                counts[key].add(entry.rows)
                asked |= {key} if entry.asked else set()
        return counts, asked if self.engine.provider.allowance.affordable() else set(counts)

    # --- open axes of results ---

    @property
    def open_axes(self) -> list[frozenset[int]] | None:
        """The axes of each result that are open for one of the examples; None if all may be."""
        every = [axes for axes in self._opened.values() if axes is not None]
        return [frozenset().union(*axes) for axes in zip(*every, strict=False)] if every else None

    def _note_open_axes(self, row: Row) -> None:
        """Note which axes of the results of an example are open.

        A program of all sizes tells it. One that is for some sizes only, of which there may be no
        others in this call, does not: then the function is asked.
        """
        program, signature = row.kind.call.program, row.like.signature
        if program is not None:
            self._opened[program] = _open_axes_of(program)
        call = self.kinds.call_of(row)
        is_for_all = program is not None and not program.guards
        is_for_all = is_for_all and not any(0 in shape for shape in call.shapes)
        if is_for_all or signature in self._opened:
            return
        axes = open_axes(call)
        if axes is None and (beside := self.engine.program_beside(call)) is not None:
            axes = _open_axes_of(beside)
        if axes is not None or program is None:
            self._opened[signature] = axes

    # --- running ---

    def _start(self, planned: Planned, size: int, rows: Sequence[Row], summed: bool) -> Wait:
        engine, kinds, way = self.engine, self.kinds, planned.way
        engine.counters.history.settle(but="counts")
        built = self._executable(way, kinds.rows(size, summed, planned.in_turn), rows[0])
        if isinstance(built, Alone):
            return functools.partial(self._run_alone, rows, built.why)
        entry, is_compiled = built
        run: Callable[..., Any]
        wait: Wait
        try:
            is_checked = engine.config.check is not Check.OFF
            if is_checked and not summed:
                results = batches.checked_results(entry, rows, kinds, self._out)
                wait = functools.partial(list, results)
            else:
                if is_compiled and not summed and plan.may_take_turns(engine, entry, way, kinds):
                    self._compare_ways(way, entry, rows)
                run = batches.checked_sums if is_checked else batches.launch
                run = functools.partial(run, entry, rows, kinds)
                learning = self._learning(rows[0].kind)
                if learning is not None:
                    timed, lock = learning.timed, engine.lock
                    with lock:
                        learning.compiled(way.bucket, entry.compile_seconds)
                    run = functools.partial(timed, lock, way.bucket, [], run, len(rows))
                outs = run()
                dtypes = [dtype for dtype, _ in way.program.out_types]
                part = Summed(rows[0].kind.call.out_tree, dtypes, outs, len(rows))
                wait = functools.partial(batches.results_of, entry, rows, outs, self._out)
                wait = functools.partial(list, [part]) if summed else wait
        except SignatureChanged:
            return functools.partial(self._run_alone, rows, _PLACED)
        engine.counters.batch(batches.count(entry, rows, kinds.mapped))
        return wait

    def _compare_ways(self, way: Batched, entry: Executable, rows: Sequence[Row]) -> None:
        """Run a batch in both ways, and note whether the rows of the program take turns."""
        built = self._executable(
            way, self.kinds.rows(plan.rows_in_turn(way), in_turn=True), rows[0]
        )
        is_faster = False
        if not isinstance(built, Alone):
            at_once, in_turn = (
                functools.partial(batches.launch, each, rows[: each.rows], self.kinds)
                for each in (entry, built[0])
            )
            share = min(1.0, plan.rows_in_turn(way) / len(rows))
            is_faster = plan.is_faster_in_turn(at_once, in_turn, share)
        self.engine.takes_turns[way.program] = is_faster

    def _executable(self, way: Batched, rows: Rows, like: Row) -> tuple[Executable, bool] | Alone:
        engine = self.engine
        refused = engine.refusals.batches.get(way.program)  # when another batch was built
        if refused is not None:
            return Alone(refused)
        call = self.kinds.call_of(like)
        try:
            entry, source, _ = engine.provider.get(
                engine.requests.masked_key(way.program, way.bucket, rows),
                lambda: engine.requests.of(call, way.bucket, rows),
            )
        except MaskingError as error:
            if not error.is_defect:  # no rule masks an equation, for one example neither
                engine.refusals.note(engine.requests.masked_key(way.program, way.bucket), error)
                return Alone(None)
            why = MaskingError(f"it does not build for several examples: {error.reason}")
            engine.refusals.note_batches(way.program, why)
            return Alone(why)
        bucket = tuple(way.bucket.values())
        keys = [key for key, _ in engine.cache.items() if key[0] is way.program]
        if source == "compile" and sum(key[1][-len(bucket) :] == bucket for key in keys) == 1:
            # The first executable of the bucket: others, for more rows, are no new sizes.
            engine.recompiles.note(call, entry)
        return entry, source == "compile"

    def _run_alone(self, rows: Sequence[Row], why: MaskingError | None) -> list[Any]:
        """Run examples one by one, each as a call of its own, and warn of each reason once."""
        engine = self.engine
        if why is not None:
            if engine.config.fallback is Fallback.ERROR and why not in (NO_SIZES, OF_FILE):
                raise FallbackError(why.reason, why.remedy) from why
            if engine.counters.alone(why.reason, len(rows)):
                detail = f"map, one example at a time: {why}"
                engine.emit(Event("fallback", engine.name, detail=detail))
                warn(f"{engine.name}.map runs one example at a time: {why}", FallbackWarning)
        return [engine.serve(self.kinds.call_of(row), None, self._out) for row in rows]


def _open_axes_of(program: Interface) -> list[list[int]]:
    return [[i for i, n in enumerate(shape) if is_symbolic(n)] for shape in program.out_shapes]
