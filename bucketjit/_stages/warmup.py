"""Compiles buckets before calls need them: `BucketedExec.warmup`.

A warm-up turns sizes into compile requests (`requests_for`) and has several threads carry them out
(`compile_all`). `bucketjit._stages.requests` reads the sizes that users ask for,
`bucketjit._stages.warmup` reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.bodies import result_types
from bucketjit._compile.files.environment import environment
from bucketjit._compile.files.fingerprint import NoDigest
from bucketjit._compile.files.keys import device_of
from bucketjit._compile.requests import CompileRequest, Source
from bucketjit._compile.rows import Rows
from bucketjit._config import is_positive_int
from bucketjit._events import one_line, printable, shown
from bucketjit._ir.dynamic_axes import Tokens
from bucketjit._ir.program import Program
from bucketjit._raised import is_of_machine
from bucketjit._runtime.buckets import bucket_or_size
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.statistics import FrozenDict
from bucketjit._stages.listed_buckets import compile_all, volume
from bucketjit._stages.progress import Unbreakable, bar
from bucketjit._stages.requests import Asked, check_names, combinations, requests_for
from bucketjit._tracing.binding import bind_sizes
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import variables_in
from bucketjit.errors import MaskingError, SpecError


@dataclasses.dataclass(frozen=True)
class WarmupReport:
    """What a warm-up has done; ``print`` it.

    Attributes:
        compiled: The buckets that were compiled, or read from files: `loaded` of them. For calls
            that run exact, the sizes of their exact shapes.
        present: The buckets that were in the cache already.
        failed: Buckets that could not be compiled, or sizes that no bucket was found for, and why.
        exact: Sizes that no bucket serves because the call cannot be masked, and why. Their exact
            shapes are compiled like buckets.
        left: Buckets that there was no time for, or sizes whose bucket there was no time to look
            up; another warm-up continues with them.
        seconds: How long the warm-up took.
        evicted: Buckets of ``compiled`` and ``present`` that are no longer in the cache: it is too
            small for all of them, or it was cleared.
        loaded: Number of the ``compiled`` buckets that were read from files.
        cleared: Whether the cache was cleared meanwhile; then nothing more is compiled.
    """

    compiled: tuple[Mapping[str, int], ...]
    present: tuple[Mapping[str, int], ...]
    failed: tuple[tuple[Mapping[str, int], str], ...]
    exact: tuple[tuple[Mapping[str, int], str], ...]
    left: tuple[Mapping[str, int], ...]
    seconds: float
    evicted: tuple[Mapping[str, int], ...] = ()
    loaded: int = 0
    cleared: bool = False

    def __str__(self) -> str:
        loaded = f" ({self.loaded} of them from files)" if self.loaded else ""
        head = (
            f"{len(self.compiled)} compiled{loaded}, {len(self.present)} present, "
            f"{len(self.failed)} failed, {len(self.exact)} exact, {len(self.left)} left, "
            f"in {self.seconds:.2f} s"
            f"{'; the cache was cleared meanwhile' if self.cleared else ''}"
        )
        lines = [f"  failed {shown(sizes) or 'exact'}: {why}" for sizes, why in self.failed]
        lines += [f"  exact {shown(sizes) or 'exact'}: {why}" for sizes, why in self.exact]
        gone = "the cache was cleared" if self.cleared else "the cache is full"
        lines += [f"  evicted {shown(b) or 'exact'}: {gone}" for b in self.evicted]
        return printable("\n".join([head, *lines]))


class Warmed(NamedTuple):
    """The outcome of the warm-up of one signature.

    Attributes:
        report: The report, without ``evicted`` and ``cleared``.
        requests: The requests whose executables were compiled or found.
    """

    report: WarmupReport
    requests: tuple[CompileRequest, ...] = ()


def report_of(warmed: Warmed, engine: Engine, epoch: object) -> WarmupReport:
    """The report of a warm-up, with what has left the cache since."""
    requests = {o.key: o for o in warmed.requests}
    # Read before the epoch: a clear between the two would otherwise be reported as a full cache.
    evicted = tuple(FrozenDict(o.sizes) for key, o in requests.items() if key not in engine.cache)
    cleared = engine.provider.epoch is not epoch
    return dataclasses.replace(warmed.report, evicted=evicted, cleared=cleared)


@contextlib.contextmanager
def progress_of(name: str, total: int, wanted: bool) -> Iterator[Any]:
    """Show on standard error how far a warm-up is: a bar in a terminal, lines elsewhere."""
    stream = sys.stderr
    if not wanted or not total or stream is None:  # pythonw and daemons have no standard error
        yield lambda request, outcome: None
        return
    done, told, name = itertools.count(1), Unbreakable(stream), one_line(name)

    def line(request: CompileRequest, outcome: Source | Exception) -> None:
        what = "compiled"
        if isinstance(outcome, Exception):
            refused = isinstance(outcome, MaskingError) and not outcome.is_defect
            what = "cannot be masked, and runs exact:" if refused else "failed"
        print(
            f"{name}: {what} {printable(shown(request.sizes)) or 'exact'} ({next(done)}/{total})",
            file=told,
        )

    with bar(told, f"{name}: warm-up", total) as step:
        if step is None:
            yield line
        else:
            yield lambda request, outcome: step(shown(request.sizes) or "exact")


_LOOKED_UP_AT_LEAST = 0.1  # seconds for looking up buckets, even if the time budget is smaller


def check_options(workers: object, time_budget: object, **flags: object) -> None:
    """Check the options of a warm-up."""
    if workers is not None and not is_positive_int(workers):
        raise SpecError(f"warmup: workers must be an int of at least 1, or None, got {workers!r}")
    check_seconds("warmup: time_budget", time_budget)
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise SpecError(f"warmup: {name} must be True or False, got {flag!r}")


def check_seconds(what: str, given: Any) -> None:
    """Check a limit of time."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and not (is_number and given >= 0):
        raise SpecError(f"{what} must be seconds, or None, got {given!r}")


def warm_up(
    engine: Engine,
    call: Call,
    sizes: object,
    workers: int | None,
    time_budget: float | None,
    progress: bool,
    first_run: bool,
    epoch: object,
    rows: Sequence[Rows] = (),
) -> Warmed:
    """Warm up the calls of one signature; see `BucketedExec.warmup`."""
    began = time.monotonic()
    tokens, own, wanted = asked(engine, call, sizes)
    deadline = None if time_budget is None else began + time_budget
    how = workers, progress, first_run, deadline, epoch, rows
    under_way = _WarmUp(engine, call, tokens, own, *how)
    parts: list[Asked] = []
    waiting: Sequence[Mapping[str, int]] = wanted
    while waiting and not (parts and under_way.is_late):
        parts.append(under_way.some(waiting))
        waiting = parts[-1].left
    tried = under_way.tried
    every = {o.key: o for part in parts for o in part.every_request}
    present = [o for key, o in every.items() if tried.get(key) == "cache"]
    outcomes = [
        (o, tried.get(o.key)) for o in sorted(every.values(), key=lambda o: -volume(o.sizes))
    ]
    compiled = [o for o, outcome in outcomes if outcome in ("compile", "file")]
    if rows:
        _note_asked(engine, (*compiled, *present))
    report = WarmupReport(
        compiled=tuple(FrozenDict(o.sizes) for o in compiled),
        present=tuple(FrozenDict(o.sizes) for o in present),
        failed=(
            *dict.fromkeys(failure for part in parts for failure in part.failed),
            *(
                (FrozenDict(o.sizes), f"{type(why).__name__}: {why}")
                for o, why in outcomes
                if isinstance(why, Exception)
            ),
        ),
        exact=tuple({n: one.why for part in parts for n, one in part.exact.items()}.items()),
        left=(
            *(FrozenDict(o.sizes) for o, outcome in outcomes if outcome is None),
            *map(FrozenDict, waiting),
        ),
        seconds=time.monotonic() - began,
        loaded=sum(outcome == "file" for _, outcome in outcomes),
    )
    return Warmed(report, (*compiled, *present))


def _note_asked(engine: Engine, requests: Iterable[CompileRequest]) -> None:
    """Make `map` take the row counts of these executables, and no others, from now on."""
    for request in requests:
        slot = engine.cache.slot(request.key)
        if slot is not None and slot.entry is not None:
            slot.entry.asked = True


@dataclasses.dataclass(frozen=True)
class _WarmUp:
    """A running warm-up.

    Attributes:
        engine, call, workers, progress, first_run: See `warm_up`.
        tokens, own: See `requests_for`.
        deadline: The time (``time.monotonic``) after which nothing is begun, or None.
        epoch: See `compile_all`.
        rows: See `requests_for`.
        tried: The outcome of each request so far, by key.
    """

    engine: Engine
    call: Call
    tokens: Tokens
    own: Mapping[str, int]
    workers: int | None
    progress: bool
    first_run: bool
    deadline: float | None
    epoch: object
    rows: Sequence[Rows] = ()
    tried: dict[Hashable, Source | Exception] = dataclasses.field(default_factory=dict)

    @property
    def is_late(self) -> bool:
        """Whether nothing more may begin: the deadline has passed, or the cache was cleared."""
        if self.engine.provider.epoch is not self.epoch:
            return True
        return self.deadline is not None and time.monotonic() >= self.deadline

    def some(self, wanted: Sequence[Mapping[str, int]]) -> Asked:
        """Look up buckets for half of the time that is left, and compile what was found.

        A look-up may trace the function. If calls run exact, it does so once for each size.
        """
        now, until = time.monotonic(), None
        if self.deadline is not None:
            until = now + max((self.deadline - now) / 2, _LOOKED_UP_AT_LEAST)
        asked = self._look_up(wanted, until)
        not_yet = set(map(id, asked.left))
        looked_up = [sizes for sizes in wanted if id(sizes) not in not_yet]
        left = asked.left
        # A build may find that a program cannot be masked. The same sizes are then looked up again,
        # which yields requests for their exact shapes.
        while self._compile(asked):
            asked = self._look_up(looked_up, None)
        with self.engine.lock:
            for one in asked.exact.values():  # so that the next warm-up does not trace it again
                if isinstance(self.tried.get(one.request.key), str):
                    self.call.signature.remember_refusal(one.call, one.call.shapes)
        return asked._replace(left=left)

    def _look_up(self, wanted: Sequence[Mapping[str, int]], until: float | None) -> Asked:
        given = self.engine, self.call, self.tokens, self.own, wanted, until
        return requests_for(*given, self.rows)

    def _compile(self, asked: Asked) -> bool:
        """Compile what is missing. Returns whether a program turned out not to be maskable."""
        engine, tried = self.engine, self.tried
        every = {o.key: o for o in asked.every_request}
        tried.update((key, "cache") for key in every if key not in tried and key in engine.cache)
        todo = [o for key, o in every.items() if key not in tried]
        todo.sort(key=lambda o: -volume(o.sizes))  # the largest can stand in for all others
        refused = False
        compiling = compile_all(
            engine,
            todo,
            self.workers,
            self.epoch,
            deadline=self.deadline,
            first_run=self.first_run,
        )
        with progress_of(engine.name, len(todo), self.progress) as step:
            for request, outcome in compiling:
                tried[request.key] = outcome
                if isinstance(outcome, MaskingError) and not outcome.is_defect:
                    engine.refuse(request, outcome)
                    refused = True
                step(request, outcome)
        return refused


def asked(
    engine: Engine, call: Call, sizes: object
) -> tuple[Tokens, Mapping[str, int], list[dict[str, int]]]:
    """The tokens and logical sizes of a call, and the sizes to warm up."""
    signature, shapes = call.signature, call.shapes
    wanted: list[dict[str, int]] | None = None
    bucket_of = functools.partial(bucket_or_size, engine.config)
    # Without strategies calls are not resolved: open axes are those declared, or else guessed.
    if engine.config.always_exact:
        is_named = bool(signature.declared(shapes).sizes) or sizes is None
        tokens = (signature.declared_tokens if is_named else signature.guessed_tokens)(shapes)
        own = bind_sizes(tokens, shapes, signature.paths)
        wanted = combinations(sizes, tuple(variables_in(tokens)), own, bucket_of)
        others = (one for one in wanted if any(own[v] != n for v, n in one.items()))
        other = next(others, None)
        if is_named or other is None or _takes(call, tokens, own, other):
            return tokens, own, wanted
    # Without a strategy, guessed axes may be wrong (weights that happen to have the size of the
    # batch, say), and the function fails at other sizes. Resolving the call finds the right ones.
    call = engine.resolve(call)
    tokens, own = signature.open_axes(call, shapes)
    if not own and sizes is not None:  # all sizes run exact
        tokens = signature.guessed_tokens(shapes)
        own = bind_sizes(tokens, shapes, signature.paths)
    if wanted is None:
        wanted = combinations(sizes, tuple(variables_in(tokens)), own, bucket_of)
    if sizes is None and own:
        wanted += _in_files(engine, call)
    for one in wanted:
        check_names(one, tuple(variables_in(tokens)))
    return tokens, own, wanted


def _in_files(engine: Engine, call: Call) -> list[dict[str, int]]:
    """The buckets of a call's program that the directory of executables has."""
    files, program = engine.requests.files, call.program
    store = files.store()
    if store is None or not isinstance(program, Program):
        return []
    try:
        parts = files.digests_of(program)
        surroundings = environment(device_of(call.leaves))
    except NoDigest:
        return []
    return [
        dict(record.sizes)
        for record in store.records()
        if record.sizes.keys() == call.sizes.keys()
        and not record.exact
        and record.environment == surroundings
        and all(record.parts.get(part) == digest for part, digest in parts.items())
    ]


def _takes(call: Call, tokens: Tokens, own: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether the function can be traced at other sizes."""
    try:
        result_types(at_sizes(call, tokens, {**own, **other}))
    except Exception as error:
        if is_of_machine(error):
            raise
        return False
    return True
