"""Compiles buckets before calls need them: `BucketedExec.warmup`.

A warm-up turns sizes into compile requests (`requests_of`) and has several threads carry them out
(`compile_all`), until nothing is left or the time is up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence

from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.bodies import result_types
from bucketjit._compile.requests import CompileRequest, Source
from bucketjit._compile.rows import Rows
from bucketjit._config import check_seconds, is_int_from
from bucketjit._events import one_line, printable, shown
from bucketjit._ir.dynamic_axes import Tokens
from bucketjit._raised import WithoutErrors, in_one_line
from bucketjit._runtime.buckets import bucket_or_size
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.statistics import FrozenDict
from bucketjit._stages.ahead import Unmasked, combinations, compile_all, requests_of, volume
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import bind_sizes, variables_in
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


Sizes = Mapping[str, int]
Needed = dict[Hashable, CompileRequest]  # requests by key

_LOOKED_UP_AT_LEAST = 0.1  # seconds for looking up buckets, even if the time budget is smaller


def check_options(workers: object, time_budget: object, **flags: object) -> None:
    if workers is not None and not is_int_from(workers, 1):
        raise SpecError(f"warmup: workers must be an int of at least 1, or None, got {workers!r}")
    check_seconds("warmup: time_budget", time_budget)
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise SpecError(f"warmup: {name} must be True or False, got {flag!r}")


def warm_up(
    engine: Engine,
    call: Call,
    sizes: object,
    workers: int | None,
    time_budget: float | None,
    progress: bool,
    first_run: bool = False,
    rows: Sequence[Rows] = (),
) -> WarmupReport:
    began, epoch = time.monotonic(), engine.provider.epoch
    tokens, logical, wanted = asked(engine, call, sizes)
    deadline = math.inf if time_budget is None else began + time_budget
    how = workers, epoch, deadline, progress, first_run
    under_way = _WarmUp(engine, call, tokens, logical, rows, *how)
    waiting: Sequence[Sizes] = wanted
    while waiting:
        waiting = under_way.some(waiting)
        if engine.provider.epoch is not epoch or time.monotonic() >= deadline:
            break
    under_way.remember()
    return under_way.report(waiting, began)


@dataclasses.dataclass
class _WarmUp:
    """A running warm-up: the requests of the sizes so far, and the outcomes of those tried."""

    engine: Engine
    call: Call
    tokens: Tokens
    logical: Sizes
    rows: Sequence[Rows]
    workers: int | None
    epoch: object
    deadline: float
    progress: bool
    first_run: bool
    requests: Needed = dataclasses.field(default_factory=dict)
    exact: dict[FrozenDict[str, int], Unmasked] = dataclasses.field(default_factory=dict)
    failed: dict[tuple[Sizes, str], None] = dataclasses.field(default_factory=dict)
    tried: dict[Hashable, Source | Exception] = dataclasses.field(default_factory=dict)

    def some(self, waiting: Sequence[Sizes]) -> Sequence[Sizes]:
        """Look up buckets for half of the time that is left, and compile them.

        Returns the sizes that there was no time to look up.
        """
        now = time.monotonic()
        until = now + max((self.deadline - now) / 2, _LOOKED_UP_AT_LEAST)
        needed, looked_up = self._look_up(waiting, until)
        while self._compile(needed):  # the same sizes are then served at their exact shapes
            needed, _ = self._look_up(looked_up, math.inf)
        self.requests |= needed
        return waiting[len(looked_up) :]

    def _look_up(self, every: Sequence[Sizes], until: float) -> tuple[Needed, Sequence[Sizes]]:
        """The requests of the sizes that there is time for, and these. A look-up may trace."""
        needed: Needed = {}
        for number, chosen in enumerate(every):
            if number and time.monotonic() >= until:
                return needed, every[:number]
            sizes = {**self.logical, **chosen}
            try:
                requests = requests_of(self.engine, self.call, self.tokens, sizes, self.rows)
            except Exception as error:  # often of the function, which does not take these sizes
                self.failed[FrozenDict(chosen), in_one_line(error)] = None
                continue
            if isinstance(requests, Unmasked):
                self.exact[FrozenDict(chosen or requests.request.sizes)] = requests
                requests = [requests.request]
            needed |= {request.key: request for request in requests if request.key not in needed}
        return needed, every

    def _compile(self, needed: Needed) -> bool:
        """Compile what is missing, the largest first: it can stand in for all others.

        Returns whether a program turned out not to be maskable.
        """
        engine, tried, refused = self.engine, self.tried, False
        tried.update((k, "cache") for k in needed if k not in tried and k in engine.cache)
        todo = sorted((o for k, o in needed.items() if k not in tried), key=_largest_first)
        tell = _teller(engine.name, len(todo)) if self.progress else None
        how = engine, todo, self.workers, self.epoch, self.deadline
        for request, outcome in compile_all(*how, first_run=self.first_run):
            tried[request.key] = outcome
            if tell is not None:
                tell(request, outcome)
            refused |= isinstance(outcome, MaskingError) and not outcome.is_defect
        return refused

    def remember(self) -> None:
        """Make the next warm-up trace nothing again, and `map` take these row counts alone."""
        with self.engine.lock:
            for unmasked in self.exact.values():
                if isinstance(self.tried.get(unmasked.request.key), str):
                    self.call.signature.remember_refusal(unmasked.call, unmasked.call.shapes)
        for key in self.requests if self.rows else ():
            slot = self.engine.cache.slot(key)
            if slot is not None and slot.entry is not None:
                slot.entry.asked = True

    def report(self, waiting: Sequence[Sizes], began: float) -> WarmupReport:
        tried, cache = self.tried, self.engine.cache
        present = [o for key, o in self.requests.items() if tried.get(key) == "cache"]
        ordered = sorted(self.requests.values(), key=_largest_first)
        compiled = [o for o in ordered if tried.get(o.key) in ("compile", "file")]
        for o in ordered:
            if isinstance(error := tried.get(o.key), Exception):
                self.failed[FrozenDict(o.sizes), f"{type(error).__name__}: {error}"] = None
        # Read before the epoch: a clear between the two would otherwise be told as a full cache.
        evicted = [o for o in (*compiled, *present) if o.key not in cache]
        left = (*(o.sizes for o in ordered if o.key not in tried), *waiting)
        return WarmupReport(
            compiled=tuple(FrozenDict(o.sizes) for o in compiled),
            present=tuple(FrozenDict(o.sizes) for o in present),
            failed=tuple(self.failed),
            exact=tuple((sizes, unmasked.why) for sizes, unmasked in self.exact.items()),
            left=tuple(map(FrozenDict, left)),
            seconds=time.monotonic() - began,
            evicted=tuple(FrozenDict(o.sizes) for o in evicted),
            loaded=sum(tried[o.key] == "file" for o in compiled),
            cleared=self.engine.provider.epoch is not self.epoch,
        )


def _largest_first(request: CompileRequest) -> int:
    return -volume(request.sizes)


def _teller(name: str, total: int) -> Callable[[CompileRequest, Source | Exception], None]:
    """What tells on standard error, in a line for each executable, how far a warm-up is."""
    done, stream = itertools.count(1), sys.stderr

    def tell(request: CompileRequest, outcome: Source | Exception) -> None:
        what = "compiled"
        if isinstance(outcome, Exception):
            refused = isinstance(outcome, MaskingError) and not outcome.is_defect
            what = "cannot be masked, and runs exact:" if refused else "failed"
        sizes = printable(shown(request.sizes)) or "exact"
        if stream is not None:  # pythonw and daemons have no standard error
            with contextlib.suppress(OSError, ValueError):  # a full disk must not end the warm-up
                print(f"{one_line(name)}: {what} {sizes} ({next(done)}/{total})", file=stream)

    return tell


def asked(
    engine: Engine, call: Call, sizes: object
) -> tuple[Tokens, Mapping[str, int], list[dict[str, int]]]:
    """The tokens and logical sizes of a call, and the sizes to warm up."""
    signature, shapes = call.signature, call.shapes
    is_named = sizes is None or bool(signature.declared(shapes).sizes)
    tokens = (signature.declared_tokens if is_named else signature.guessed_tokens)(shapes)
    logical = bind_sizes(tokens, shapes, signature.paths)
    # Guessed axes may be wrong, as of weights that happen to have the size of the batch.
    if not engine.config.always_exact or not (is_named or _is_longer(call, tokens, logical)):
        call = engine.resolve(call)
        resolved, opened = signature.open_axes(call, shapes)
        if opened or sizes is None:  # else all sizes run exact
            tokens, logical = resolved, opened
        else:
            tokens = signature.guessed_tokens(shapes)
            logical = bind_sizes(tokens, shapes, signature.paths)
    bucket_of = functools.partial(bucket_or_size, engine.config)
    wanted = combinations(sizes, tuple(variables_in(tokens)), logical, bucket_of)
    if sizes is None and logical:
        wanted += [
            dict(kept.sizes)
            for kept in engine.requests.kept(call)
            if kept.sizes.keys() == call.sizes.keys()
        ]
    return tokens, logical, wanted


def _is_longer(call: Call, tokens: Tokens, sizes: Mapping[str, int]) -> bool:
    """Whether the function can be traced where all open axes are longer by one."""
    with WithoutErrors():
        result_types(at_sizes(call, tokens, {v: n + 1 for v, n in sizes.items()}))
        return True
    return False
