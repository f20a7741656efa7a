"""Compile buckets before calls need them."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.build_exact import result_types
from bucketjit._compile.provider import Cleared
from bucketjit._compile.requests import CompileRequest, Source
from bucketjit._config import Fallback, is_positive_int
from bucketjit._errors import (
    FallbackError,
    MaskingError,
    SpecError,
    in_one_line,
    is_of_machine,
)
from bucketjit._jax.config import ThreadConfig
from bucketjit._precompile.progress import progress_of
from bucketjit._precompile.report import Warmed, WarmupReport
from bucketjit._precompile.requested_sizes import check_names, combinations
from bucketjit._runtime.buckets import bucket_or_size
from bucketjit._runtime.decisions import Because, Chunked, Exact, Masked, Refused
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.statistics import FrozenDict
from bucketjit._signature.binding import bind_sizes
from bucketjit._signature.resolved_call import ResolvedCall, variables_in
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import Tokens

_LOOKED_UP_AT_LEAST = 0.1  # seconds that sizes are looked up for, whatever the time budget


def check_options(workers: object, time_budget: object, **flags: object) -> None:
    """Hold options of a warm-up to what they may be.

    Raises:
        SpecError: One of them is something else.
    """
    if workers is not None and not is_positive_int(workers):
        raise SpecError(f"warmup: workers must be an int of at least 1, or None, got {workers!r}")
    check_seconds("warmup: time_budget", time_budget)
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise SpecError(f"warmup: {name} must be True or False, got {flag!r}")


def check_seconds(what: str, given: Any) -> None:
    """Hold a limit of time to what it may be.

    Raises:
        SpecError: It is neither None nor a number that is not negative.
    """
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and not (is_number and given >= 0):
        raise SpecError(f"{what} must be seconds, or None, got {given!r}")


def warm_up(
    engine: Engine,
    signed: SignedCall,
    sizes: object,
    workers: int | None,
    time_budget: float | None,
    progress: bool,
    first_run: bool,
    epoch: object,
) -> Warmed:
    """See `BucketedExec.warmup`.

    Args:
        engine: Serves the calls.
        signed: A call like those to come.
        sizes: Their sizes, or None for those of the call.
        workers: Threads that compile.
        time_budget: Seconds after which no compile begins.
        progress: Whether to tell how far it is.
        first_run: Whether to run each executable once.
        epoch: See `compile_all`; nothing is begun after a `ExecutableProvider.clear`.
    """
    began = time.monotonic()
    tokens, own, wanted = _asked(engine, signed, sizes)
    under_way = _WarmUp(
        engine,
        signed,
        tokens,
        own,
        workers,
        progress,
        first_run,
        None if time_budget is None else began + time_budget,
        epoch,
    )
    parts: list[Asked] = []
    waiting: Sequence[Mapping[str, int]] = wanted
    while waiting and not (parts and under_way.is_late):
        parts.append(under_way.some(waiting))
        waiting = parts[-1].left
    tried = under_way.tried
    every = {o.key: o for part in parts for o in part.every_order}
    present = [o for key, o in every.items() if tried.get(key) == "cache"]
    outcomes = [
        (o, tried.get(o.key)) for o in sorted(every.values(), key=lambda o: -volume(o.sizes))
    ]
    compiled = [o for o, outcome in outcomes if outcome in ("compile", "file")]
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


@dataclasses.dataclass(frozen=True)
class _WarmUp:
    """A warm-up that is under way.

    Attributes:
        engine, signed, workers, progress, first_run: See `warm_up`.
        tokens, own: See `orders_for`.
        deadline: When to begin no more.
        epoch: See `compile_all`.
        tried: What came of each order so far.
    """

    engine: Engine
    signed: SignedCall
    tokens: Tokens
    own: Mapping[str, int]
    workers: int | None
    progress: bool
    first_run: bool
    deadline: float | None
    epoch: object
    tried: dict[Hashable, Source | Exception] = dataclasses.field(default_factory=dict)

    @property
    def is_late(self) -> bool:
        """Whether to begin no more."""
        if self.engine.provider.epoch is not self.epoch:
            return True
        return self.deadline is not None and time.monotonic() >= self.deadline

    def some(self, wanted: Sequence[Mapping[str, int]]) -> Asked:
        """Compile what can be looked up in half of the time that is left.

        A look-up may trace the function, once for each size where it runs exact.

        Args:
            wanted: See `orders_for`.

        Returns:
            What was looked up, and what was not.
        """
        now, until = time.monotonic(), None
        if self.deadline is not None:
            until = now + max((self.deadline - now) / 2, _LOOKED_UP_AT_LEAST)
        asked = self._look_up(wanted, until)
        not_yet = set(map(id, asked.left))
        looked_up = [sizes for sizes in wanted if id(sizes) not in not_yet]
        left = asked.left
        while self._compile(asked):
            asked = self._look_up(looked_up, None)
        with self.engine.lock:
            for one in asked.exact.values():  # so that the next warm-up need not trace it
                if isinstance(self.tried.get(one.request.key), str):
                    self.signed.signature.remember_refusal(one.call, one.shapes)
        return asked._replace(left=left)

    def _look_up(self, wanted: Sequence[Mapping[str, int]], until: float | None) -> Asked:
        return orders_for(self.engine, self.signed, self.tokens, self.own, wanted, until)

    def _compile(self, asked: Asked) -> bool:
        """Compile what is not there; whether exact shapes are what calls need in its place."""
        engine, tried = self.engine, self.tried
        every = {o.key: o for o in asked.every_order}
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


def compile_all(
    engine: Engine,
    requests: Sequence[CompileRequest],
    workers: int | None,
    epoch: object,
    *,
    deadline: float | None = None,
    first_run: bool,
    is_asked_for: bool = True,
) -> Generator[tuple[CompileRequest, Source | Exception]]:
    """Compile several executables at the same time; XLA does so without Python's lock.

    Only as many are handed to the threads as they can take, so that an interrupt, the deadline or
    a `ExecutableProvider.clear` stops all others.

    Args:
        engine: Serves the calls.
        requests: What to compile.
        workers: Threads that compile; None for as many as there are cores, up to four.
        epoch: When the orders were made; see `ExecutableProvider.prepare`.
        deadline: When to begin no more.
        first_run: Whether to run each executable once.
        is_asked_for: See `ExecutableProvider.prepare`.

    Yields:
        Each one that was tried, and where it comes from, or why it does not.
    """
    prepare = functools.partial(
        engine.provider.prepare, first_run=first_run, is_asked_for=is_asked_for, epoch=epoch
    )
    count = workers or min(4, os.cpu_count() or 1)
    waiting = iter(requests)
    running: dict[Future[Source], CompileRequest] = {}
    config = ThreadConfig()  # contexts that are entered here hold there too
    with ThreadPoolExecutor(count, thread_name_prefix="bucketjit-warmup") as pool:
        while True:
            late = deadline is not None and time.monotonic() >= deadline
            while not late and len(running) < count:
                request = next(waiting, None)
                if request is None:
                    break
                try:
                    running[pool.submit(config.run, prepare, request)] = request
                except RuntimeError as refused:
                    if "shutdown" not in str(refused):  # which is all that tells it
                        raise
                    return  # the interpreter ends, and this is a daemon thread of the user
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                request = running.pop(future)
                error = future.exception()
                if isinstance(error, Cleared):
                    return
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield request, error or future.result()


class Unmasked(NamedTuple):
    """A call that cannot be masked.

    Attributes:
        why: Why not.
        order: What to compile for its exact shape.
        call: The call.
        shapes: Its shapes.
    """

    why: str
    request: CompileRequest
    call: ResolvedCall
    shapes: Sequence[tuple[int, ...]]


class Asked(NamedTuple):
    """What serves calls of some sizes.

    Attributes:
        requests: What to compile.
        exact: Sizes at which the calls cannot be masked.
        failed: Sizes that no executable was found for, and why.
        left: Sizes that were not looked at.
    """

    requests: list[CompileRequest]
    exact: dict[FrozenDict[str, int], Unmasked]
    failed: list[tuple[Mapping[str, int], str]]
    left: list[Mapping[str, int]]

    @property
    def every_order(self) -> list[CompileRequest]:
        """Those of the sizes at which calls cannot be masked included."""
        return [*self.requests, *(one.request for one in self.exact.values())]


def orders_for(
    engine: Engine,
    signed: SignedCall,
    tokens: Tokens,
    own: Mapping[str, int],
    wanted: Iterable[Mapping[str, int]],
    until: float | None = None,
) -> Asked:
    """What to compile for some sizes.

    Args:
        engine: Serves the calls.
        signed: A call like those to come.
        tokens: Its axes.
        own: Its sizes.
        wanted: Sizes of the calls to come; a variable that is left out has the size of this one.
        until: When to look at no more sizes, beyond the first.
    """
    found: dict[Hashable, CompileRequest] = {}
    exact: dict[FrozenDict[str, int], Unmasked] = {}
    failed: list[tuple[Mapping[str, int], str]] = []
    waiting = deque(wanted)
    is_first = True
    while waiting and (is_first or until is None or time.monotonic() < until):
        is_first = False
        chosen = waiting.popleft()
        all_sizes = {**own, **chosen}
        try:
            at = at_sizes(signed, tokens, all_sizes)
            call = None if engine.config.always_exact else engine.resolve(at)
            if call is None:
                requests: Iterable[CompileRequest | Unmasked] = [
                    engine.requests.exact(at, all_sizes)
                ]
            else:
                requests = _orders_of(engine, at, call, (at, call))
            for one in requests:
                if isinstance(one, CompileRequest):
                    found.setdefault(one.key, one)
                else:
                    sizes = chosen if one.call is call else one.call.sizes
                    exact[FrozenDict(sizes or one.request.sizes)] = one
        except Exception as error:  # of the function at these sizes, perhaps
            failed.append((FrozenDict(chosen), in_one_line(error)))
    return Asked(list(found.values()), exact, failed, list(waiting))


def _orders_of(
    engine: Engine, signed: SignedCall, call: ResolvedCall, whole: tuple[SignedCall, ResolvedCall]
) -> Iterator[CompileRequest | Unmasked]:
    """What to compile for a call, or for its chunks, one of each size.

    Args:
        engine: Serves the call.
        signed: The call.
        call: The same, resolved.
        whole: The call that it is a chunk of, or the call itself, also resolved.
    """
    # A chunk that must not be run by itself is served as a part of the whole; see
    # `ResolvedCall.whole`.
    own = whole if call.whole is not None else (signed, call)
    match engine.decide(signed, call):
        case Masked(bucket=bucket):
            yield engine.requests.masked(signed, call, bucket)
        case Exact(Because.UNMASKED, why) if engine.config.fallback is Fallback.ERROR:
            raise FallbackError(why.reason, why.remedy)
        case Exact(Because.UNMASKED | Because.EMPTY, why):
            request = engine.requests.exact(own[0], own[1].sizes)
            yield Unmasked(why.reason, request, own[1], own[0].shapes)
        case Exact():
            yield engine.requests.exact(own[0], own[1].sizes)
        case Chunked(splitting):
            for size in dict.fromkeys(splitting.sizes):
                part = splitting.part(call, size)
                at = at_sizes(signed, call.tokens, part.sizes)
                yield from _orders_of(engine, at, part, whole)
        case Refused(error):
            raise error


def _asked(
    engine: Engine, signed: SignedCall, sizes: object
) -> tuple[Tokens, Mapping[str, int], list[dict[str, int]]]:
    """The axes of a call, its sizes, and those that are asked for.

    Args:
        engine: Serves the call.
        signed: The call.
        sizes: What sizes are asked for, or None for those of the call.
    """
    signature, shapes = signed.signature, signed.shapes
    wanted: list[dict[str, int]] | None = None
    bucket_of = functools.partial(bucket_or_size, engine.config)
    if engine.config.always_exact:
        is_named = bool(signature.declared_sizes(shapes)) or sizes is None
        tokens = (signature.declared_tokens if is_named else signature.guessed_tokens)(shapes)
        own = bind_sizes(tokens, shapes, signature.paths)
        wanted = combinations(sizes, tuple(variables_in(tokens)), own, bucket_of)
        others = (one for one in wanted if any(own[v] != n for v, n in one.items()))
        other = next(others, None)
        if is_named or other is None or _takes(signed, tokens, own, other):
            return tokens, own, wanted
    call = engine.resolve(signed)  # weights that happen to have the size of the batch, perhaps
    tokens, own = call.tokens, call.sizes
    if not own and sizes is not None:  # all sizes run exact
        tokens = signature.guessed_tokens(shapes)
        own = bind_sizes(tokens, shapes, signature.paths)
    if wanted is None:
        wanted = combinations(sizes, tuple(variables_in(tokens)), own, bucket_of)
    for one in wanted:
        check_names(one, tuple(variables_in(tokens)))
    return tokens, own, wanted


def _takes(
    signed: SignedCall, tokens: Tokens, own: Mapping[str, int], other: Mapping[str, int]
) -> bool:
    """Whether the function takes other sizes; it is traced at them."""
    try:
        result_types(at_sizes(signed, tokens, {**own, **other}))
    except Exception as error:  # calls will raise it
        if is_of_machine(error):
            raise
        return False
    return True


def volume(sizes: Mapping[str, int]) -> int:
    """How many padded combinations a bucket holds."""
    return int(np.prod(list(sizes.values()), dtype=object)) if sizes else 0
