"""Compiles all buckets that the strategies list, with the first call that a program serves.

Strategies with a largest bucket, such as ``Pow2(max=64)``, list their buckets. The option is
`BucketedExec.with_ahead_compile`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Generator, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from bucketjit import strategies
from bucketjit._compile.provider import Cleared
from bucketjit._compile.requests import CompileRequest, Source
from bucketjit._config import Config
from bucketjit._events import Event
from bucketjit._ir.interface import Interface
from bucketjit._jax.config import ThreadConfig
from bucketjit._raised import in_one_line
from bucketjit._runtime.engine import Engine
from bucketjit._stages.requests import Unmasked, requests_of
from bucketjit._tracing.call import Call
from bucketjit.errors import CompileBudgetError, MaskingError


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
    running: dict[Future[Source], CompileRequest] = {}
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
                yield request, error or future.result()


def volume(sizes: Mapping[str, int]) -> int:
    """The product of the padded sizes of a bucket; 0 without variables."""
    return int(np.prod(list(sizes.values()), dtype=object)) if sizes else 0


_MOST = 1024  # listed buckets that are compiled at most if the cache has no bound


class Ahead:
    """Compiles the listed buckets of an engine, once for each program."""

    def __init__(self, workers: int | None) -> None:
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
        listed = listed_buckets(engine.config, call)
        if not listed:
            return ""
        assert call.program is not None
        if call.program.pairing is not None:
            return "no listed bucket is compiled: the function is traced at each size"
        count, bound = math.prod(map(len, listed)), engine.config.maxsize
        if count > (_MOST if bound is None else bound):
            return f"no listed bucket is compiled: there are {count}, beyond the cache"
        epoch = engine.provider.epoch
        sizes = [dict(row) for row in itertools.product(*listed)]
        todo, problems = _missing(engine, call, sizes)
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


def _missing(
    engine: Engine, call: Call, every: Sequence[Mapping[str, int]]
) -> tuple[list[CompileRequest], list[str]]:
    """The requests for calls of these sizes that are not in the cache, and what went wrong."""
    found: dict[Hashable, CompileRequest] = {}
    problems = []
    for sizes in every:
        try:
            requests = requests_of(engine, call, call.tokens, {**call.sizes, **sizes})
        except Exception as error:  # often of the function, which does not take these sizes
            problems.append(in_one_line(error))
            continue
        if not isinstance(requests, Unmasked):
            found.update((one.key, one) for one in requests if one.key not in engine.cache)
    return list(found.values()), problems


def listed_buckets(config: Config, call: Call) -> list[list[tuple[str, int]]]:
    """The buckets that the strategies of a call list."""
    every = ((v, strategies.buckets_of(config.strategy_of(v))) for v in call.sizes)
    return [[(v, size) for size in buckets] for v, buckets in every if buckets is not None]
