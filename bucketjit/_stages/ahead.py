"""What is compiled ahead of calls, and all of it in parallel: a warm-up's sizes, listed buckets.

Strategies with a largest bucket, such as ``Pow2(max=64)``, list their buckets. They are compiled
with the first call that a program serves; the option is `BucketedExec.with_ahead_compile`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import reprlib
import threading
import time
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from bucketjit import strategies
from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.provider import Cleared, Provided
from bucketjit._compile.requests import CompileRequest, Source
from bucketjit._compile.rows import Rows
from bucketjit._config import Fallback, is_int_from
from bucketjit._events import Event
from bucketjit._ir.dynamic_axes import Tokens
from bucketjit._ir.interface import Interface
from bucketjit._jax.config import ThreadConfig
from bucketjit._raised import in_one_line
from bucketjit._runtime.decisions import Because, Masked, Unpadded
from bucketjit._runtime.engine import Engine
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import Resolution
from bucketjit.errors import CompileBudgetError, FallbackError, MaskingError, SpecError
from bucketjit.strategies.rounding import MOST_LISTED

_LOOKED_AT_EACH = 4096  # combinations that are not thinned; looking up the bucket of one is 0.1 ms
_MOST_SIZES = 1 << 22  # sizes of one variable
_MOST_DICTS = 1 << 20  # dicts of a list, or of any other iterable

BucketOf = Callable[[str, int], Hashable]


def combinations(
    sizes: Any, variables: Sequence[str], logical: Mapping[str, int], bucket_of: BucketOf
) -> list[dict[str, int]]:
    """The combinations of sizes that a warm-up is for.

    Too many combinations are thinned: of the sizes in one bucket of a variable, only the smallest
    and the largest are kept.
    """
    v = (*variables, "batch")[0]
    if sizes is None:
        return [dict(logical)]
    if _is_strategy(sizes):
        if len(variables) != 1:
            raise SpecError(
                f"sizes: {sizes!r} is for sizes of one dimension, and these arguments have "
                f"{_listed(variables)}; give a dict of each to its sizes"
            )
        sizes = {variables[0]: sizes}
    if isinstance(sizes, Mapping):
        check_names(sizes, variables)
        each = {v: _sizes_of(v, entry) for v, entry in sizes.items()}
        if math.prod(map(len, each.values())) > _LOOKED_AT_EACH:
            each = {v: _ends(ns, functools.partial(bucket_of, v)) for v, ns in each.items()}
        if (count := math.prod(map(len, each.values()))) > MOST_LISTED:
            raise SpecError(
                f"sizes: {count} combinations of sizes, those in one bucket not counted; give "
                "those that occur as a list of dicts"
            )
        return [dict(zip(each, c, strict=True)) for c in itertools.product(*each.values())]
    if not isinstance(sizes, Iterable) or isinstance(sizes, str):
        raise SpecError(
            f"sizes must be a dict such as {{{v!r}: range(1, 65)}}, a list of dicts, or "
            f"a strategy, got {reprlib.repr(sizes)}"
        )
    distinct: dict[Hashable, dict[str, int]] = {}  # the same sizes may occur often
    for i, row in enumerate(sizes):
        if i == _MOST_DICTS:
            raise SpecError(f"sizes: more than {_MOST_DICTS} dicts are too many to look at")
        if not isinstance(row, Mapping):
            raise SpecError(
                f"sizes: expected dicts such as {{{v!r}: 8}}, got {reprlib.repr(row)}; several "
                f"sizes of one variable are {{{v!r}: [8, 16]}}"
            )
        check_names(row, variables)
        if several := [v for v, n in row.items() if not isinstance(n, int | np.integer)]:
            raise SpecError(
                f"sizes: each dict of a list has one size of {several[0]!r}, an int, got "
                f"{row[several[0]]!r}; a dict of all sizes stands by itself"
            )
        chosen = {v: _sizes_of(v, n)[0] for v, n in row.items()}
        distinct.setdefault(frozenset(chosen.items()), chosen)
    return list(distinct.values())


def check_names(sizes: Mapping[str, Any], variables: Sequence[str]) -> None:
    if unknown := [v for v in sizes if v not in variables]:
        existing = _listed(variables)
        if variables:
            existing += f"; write {{{variables[0]!r}: ...}}, or name axes in dynamic_axes"
        raise SpecError(
            f"sizes: there is no dimension {unknown[0]!r}; these arguments have {existing}"
        )


def _listed(variables: Sequence[str]) -> str:
    return ", ".join(map(repr, variables)) or "no open axis; name those that vary in dynamic_axes"


def _ends(sizes: Sequence[int], bucket_of: Callable[[int], Hashable]) -> list[int]:
    """The smallest and the largest size in each bucket, in the order of the buckets found."""
    ends: dict[Hashable, tuple[int, int]] = {}
    for n in sizes:
        bucket = bucket_of(n)
        low, high = ends.get(bucket, (n, n))
        ends[bucket] = min(low, n), max(high, n)
    return [n for pair in ends.values() for n in dict.fromkeys(pair)]


def _is_strategy(sizes: object) -> bool:
    """Whether an object is a strategy; strategies of users may have ``boundaries`` only."""
    return hasattr(sizes, "bucket") or hasattr(sizes, "boundaries")


def _sizes_of(variable: str, entry: Any) -> list[int]:
    if _is_strategy(entry):
        entry = strategies.buckets_of(entry) or getattr(entry, "boundaries", entry)
    if hasattr(entry, "tolist"):  # an array of NumPy or JAX
        entry = entry.tolist()
    values: list[Any] = []
    try:  # `given` may be any object, or an iterable without end
        is_number = isinstance(entry, int | np.integer)
        values = [entry] if is_number else list(itertools.islice(entry, _MOST_SIZES + 1))
        numbers = [int(n) for n in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) > _MOST_SIZES:
        raise SpecError(
            f"sizes: more than {_MOST_SIZES} sizes of {variable!r} are too many to look at"
        )
    if not numbers or not all(is_int_from(n, 0) for n in values):
        raise SpecError(
            f"the sizes of {variable!r} must be ints of at least 0, one or more, or a "
            "range, or a strategy that has a largest bucket such as Pow2(max=64) and not too many "
            f"below it, got {reprlib.repr(entry)}"
        )
    return numbers


class Unmasked(NamedTuple):
    """A call that cannot be masked, why, and the request for its exact shape."""

    why: str
    request: CompileRequest
    call: Call


def requests_of(
    engine: Engine, call: Call, tokens: Tokens, sizes: dict[str, int], rows: Sequence[Rows] = ()
) -> list[CompileRequest] | Unmasked:
    """What to compile for a call of some sizes, or for ``rows``; raises as the function does."""
    call = at_sizes(call, tokens, sizes)
    if engine.config.always_exact:
        return [engine.requests.of(call.resolved(Resolution(tokens, sizes, None)))]
    call, decision = engine.chosen(call)
    if isinstance(decision, Masked) and engine.buckets.learning(decision.program) is not None:
        # Who asks for sizes means their buckets, not a larger one that was learnt and holds them.
        bucket_of_strategy = engine.buckets.of(decision.program, call, learns=False)
        decision = dataclasses.replace(decision, bucket=bucket_of_strategy)
    match decision:
        case Masked(program, bucket, None) if rows and not engine.refusals.of_batches(
            program, call, rows[0].mapped
        ):
            return [engine.requests.of(call, bucket, each) for each in rows]
        case Masked(program, bucket):
            requests = [engine.requests.of(call, bucket)]
            if fewer := program.sizes_before(call.sizes, bucket):
                call, decision = engine.chosen(at_sizes(call, tokens, fewer))
                if isinstance(decision, Masked):
                    requests.append(engine.requests.of(call, decision.bucket))
            return requests
        case Unpadded(Because.UNMASKED, why) if engine.config.fallback is Fallback.ERROR:
            raise FallbackError(why.reason, why.remedy)
        case Unpadded(because, why):
            request = engine.requests.of(call)
            if because in (Because.UNMASKED, Because.EMPTY):
                return Unmasked(why.reason, request, call)
            return [request]


def compile_all(
    engine: Engine,
    requests: Sequence[CompileRequest],
    workers: int | None,
    epoch: object,
    deadline: float = math.inf,
    *,
    first_run: bool,
    is_asked_for: bool = True,
) -> Generator[tuple[CompileRequest, Source | Exception]]:
    """Compile several executables in parallel. XLA compiles without holding Python's lock.

    What cannot be masked is noted. A request is handed to the pool only when a thread is free, so
    that an interrupt, the deadline or a `ExecutableProvider.clear` stops all later ones.
    """
    prepare = functools.partial(
        engine.provider.prepare, first_run=first_run, is_asked_for=is_asked_for, epoch=epoch
    )
    count = workers or min(4, os.cpu_count() or 1)
    waiting = iter(requests)
    running: dict[Future[Provided], CompileRequest] = {}
    config = ThreadConfig()  # JAX's context managers of this thread hold in the others too
    with ThreadPoolExecutor(count, thread_name_prefix="bucketjit-warmup") as pool:
        while True:
            late = time.monotonic() >= deadline
            while not late and len(running) < count:
                request = next(waiting, None)
                if request is None:
                    break
                try:
                    running[pool.submit(config.run, prepare, request)] = request
                except RuntimeError as refused:
                    # At the end of the interpreter pools refuse work, in a daemon thread of the
                    # user for instance. Only the text of the error distinguishes that.
                    if "shutdown" not in str(refused):
                        raise
                    return
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                request = running.pop(future)
                error = future.exception()
                if isinstance(error, Cleared):
                    return
                if error is not None and not isinstance(error, Exception):
                    raise error
                if isinstance(error, MaskingError) and not error.is_defect:
                    engine.refuse(request, error)
                yield request, error or future.result().source


def volume(sizes: Mapping[str, int]) -> int:
    """The product of the padded sizes of a bucket; 0 without variables."""
    return int(np.prod(list(sizes.values()), dtype=object)) if sizes else 0


_MOST = 1024  # listed buckets that are compiled at most if the cache has no bound


class Ahead:
    """Compiles the listed buckets of an engine, once for each program."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        # By program, whether the budget allowed compiles; if not, only files were loaded.
        self._begun: weakref.WeakKeyDictionary[Interface, bool] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def prepare(self, engine: Engine, call: Call, key: Hashable) -> None:
        """Compile the listed buckets if this is the first call of its program.

        The bucket of the call comes first, then the largest one, which can stand in for all others.
        An error does not fail the call, but becomes an event: a bucket that is missing is compiled
        by the call that needs it, which gets the error. Calls in other threads wait for their own
        bucket only. An attempt that was interrupted is repeated by the next call.
        """
        program = call.program
        assert program is not None
        affordable = engine.provider.allowance.affordable()
        with self._lock:
            begun = self._begun.get(program)
            if begun or (begun is not None and not affordable):
                return
            if not affordable and engine.requests.files.store() is None:
                return
            self._begun[program] = affordable
        try:
            problem = self._compile(engine, call, key)
        except Exception as error:
            problem = in_one_line(error)
        except BaseException:
            with self._lock:
                self._begun.pop(program, None)
            raise
        if problem:
            engine.emit(Event("ahead", engine.name, call.sizes, detail=problem))

    def _compile(self, engine: Engine, call: Call, key: Hashable) -> str:
        """Compile what is missing. Returns what was not compiled and why; empty if all is there."""
        every = ((v, strategies.buckets_of(engine.config.strategy_of(v))) for v in call.sizes)
        listed = [[(v, n) for n in buckets] for v, buckets in every if buckets is not None]
        if not listed:
            return ""
        assert call.program is not None
        if call.program.pairing is not None:
            return "no listed bucket is compiled: the function is traced at each size"
        count, bound = math.prod(map(len, listed)), engine.config.maxsize
        if count > (_MOST if bound is None else bound):
            return f"no listed bucket is compiled: there are {count}, beyond the cache"
        epoch = engine.provider.epoch
        missing: dict[Hashable, CompileRequest] = {}
        problems = []
        for row in itertools.product(*listed):
            try:
                requests = requests_of(engine, call, call.tokens, {**call.sizes, **dict(row)})
            except Exception as error:  # often of the function, which does not take these sizes
                problems.append(in_one_line(error))
                continue
            if not isinstance(requests, Unmasked):
                missing |= {r.key: r for r in requests if r.key not in engine.cache}
        todo = list(missing.values())
        if bound is not None and len(todo) > bound - len(engine.cache):
            return f"no listed bucket is compiled: the cache has no room for {len(todo)} buckets"
        # The bucket of the call first, because it waits for it; then the largest.
        todo.sort(key=lambda request: (request.key != key, -volume(request.sizes)))
        before = engine.cache.evictions
        in_files = engine.requests.files.store() is not None
        compiling = compile_all(
            engine, todo, self._workers, epoch, first_run=True, is_asked_for=False
        )
        with contextlib.closing(compiling):
            for _, outcome in compiling:
                if isinstance(outcome, CompileBudgetError):
                    problems.append("the rest is beyond what may be compiled")
                    if in_files:  # a file may have one of the others
                        continue
                    break
                if engine.cache.evictions != before:
                    problems.append("the rest would drive executables out of the cache")
                    break
                refused = isinstance(outcome, MaskingError) and not outcome.is_defect
                if isinstance(outcome, Exception) and not refused:
                    problems.append(in_one_line(outcome))
        if not problems:
            return ""
        return f"not all listed buckets are compiled: {'; '.join(dict.fromkeys(problems))}"
