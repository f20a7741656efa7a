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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

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
from bucketjit._raised import in_one_line, is_of_machine
from bucketjit._runtime.buckets import bucket_or_size
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.statistics import FrozenDict
from bucketjit._stages.listed_buckets import compile_all, volume
from bucketjit._stages.requests import Unmasked, combinations, requests_of
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
    first_run: bool = False,
    rows: Sequence[Rows] = (),
) -> WarmupReport:
    """Warm up the calls of one signature; see `BucketedExec.warmup`."""
    began, epoch = time.monotonic(), engine.provider.epoch
    tokens, own, wanted = asked(engine, call, sizes)
    deadline = math.inf if time_budget is None else began + time_budget
    requests: dict[Hashable, CompileRequest] = {}
    exact: dict[FrozenDict[str, int], Unmasked] = {}
    failed: dict[tuple[Mapping[str, int], str], None] = {}
    tried: dict[Hashable, Source | Exception] = {}

    def look_up(
        every: Sequence[Mapping[str, int]], until: float
    ) -> tuple[dict[Hashable, CompileRequest], Sequence[Mapping[str, int]]]:
        """The requests of the sizes that there is time for, and these. A look-up may trace."""
        needed: dict[Hashable, CompileRequest] = {}
        for number, chosen in enumerate(every):
            if number and time.monotonic() >= until:
                return needed, every[:number]
            try:
                found = requests_of(engine, call, tokens, {**own, **chosen}, rows)
            except Exception as error:  # often of the function, which does not take these sizes
                failed[FrozenDict(chosen), in_one_line(error)] = None
                continue
            if isinstance(found, Unmasked):
                exact[FrozenDict(chosen or found.request.sizes)] = found
                found = [found.request]
            needed |= {one.key: one for one in found if one.key not in needed}
        return needed, every

    def compile_missing(needed: Mapping[Hashable, CompileRequest]) -> bool:
        """Compile what is missing, the largest first: it can stand in for all others.

        Returns whether a program turned out not to be maskable.
        """
        new = [o for key, o in needed.items() if key not in tried]
        tried.update((o.key, "cache") for o in new if o.key in engine.cache)
        todo = sorted((o for o in new if o.key not in tried), key=lambda o: -volume(o.sizes))
        tell = _teller(engine.name, len(todo)) if progress else None
        refused = False
        given = engine, todo, workers, epoch, deadline
        for request, outcome in compile_all(*given, first_run=first_run):
            tried[request.key] = outcome
            if tell is not None:
                tell(request, outcome)
            refused |= isinstance(outcome, MaskingError) and not outcome.is_defect
        return refused

    waiting: Sequence[Mapping[str, int]] = wanted
    while waiting and (waiting is wanted or _may_begin(engine, epoch, deadline)):
        now = time.monotonic()
        until = now + max((deadline - now) / 2, _LOOKED_UP_AT_LEAST)
        needed, looked_up = look_up(waiting, until)
        waiting = waiting[len(looked_up) :]
        while compile_missing(needed):  # the same sizes are then served at their exact shapes
            needed, _ = look_up(looked_up, math.inf)
        requests |= needed
    with engine.lock:
        for one in exact.values():  # so that the next warm-up does not trace it again
            if isinstance(tried.get(one.request.key), str):
                call.signature.remember_refusal(one.call, one.call.shapes)
    present = [o for key, o in requests.items() if tried.get(key) == "cache"]
    ordered = sorted(requests.values(), key=lambda o: -volume(o.sizes))
    compiled = [o for o in ordered if tried.get(o.key) in ("compile", "file")]
    if rows:
        _note_asked(engine, (*compiled, *present))
    errors = ((o, why) for o in ordered if isinstance(why := tried.get(o.key), Exception))
    failed.update(((FrozenDict(o.sizes), f"{type(e).__name__}: {e}"), None) for o, e in errors)
    left = (*(o.sizes for o in ordered if o.key not in tried), *waiting)
    # Read before the epoch: a clear between the two would otherwise be reported as a full cache.
    evicted = [o for o in (*compiled, *present) if o.key not in engine.cache]
    return WarmupReport(
        compiled=tuple(FrozenDict(o.sizes) for o in compiled),
        present=tuple(FrozenDict(o.sizes) for o in present),
        failed=tuple(failed),
        exact=tuple((sizes, one.why) for sizes, one in exact.items()),
        left=tuple(map(FrozenDict, left)),
        seconds=time.monotonic() - began,
        evicted=tuple(FrozenDict(o.sizes) for o in evicted),
        loaded=sum(tried[o.key] == "file" for o in compiled),
        cleared=engine.provider.epoch is not epoch,
    )


def _may_begin(engine: Engine, epoch: object, deadline: float) -> bool:
    """Whether a further compile may begin: there is time, and the cache was not cleared."""
    return engine.provider.epoch is epoch and time.monotonic() < deadline


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


def _note_asked(engine: Engine, requests: Iterable[CompileRequest]) -> None:
    """Make `map` take the row counts of these executables, and no others, from now on."""
    for request in requests:
        slot = engine.cache.slot(request.key)
        if slot is not None and slot.entry is not None:
            slot.entry.asked = True


def asked(
    engine: Engine, call: Call, sizes: object
) -> tuple[Tokens, Mapping[str, int], list[dict[str, int]]]:
    """The tokens and logical sizes of a call, and the sizes to warm up."""
    signature, shapes = call.signature, call.shapes
    is_named = sizes is None or bool(signature.declared(shapes).sizes)
    tokens = (signature.declared_tokens if is_named else signature.guessed_tokens)(shapes)
    own = bind_sizes(tokens, shapes, signature.paths)
    # Guessed axes may be wrong, as of weights that happen to have the size of the batch.
    if not engine.config.always_exact or not (is_named or _is_longer(call, tokens, own)):
        call = engine.resolve(call)
        resolved, opened = signature.open_axes(call, shapes)
        if opened or sizes is None:  # else all sizes run exact
            tokens, own = resolved, opened
        else:
            tokens = signature.guessed_tokens(shapes)
            own = bind_sizes(tokens, shapes, signature.paths)
    bucket_of = functools.partial(bucket_or_size, engine.config)
    wanted = combinations(sizes, tuple(variables_in(tokens)), own, bucket_of)
    if sizes is None and own:
        wanted += _in_files(engine, call)
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


def _is_longer(call: Call, tokens: Tokens, sizes: Mapping[str, int]) -> bool:
    """Whether the function can be traced where all open axes are longer by one."""
    try:
        result_types(at_sizes(call, tokens, {v: n + 1 for v, n in sizes.items()}))
    except Exception as error:
        if is_of_machine(error):
            raise
        return False
    return True
