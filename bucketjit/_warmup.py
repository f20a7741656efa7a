"""Compile buckets before calls need them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit import _jax, strategies
from bucketjit._axes import STATIC, Tokens
from bucketjit._building import can_be
from bucketjit._config import Fallback, is_positive_int
from bucketjit._dims import evaluate_text
from bucketjit._engine import Engine
from bucketjit._errors import (
    BucketOverflowError,
    FallbackError,
    MaskingError,
    SpecError,
    in_one_line,
)
from bucketjit._events import shown
from bucketjit._family import variables_in
from bucketjit._overflow import exactly
from bucketjit._progress import progress_of
from bucketjit._signature import bind_sizes
from bucketjit._signing import Signed
from bucketjit._stats import FrozenDict
from bucketjit._supply import Order
from bucketjit.strategies.listing import MOST_LISTED


@dataclasses.dataclass(frozen=True)
class WarmupReport:
    """What a warm-up has done; ``print`` it.

    Attributes:
        compiled: The buckets that it compiled, or read from files: `loaded` of them. Where calls
            run exact, the sizes of their exact shapes.
        present: Those that were compiled already.
        failed: Those that could not be compiled, or sizes that no bucket was found for, and why.
        exact: Sizes that no bucket serves, since the call cannot be masked, and why. Their exact
            shapes are compiled.
        left: Buckets that there was no time for; another warm-up goes on with them.
        seconds: What it took.
        evicted: Those of the compiled ones that others have driven out of the cache meanwhile,
            since it does not hold all of them.
        stale: What is another now than when the manifest was made, in words. What it names was
            compiled all the same, as the function and the versions are now.
        loaded: How many of the compiled ones were read from files.
    """

    compiled: tuple[Mapping[str, int], ...]
    present: tuple[Mapping[str, int], ...]
    failed: tuple[tuple[Mapping[str, int], str], ...]
    exact: tuple[tuple[Mapping[str, int], str], ...]
    left: tuple[Mapping[str, int], ...]
    seconds: float
    evicted: tuple[Mapping[str, int], ...] = ()
    stale: tuple[str, ...] = ()
    loaded: int = 0

    def __str__(self) -> str:
        loaded = f" ({self.loaded} of them from files)" if self.loaded else ""
        head = (
            f"{len(self.compiled)} compiled{loaded}, {len(self.present)} present, "
            f"{len(self.failed)} failed, {len(self.exact)} exact, {len(self.left)} left, "
            f"in {self.seconds:.2f} s"
        )
        lines = [f"  failed {shown(sizes) or 'exact'}: {why}" for sizes, why in self.failed]
        lines += [f"  exact {shown(sizes) or 'exact'}: {why}" for sizes, why in self.exact]
        lines += [f"  evicted {shown(b) or 'exact'}: the cache is full" for b in self.evicted]
        lines += [f"  stale: {why}" for why in self.stale]
        return "\n".join([head, *lines])


def none_warmed(sizes: Sequence[Mapping[str, int]], error: Exception) -> WarmupReport:
    """A warm-up of calls that failed as a whole."""
    failed = [(FrozenDict(chosen), in_one_line(error)) for chosen in sizes or [{}]]
    return WarmupReport((), (), tuple(failed), (), (), 0.0)


def together(reports: Sequence[WarmupReport], stale: Iterable[str]) -> WarmupReport:
    """Several warm-ups as one, of a manifest of which this is stale."""
    return WarmupReport(
        compiled=tuple(b for r in reports for b in r.compiled),
        present=tuple(b for r in reports for b in r.present),
        failed=tuple(b for r in reports for b in r.failed),
        exact=tuple(b for r in reports for b in r.exact),
        left=tuple(b for r in reports for b in r.left),
        seconds=sum(r.seconds for r in reports),
        evicted=tuple(b for r in reports for b in r.evicted),
        stale=tuple(dict.fromkeys(stale)),
        loaded=sum(r.loaded for r in reports),
    )


def check_options(workers: Any, time_budget: Any) -> None:
    """Hold options of a warm-up to what they may be.

    Raises:
        SpecError: One of them is something else.
    """
    if workers is not None and not is_positive_int(workers):
        raise SpecError(f"warmup: workers must be an int of at least 1, or None, got {workers!r}")
    is_number = isinstance(time_budget, int | float) and not isinstance(time_budget, bool)
    if time_budget is not None and not (is_number and time_budget >= 0):
        raise SpecError(f"warmup: time_budget must be seconds, or None, got {time_budget!r}")


def warm_up(
    engine: Engine,
    signed: Signed,
    sizes: Any,
    workers: int | None,
    time_budget: float | None,
    progress: bool,
    first_run: bool,
) -> WarmupReport:
    """See `BucketedExec.warmup`.

    Args:
        engine: Serves the calls.
        signed: A call like those to come.
        sizes: Their sizes, or None for those of the call.
        workers: Threads that compile.
        time_budget: Seconds after which no compile begins.
        progress: Whether to tell how far it is.
        first_run: Whether to run each executable once.
    """
    began = time.monotonic()
    tokens, own = _axes_of(engine, signed, sizes)
    wanted = combinations(sizes, tuple(variables_in(tokens)), own)
    present: dict[Hashable, Order] = {}
    compiled: list[Order] = []
    failures: list[tuple[Mapping[str, int], str]] = []
    tried: dict[Hashable, Exception | None] = {}
    deadline = None if time_budget is None else began + time_budget
    refused = True
    while refused:  # then their exact shapes are what calls need
        refused = False
        asked = orders_for(engine, signed, tokens, own, wanted)
        untried = {o.key: o for o in (*asked.orders, *asked.exact_orders) if o.key not in tried}
        present.update((key, o) for key, o in untried.items() if key in engine.cache)
        todo = [o for key, o in untried.items() if key not in engine.cache]
        # The largest first: it can stand in for all others.
        todo.sort(key=lambda o: -volume(o.sizes))
        with progress_of(engine.name, len(todo), progress) as step:
            for order, error in compile_all(
                engine, todo, workers, deadline=deadline, first_run=first_run
            ):
                tried[order.key] = error
                if isinstance(error, MaskingError) and not error.is_defect:
                    engine.refuse(order, error)
                    refused = True
                elif error is not None:
                    why = f"{type(error).__name__}: {error}"
                    failures.append((FrozenDict(order.sizes), why))
                step(order, error)
        compiled += [o for o in todo if o.key in tried and tried[o.key] is None]
    left = [o for o in todo if o.key not in tried and o.key not in engine.cache]
    loaded = {key for key, entry in engine.cache.items() if entry.loaded}
    return WarmupReport(
        compiled=tuple(FrozenDict(o.sizes) for o in compiled),
        present=tuple(FrozenDict(o.sizes) for o in present.values()),
        failed=(*asked.failed, *failures),
        exact=tuple((sizes, why) for sizes, why, _ in asked.exact),
        left=tuple(FrozenDict(o.sizes) for o in left),
        seconds=time.monotonic() - began,
        evicted=tuple(FrozenDict(o.sizes) for o in compiled if o.key not in engine.cache),
        loaded=sum(o.key in loaded for o in compiled),
    )


def compile_all(
    engine: Engine,
    orders: Sequence[Order],
    workers: int | None,
    *,
    deadline: float | None = None,
    first_run: bool,
    beyond_budget: bool = True,
) -> Generator[tuple[Order, Exception | None]]:
    """Compile several executables at the same time; XLA does so without Python's lock.

    Only as many are handed to the threads as they can take, so that an interrupt or the deadline
    stops all others.

    Args:
        engine: Serves the calls.
        orders: What to compile.
        workers: Threads that compile; None for as many as there are cores, up to four.
        deadline: When to begin no more.
        first_run: Whether to run each executable once.
        beyond_budget: Whether to go on beyond a budget that only warns.

    Yields:
        Each one that was tried, and its error.
    """
    prepare = functools.partial(
        engine.supply.prepare, first_run=first_run, beyond_budget=beyond_budget
    )
    count = workers or min(4, os.cpu_count() or 1)
    waiting = iter(orders)
    running: dict[Future[bool], Order] = {}
    config = _jax.ThreadConfig()  # contexts that are entered here hold there too
    with ThreadPoolExecutor(count, thread_name_prefix="bucketjit-warmup") as pool:
        while True:
            late = deadline is not None and time.monotonic() >= deadline
            while not late and len(running) < count:
                order = next(waiting, None)
                if order is None:
                    break
                running[pool.submit(config.run, prepare, order)] = order
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                order = running.pop(future)
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield order, error


class Asked(NamedTuple):
    """What serves calls of some sizes.

    Attributes:
        orders: What to compile.
        exact: Sizes at which the calls cannot be masked, why, and what to compile for the exact
            shape.
        failed: Sizes that no executable was found for, and why.
    """

    orders: list[Order]
    exact: list[tuple[Mapping[str, int], str, Order]]
    failed: list[tuple[Mapping[str, int], str]]

    @property
    def exact_orders(self) -> list[Order]:
        """Those of the sizes at which calls cannot be masked."""
        return [order for _, _, order in self.exact]


def orders_for(
    engine: Engine,
    signed: Signed,
    tokens: Tokens,
    own: Mapping[str, int],
    wanted: Iterable[Mapping[str, int]],
) -> Asked:
    """What to compile for some sizes.

    Args:
        engine: Serves the calls.
        signed: A call like those to come.
        tokens: Its axes.
        own: Its sizes.
        wanted: Sizes of the calls to come; a variable that is left out has the size of this one.
    """
    found: dict[Hashable, Order] = {}
    exact: list[tuple[Mapping[str, int], str, Order]] = []
    failed: list[tuple[Mapping[str, int], str]] = []
    waiting = deque(wanted)
    while waiting:
        chosen = waiting.popleft()
        all_sizes = {**own, **chosen}
        try:
            at = at_sizes(signed, tokens, all_sizes)
            if engine.always_exact:
                order = engine.orders.exact(at, all_sizes)
                found.setdefault(order.key, order)
                continue
            call = engine.resolve(at)
            refusal: MaskingError | None = call.refusal
            if call.program is not None:
                refusal = engine.refused.get(call.program)
            if call.program is None and refusal is None and all(map(all, at.shapes)):
                order = engine.orders.exact(at, call.sizes)  # no axis is open
                found.setdefault(order.key, order)
                continue
            if call.program is None or refusal is not None:
                if refusal is not None and engine.config.fallback is Fallback.ERROR:
                    raise FallbackError(refusal.reason, refusal.remedy)
                why = "an axis of size 0 has no bucket" if refusal is None else refusal.reason
                order = engine.orders.exact(at, call.sizes)
                exact.append((FrozenDict(chosen or order.sizes), why, order))
                continue
            try:
                with engine.lock:
                    bucket = engine.bucket_of(call.program, call)
            except BucketOverflowError as beyond:
                chunks = engine.splitter.plan(call, beyond)
                waiting += [{**chosen, chunks.variable: n} for n in dict.fromkeys(chunks.sizes)]
                continue
            beyond_all = exactly(engine.config, call.sizes)
            if beyond_all is not None and beyond_all.wholly:
                order = engine.orders.exact(at, call.sizes)
            else:
                order = engine.orders.masked(at, call, bucket)
        except Exception as error:  # of the function at these sizes, perhaps
            failed.append((FrozenDict(chosen), in_one_line(error)))
            continue
        found.setdefault(order.key, order)
    return Asked(list(found.values()), exact, failed)


def _axes_of(engine: Engine, signed: Signed, sizes: Any) -> tuple[Tokens, Mapping[str, int]]:
    """The axes of a call and its sizes.

    Args:
        engine: Serves the call. One that runs all calls exact traces only where axes without a
            name are to have other sizes: to learn which of them vary together.
        signed: The call.
        sizes: What sizes are asked for, or None for those of the call.
    """
    if engine.always_exact:
        declared = signed.family.declared_sizes(signed.shapes)
        if declared or sizes is None:
            return signed.family.declared_tokens(signed.shapes), declared
    call = engine.resolve(signed)
    if call.sizes or sizes is None:
        return call.tokens, call.sizes
    tokens = signed.family.guessed_tokens(signed.shapes)  # all sizes run exact
    return tokens, bind_sizes(tokens, signed.shapes, signed.family.paths)


def at_sizes(signed: Signed, tokens: Tokens, sizes: Mapping[str, int]) -> Signed:
    """The same call at other sizes; its leaves say type and placement only.

    Raises:
        SpecError: No array can have them.
    """
    shapes: list[tuple[int, ...]] = []
    leaves: list[Any] = []
    rows = zip(tokens, signed.shapes, signed.leaves, signed.family.types, strict=True)
    for row, shape, leaf, kind in rows:
        new = tuple(
            n if t == STATIC else evaluate_text(t, sizes) for t, n in zip(row, shape, strict=True)
        )
        if kind.dtype is not None and not can_be(new, kind.dtype):
            raise SpecError(f"no array of {kind.dtype} can have the shape {new}")
        shapes.append(new)
        if kind.dtype is None:
            leaves.append(new[0])
        elif new == shape:
            leaves.append(leaf)
        else:
            is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
            committed = is_struct or (isinstance(leaf, jax.Array) and leaf.committed)
            sharding = leaf.sharding if committed else None
            weak = kind.weak_type
            leaves.append(jax.ShapeDtypeStruct(new, kind.dtype, sharding=sharding, weak_type=weak))
    return dataclasses.replace(signed, leaves=leaves, shapes=shapes)


def combinations(
    sizes: Any, variables: Sequence[str], own: Mapping[str, int]
) -> list[dict[str, int]]:
    """The sizes that a warm-up is for.

    Args:
        sizes: None; a dict of a variable to a size, to sizes, or to a strategy that has a largest
            bucket; a list of dicts to sizes; a joint plan; or the strategy of the one variable.
        variables: The variables there are.
        own: The sizes of the example.

    Raises:
        SpecError: It is none of these, or there is no such variable.
    """
    if sizes is None:
        return [dict(own)]
    if _is_strategy(sizes):
        if len(variables) != 1:
            raise SpecError(
                f"warmup: {sizes!r} is for sizes of one dimension, and these arguments have "
                f"{_listed(variables)}; give a dict of each to its sizes"
            )
        sizes = {variables[0]: sizes}
    if hasattr(sizes, "bucket_of"):
        sizes = [dict(zip(sizes.dims, row, strict=True)) for row in sizes.buckets]
    if isinstance(sizes, Mapping):
        _check_names(sizes, variables)
        each = {v: _sizes_of(v, given) for v, given in sizes.items()}
        count = int(np.prod([len(s) for s in each.values()], dtype=np.int64))
        _check_count(count)
        return [dict(zip(each, c, strict=True)) for c in itertools.product(*each.values())]
    if not isinstance(sizes, Iterable) or isinstance(sizes, str):
        raise SpecError(
            f"warmup: sizes must be a dict such as {{'batch': range(1, 65)}}, a list of dicts, or "
            f"a plan, got {sizes!r}"
        )
    found = []
    for one in sizes:
        if not isinstance(one, Mapping):
            raise SpecError(f"warmup: sizes: expected dicts such as {{'batch': 8}}, got {one!r}")
        _check_names(one, variables)
        found.append({v: _sizes_of(v, n)[0] for v, n in one.items()})
    return found


def _check_names(sizes: Mapping[str, Any], variables: Sequence[str]) -> None:
    if unknown := [v for v in sizes if v not in variables]:
        raise SpecError(
            f"warmup: there is no dimension {unknown[0]!r}; these arguments have "
            f"{_listed(variables)}"
        )


def _listed(variables: Sequence[str]) -> str:
    return ", ".join(map(repr, variables)) or "no open axis; name those that vary in dynamic_axes"


def _check_count(count: int) -> None:
    if count > MOST_LISTED:
        raise SpecError(
            f"warmup: {count} combinations of sizes; give those that occur as a list of dicts"
        )


def _is_strategy(sizes: Any) -> bool:
    """Whether it has buckets; one's own strategies list theirs in ``boundaries``."""
    return hasattr(sizes, "bucket") or hasattr(sizes, "boundaries")


def _sizes_of(variable: str, given: Any) -> list[int]:
    if _is_strategy(given):
        given = strategies.buckets_of(given) or getattr(given, "boundaries", given)
    values = [given] if isinstance(given, int | np.integer) else given
    if isinstance(values, range):
        _check_count(len(values))
    try:
        found = [int(n) for n in values]
    except (TypeError, ValueError):
        found = []
    wrong = not found or any(
        isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0 for n in values
    )
    if wrong:
        raise SpecError(
            f"warmup: the sizes of {variable!r} must be ints, a range, or a strategy that has a "
            f"largest bucket such as Pow2(max=64) and not too many below it, got {given!r}"
        )
    return found


def volume(sizes: Mapping[str, int]) -> int:
    """How many padded combinations a bucket holds."""
    return int(np.prod(list(sizes.values()), dtype=object)) if sizes else 0
