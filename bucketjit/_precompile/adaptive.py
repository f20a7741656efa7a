"""Feeds adaptive strategies with the sizes of calls, and compiles the bucket plans they propose.

An adaptive strategy (`bucketjit.strategies.Adaptive`) has a bucket plan and proposes a better one
for the sizes that it observed. Calls keep to the present plan until the buckets of the next one are
compiled.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from bucketjit._compile.argument_types import at_sizes, without_values
from bucketjit._compile.background import Workers
from bucketjit._compile.provider import Cleared
from bucketjit._config import Background
from bucketjit._events import Event
from bucketjit._jax.config import ThreadConfig
from bucketjit._raised import in_one_line
from bucketjit._runtime.engine import Engine
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import Tokens
from bucketjit._tracing.interface import Interface
from bucketjit.errors import BucketOverflowError, CompileBudgetError
from bucketjit.strategies.base import Strategy

_EVERY = 64  # calls between two searches for a better plan
_MOST_KINDS, _MOST_SIZES = 256, 4096  # programs remembered, and combinations of sizes for each
_SHARE = 0.05  # share of the calls below which no buckets are compiled for a group of calls

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
Others = tuple[tuple[str, int], ...]  # padded sizes of the variables of other strategies


@dataclass
class _Kind:
    """The calls of one program that took the slow path.

    Attributes:
        signed: The latest call, its arrays replaced by their types.
        tokens: Its token for each axis of each leaf.
        latest: Its logical sizes.
        config: The configuration of JAX in the thread of that call.
        sizes: The logical sizes of all calls, each in the order of ``latest``. Used as a set in
            which the oldest comes first.
    """

    signed: SignedCall
    tokens: Tokens
    latest: Mapping[str, int]
    config: ThreadConfig
    sizes: dict[tuple[int, ...], None]


class Adapting:
    """Tells the adaptive strategies of an engine which sizes occur, and carries out their plans.

    A thread compiles the buckets of a proposed plan, and then swaps the plans. It compiles for
    every group of calls that is at least 5 % of the calls: groups differ in the program (that is
    in argument types, or in being a derivative) and in the buckets of other variables. If several
    variables share a strategy, it compiles the combinations of their buckets that occurred.

    Args:
        engine: Serves the calls. It holds this object, so it is held by a weak reference only.
        strategies: The adaptive strategies by dimension variable; the one of None is for all
            variables without one of their own.

    Attributes:
        workers: The thread that looks for plans and compiles.
    """

    def __init__(self, engine: Engine, strategies: Mapping[str | None, Any]) -> None:
        self._engine = weakref.ref(engine)
        self._strategies = dict(strategies)
        self._own = engine.config.per_dim.keys()
        plan = engine.config.plan  # a joint plan has precedence over strategies
        self._planned = frozenset[str]() if plan is None else frozenset(plan.dims)
        self._calls = itertools.count(1).__next__
        self._failed: set[str] = set()
        self._kinds: weakref.WeakKeyDictionary[Interface, _Kind] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self.workers = Workers(Background(1, 1))

    def learn(self, signed: SignedCall, call: ResolvedCall) -> None:
        """Remember the types and sizes of a call, so that buckets can be compiled for its like."""
        assert call.program is not None
        if all(self._of(variable) is None for variable in call.sizes):
            return
        known = self._kinds.get(call.program)
        sizes = {} if known is None else known.sizes
        like, config = without_values(signed), ThreadConfig()
        with self._lock:
            _put(sizes, tuple(call.sizes.values()), None, _MOST_SIZES)
            _put(
                self._kinds,
                call.program,
                _Kind(like, call.tokens, call.sizes, config, sizes),
                _MOST_KINDS,
            )

    def note(self, sizes: Mapping[str, int]) -> None:
        """Count a call of these sizes; every 64 calls, start a search for better plans."""
        for variable, size in sizes.items():
            strategy = self._of(variable)
            if strategy is not None:
                with contextlib.suppress(BucketOverflowError):
                    strategy.observe(size)
        if self._calls() % _EVERY == 0:
            self.workers.submit("replan", self.replan)

    def replan(self) -> None:
        """Look for a better plan of each strategy, compile its buckets, and adopt it."""
        for strategy in {id(found): found for found in self._strategies.values()}.values():
            if not self._replan(strategy):
                return

    def _replan(self, strategy: Any) -> bool:
        """Look for a better plan of one strategy. Returns False if the search should stop."""
        engine = self._engine()
        if engine is None:
            return False
        epoch = engine.provider.epoch
        sizes: Mapping[str, int] = {}
        try:
            # A cheap test first: a plan that does not pay although every bucket in the cache counts
            # as compiled does not pay if only the buckets of frequent groups count.
            if strategy.propose(_made(engine, strategy)) is None:
                return True
            uses = _in_use(engine, strategy)
            if not uses:
                return True
            sizes = here = uses[0].sizes_of_own
            proposal = strategy.propose({n for used in uses for own in used.made for n in own})
            if proposal is None:
                return True
            may_compile = _affordable(engine, proposal.plan, uses)
            if not may_compile and engine.requests.files.store() is None:
                return True
            if why := _too_many(engine, strategy, proposal.plan, uses):
                self._tell_failed(engine, sizes, why)
                return True
            # Compiling may take minutes. Only weak references are held in between, so that an
            # bucketed function that is dropped meanwhile is freed, and ends this loop.
            todo = [
                (weakref.ref(used.engine), used.kind, example, dict(own))
                for used in uses
                for own, example in used.buckets_of(proposal.plan).items()
            ]
            del engine, uses
            for serves, kind, example, bucket in todo:
                engine = serves()
                if engine is None or self.workers.is_stopped:
                    return False
                sizes = bucket
                kind.config.run(_compile, engine, kind, example, bucket, may_compile, epoch)
                del engine
        except Cleared:
            return False
        except CompileBudgetError:  # other compiles have spent the budget, or no file has a bucket
            return True
        except Exception as error:  # no caller would get it, so it becomes an event
            engine = self._engine()
            if engine is not None:
                self._tell_failed(engine, sizes, in_one_line(error))
            return False
        engine = self._engine()
        if engine is not None and strategy.adopt(proposal):
            for other in engine.shared.engines:
                other.memory.forget_all()  # handlers of the fast path have the old buckets
            detail = f"{proposal.plan!r} saves {proposal.saving:.0%} a call"
            engine.emit(Event("plan", engine.name, here, 0, detail))
        return True

    def _tell_failed(self, engine: Engine, sizes: Mapping[str, int], why: str) -> None:
        """Emit an error event, once for each text: the next search may fail in the same manner."""
        if why not in self._failed:
            self._failed.add(why)
            engine.emit(Event("error", engine.name, sizes, detail=f"the plan stays: {why}"))

    def _of(self, variable: str) -> Any:
        if variable in self._planned:
            return None
        return self._strategies.get(variable if variable in self._own else None)

    def kinds_of(self, strategy: Strategy) -> list[tuple[Interface, _Kind, list[str]]]:
        """The programs that have variables of a strategy.

        Args:
            strategy: The strategy.

        Returns:
            Each program with its calls and those of its variables whose buckets the strategy
            chooses.
        """
        found = []
        with self._lock:
            kinds = list(self._kinds.items())
        for program, kind in kinds:
            own = [variable for variable in kind.latest if self._of(variable) is strategy]
            if own:
                found.append((program, kind, own))
        return found


class _Used(NamedTuple):
    """A group of calls of one program, whose buckets differ only in the variables of a strategy.

    Attributes:
        engine: Serves them.
        kind: The calls of the program.
        own: The variables whose buckets the strategy chooses.
        sizes: Logical sizes of all variables, each in the order of ``kind.latest``.
        calls: Number of calls, estimated from the hits of the executables in the cache.
        made: The buckets of ``own`` that the cache holds.
    """

    engine: Engine
    kind: _Kind
    own: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    calls: int
    made: frozenset[tuple[int, ...]]

    @property
    def sizes_of_own(self) -> dict[str, int]:
        """Logical sizes of ``own`` in the latest call."""
        return {variable: self.kind.latest[variable] for variable in self.own}

    def buckets_of(self, plan: Any) -> dict[tuple[tuple[str, int], ...], dict[str, int]]:
        """The buckets that a plan needs for the group.

        Args:
            plan: The plan.

        Returns:
            Each bucket of ``own`` with the logical sizes of one call that it serves. Sizes without
            a bucket are left out.
        """
        found: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
        for sizes in self.sizes:
            named = dict(zip(self.kind.latest, sizes, strict=True))
            with contextlib.suppress(BucketOverflowError):
                found.setdefault(tuple((v, plan.bucket(named[v])) for v in self.own), named)
        return found

    def new_of(self, plan: object) -> int:
        """Number of executables that a plan needs and the cache does not hold."""
        return sum(tuple(n for _, n in own) not in self.made for own in self.buckets_of(plan))


def _programs(
    engine: Engine, strategy: Strategy
) -> Iterator[tuple[Engine, Interface, _Kind, list[str]]]:
    """The programs that have variables of a strategy, derivatives included; see `kinds_of`."""
    for other in engine.shared.engines:
        if isinstance(other.observer, Adapting):
            for program, kind, own in other.observer.kinds_of(strategy):
                yield other, program, kind, own


def _made(engine: Engine, strategy: Strategy) -> set[int]:
    """The buckets of a strategy's variables that the cache holds."""
    counts = _counts(engine)
    return {
        bucket[variable]
        for _, program, _, own in _programs(engine, strategy)
        for bucket, _ in counts.get(program, ())
        for variable in own
    }


def _in_use(engine: Engine, strategy: Strategy) -> list[_Used]:
    """The groups of calls with at least `_SHARE` of the calls, the largest first."""
    found = []
    counts = _counts(engine)
    for other, program, kind, own in _programs(engine, strategy):
        groups: dict[Others, list[tuple[int, ...]]] = {}
        for sizes in list(kind.sizes):
            named = dict(zip(kind.latest, sizes, strict=True))
            with contextlib.suppress(BucketOverflowError), other.lock:
                chosen = other.buckets.chosen(program, named)
                groups.setdefault(_others(chosen, kind, own), []).append(sizes)
        for others, members in groups.items():
            there = [e for e in counts.get(program, ()) if _others(e[0], kind, own) == others]
            if there:
                made = frozenset(tuple(bucket[v] for v in own) for bucket, _ in there)
                calls = sum(count for _, count in there)
                found.append(_Used(other, kind, tuple(own), tuple(members), calls, made))
    # Groups with few calls would cost a compile for each bucket of each plan.
    least = _SHARE * sum(used.calls for used in found)
    found = [used for used in found if used.calls >= least]
    return sorted(found, key=lambda used: -used.calls)


def _put(into: MutableMapping[_Key, _Value], key: _Key, value: _Value, most: int) -> None:
    """Put an item last, and drop the first one if there are more than ``most``."""
    into.pop(key, None)
    into[key] = value
    if len(into) > most:
        del into[next(iter(into))]


def _others(bucket: Mapping[str, int], kind: _Kind, own: Collection[str]) -> Others:
    return tuple((v, bucket[v]) for v in kind.latest if v not in own)


def _counts(engine: Engine) -> dict[Interface, list[tuple[Mapping[str, int], int]]]:
    """The masked executables of each program in the cache: bucket and number of calls."""
    found: dict[Interface, list[tuple[Mapping[str, int], int]]] = {}
    for (program, *_), slot in engine.cache.slots():
        entry = slot.entry
        if entry is not None and not entry.exact and entry.rows is None:
            # The call that compiled it is no hit, so one is added.
            found.setdefault(program, []).append((entry.sizes, 1 + slot.uses.read()))
    return found


def _affordable(engine: Engine, plan: object, uses: Sequence[_Used]) -> bool:
    """Whether the budget allows to compile all new buckets of a plan."""
    new = sum(used.new_of(plan) for used in uses)
    return not new or engine.provider.allowance.affordable(new)


def _too_many(engine: Engine, strategy: Strategy, plan: object, uses: Sequence[_Used]) -> str:
    """Why the cache is too small for a plan; empty if it is not.

    A plan with no more executables than the present one is always accepted.
    """
    bound = engine.config.maxsize
    needed, now = (sum(len(used.buckets_of(p)) for used in uses) for p in (plan, strategy))
    if bound is None or needed <= max(bound, now):
        return ""
    return f"another one needs {needed} executables, and the cache holds {bound}"


def _compile(
    engine: Engine,
    kind: _Kind,
    sizes: Mapping[str, int],
    bucket: Mapping[str, int],
    may_compile: bool,
    epoch: object,
) -> None:
    """Compile, or load, one bucket of a plan.

    Args:
        engine: Serves the calls.
        kind: The calls of the program.
        sizes: Logical sizes of a call that the bucket serves.
        bucket: Padded sizes of the variables of the plan.
        may_compile: Whether to compile it if it is not in a file.
        epoch: The epoch of the provider when the plan was proposed.
    """
    at = at_sizes(kind.signed, kind.tokens, {**sizes, **bucket})
    wanted = engine.resolve(at)
    if wanted.program is None:
        return
    with engine.lock:
        chosen = {**engine.buckets.of(wanted.program, wanted), **bucket}
    key = engine.requests.masked_key(wanted.program, chosen)
    if wanted.program.fits(chosen) and not engine.refusals.of(key):
        request = engine.requests.masked(at, wanted, chosen)
        engine.provider.prepare(
            request,
            first_run=True,
            is_asked_for=False,
            may_compile=may_compile,
            epoch=epoch,
        )


def adaptive(engine: Engine) -> Adapting | None:
    """The observer for the adaptive strategies of an engine; None if it has no such strategy."""
    config = engine.config
    every: dict[str | None, Any] = {None: config.default}
    every.update(config.per_dim.items())
    found = {v: s for v, s in every.items() if _adapts(s)}
    return Adapting(engine, found) if found else None


def _adapts(strategy: Strategy) -> bool:
    return all(callable(getattr(strategy, m, None)) for m in ("observe", "propose", "adopt"))
