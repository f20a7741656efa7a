"""Strategies that follow the sizes that occur: who tells them, and compiles what they propose."""

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
from bucketjit._compile.process.pool import Ended
from bucketjit._compile.provider import Cleared
from bucketjit._config import Background
from bucketjit._errors import BucketOverflowError, CompileBudgetError, in_one_line
from bucketjit._events import Event
from bucketjit._jax.config import ThreadConfig
from bucketjit._runtime.engine import Engine
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import Tokens
from bucketjit._tracing.program import Program
from bucketjit.strategies.base import Strategy

_EVERY = 64  # calls between two looks for a better plan
_MOST_KINDS, _MOST_SIZES = 256, 4096
_SHARE = 0.05  # of the calls, below which a kind of them is not compiled for ahead

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
Others = tuple[tuple[str, int], ...]  # padded sizes of the variables that a strategy has not


@dataclass
class _Kind:
    """Calls of one program.

    Attributes:
        signed: The latest of them that was new.
        tokens: Its axes.
        latest: Its sizes.
        config: The configuration of JAX in force then.
        sizes: Those of all, in the order of those of ``latest``.
    """

    signed: SignedCall
    tokens: Tokens
    latest: Mapping[str, int]
    config: ThreadConfig
    sizes: dict[tuple[int, ...], None]


class Adapting:
    """Keeps the adaptive strategies of an engine informed.

    Calls go by the present plan until the buckets of the next one are compiled, in a thread of its
    own; then the plans are swapped. They are compiled for all calls that have a share in what was
    called: of any types, in the buckets of other variables, of derivatives; where several variables
    share a strategy, in the buckets that the sizes of the calls seen have together.

    Args:
        engine: Serves the calls.
        strategies: The adaptive strategies by dimension variable; that of None is the one for all
            others.
    """

    def __init__(self, engine: Engine, strategies: Mapping[str | None, Any]) -> None:
        self._engine = weakref.ref(engine)  # it holds this, and goes with its last reference
        self._strategies = dict(strategies)
        self._own = engine.config.per_dim.keys()
        plan = engine.config.plan  # which goes before strategies
        self._planned = frozenset[str]() if plan is None else frozenset(plan.dims)
        self._calls = itertools.count(1).__next__
        self._failed: set[str] = set()
        self._kinds: weakref.WeakKeyDictionary[Program, _Kind] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self.workers = Workers(Background(1, 1))

    def learn(self, signed: SignedCall, call: ResolvedCall) -> None:
        """Take note of how calls look, to compile for others like it."""
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
        """Count a call, and look for a better plan once in a while."""
        for variable, size in sizes.items():
            strategy = self._of(variable)
            if strategy is not None:
                with contextlib.suppress(BucketOverflowError):
                    strategy.observe(size)
        if self._calls() % _EVERY == 0:
            self.workers.submit("replan", self.replan)

    def replan(self) -> None:
        """Look for better plans, compile their buckets, and go by them."""
        for strategy in {id(found): found for found in self._strategies.values()}.values():
            if not self._replan(strategy):
                return

    def _replan(self, strategy: Any) -> bool:
        """Look for a better plan of one strategy; False to look for no others now."""
        engine = self._engine()
        if engine is None:
            return False
        epoch = engine.provider.epoch
        sizes: Mapping[str, int] = {}
        try:
            # What does not pay with all that is there does not with less; this is found out sooner.
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
            # Whoever drops the executor meanwhile need not wait until all of it is compiled.
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
        except (Ended, Cleared):  # so does the interpreter; the calls are forgotten
            return False
        except CompileBudgetError:  # others have spent it, or it is not in files
            return True
        except Exception as error:  # nobody waits for this thread
            engine = self._engine()
            if engine is not None:
                self._tell_failed(engine, sizes, in_one_line(error))
            return False
        engine = self._engine()
        if engine is not None and strategy.adopt(proposal):
            for other in engine.shared.engines:
                other.memory.forget_all()
            detail = f"{proposal.plan!r} saves {proposal.saving:.0%} a call"
            engine.emit(Event("plan", engine.name, here, 0, detail))
        return True

    def _tell_failed(self, engine: Engine, sizes: Mapping[str, int], why: str) -> None:
        """Tell of an error, once: the next look for a better plan may well end in the same."""
        if why not in self._failed:
            self._failed.add(why)
            engine.emit(Event("error", engine.name, sizes, detail=f"the plan stays: {why}"))

    def _of(self, variable: str) -> Any:
        if variable in self._planned:
            return None
        return self._strategies.get(variable if variable in self._own else None)

    def kinds_of(self, strategy: Strategy) -> list[tuple[Program, _Kind, list[str]]]:
        """The programs of which a strategy chooses buckets, and of which variables."""
        found = []
        with self._lock:
            kinds = list(self._kinds.items())
        for program, kind in kinds:
            own = [variable for variable in kind.latest if self._of(variable) is strategy]
            if own:
                found.append((program, kind, own))
        return found


class _Used(NamedTuple):
    """Calls of one program that differ in the buckets of a strategy's variables only.

    Attributes:
        engine: Serves them.
        kind: Those of the program.
        own: The variables.
        sizes: Their sizes, of all variables, in the order of those of ``kind.latest``.
        calls: How many there were, about.
        made: Buckets of the variables that the cache holds.
    """

    engine: Engine
    kind: _Kind
    own: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    calls: int
    made: frozenset[tuple[int, ...]]

    @property
    def sizes_of_own(self) -> dict[str, int]:
        """Sizes of the variables in the latest call."""
        return {variable: self.kind.latest[variable] for variable in self.own}

    def buckets_of(self, plan: Any) -> dict[tuple[tuple[str, int], ...], dict[str, int]]:
        """The buckets of a plan for the sizes, each with some of the sizes that go there.

        Sizes that the plan has none for are left out.
        """
        found: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
        for sizes in self.sizes:
            named = dict(zip(self.kind.latest, sizes, strict=True))
            with contextlib.suppress(BucketOverflowError):
                found.setdefault(tuple((v, plan.bucket(named[v])) for v in self.own), named)
        return found

    def new_of(self, plan: object) -> int:
        """How many executables a plan needs that are not there."""
        return sum(tuple(n for _, n in own) not in self.made for own in self.buckets_of(plan))


def _programs(
    engine: Engine, strategy: Strategy
) -> Iterator[tuple[Engine, Program, _Kind, list[str]]]:
    """Of which programs a strategy chooses buckets, and which variables; derivatives included."""
    for other in engine.shared.engines:
        if isinstance(other.observer, Adapting):
            for program, kind, own in other.observer.kinds_of(strategy):
                yield other, program, kind, own


def _made(engine: Engine, strategy: Strategy) -> set[int]:
    """Buckets of a strategy's variables that the cache holds."""
    counts = _counts(engine)
    return {
        bucket[variable]
        for _, program, _, own in _programs(engine, strategy)
        for bucket, _ in counts.get(program, ())
        for variable in own
    }


def _in_use(engine: Engine, strategy: Strategy) -> list[_Used]:
    """What has a share in all calls, derivatives included; the largest first."""
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
    least = _SHARE * sum(used.calls for used in found)
    found = [used for used in found if used.calls >= least]
    return sorted(found, key=lambda used: -used.calls)


def _put(into: MutableMapping[_Key, _Value], key: _Key, value: _Value, most: int) -> None:
    """Put something last; what was put longest ago goes beyond so many."""
    into.pop(key, None)
    into[key] = value
    if len(into) > most:
        del into[next(iter(into))]


def _others(bucket: Mapping[str, int], kind: _Kind, own: Collection[str]) -> Others:
    return tuple((v, bucket[v]) for v in kind.latest if v not in own)


def _counts(engine: Engine) -> dict[Program, list[tuple[Mapping[str, int], int]]]:
    """How often the executables of each program were called, with their buckets."""
    found: dict[Program, list[tuple[Mapping[str, int], int]]] = {}
    for (program, *_), slot in engine.cache.slots():
        entry = slot.entry
        if entry is not None and not entry.exact:
            found.setdefault(program, []).append((entry.sizes, 1 + slot.uses.read()))
    return found


def _affordable(engine: Engine, plan: object, uses: Sequence[_Used]) -> bool:
    """Whether all that is new of a plan may be compiled."""
    new = sum(used.new_of(plan) for used in uses)
    return not new or engine.provider.allowance.affordable(new)


def _too_many(engine: Engine, strategy: Strategy, plan: object, uses: Sequence[_Used]) -> str:
    """Why the cache is too small for a plan, where it has more buckets than the one in use."""
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
    """Compile what a plan has for some sizes, of which it pads some variables to a bucket."""
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
            beside_calls=True,
            is_asked_for=False,
            may_compile=may_compile,
            epoch=epoch,
        )


def adaptive(engine: Engine) -> Adapting | None:
    """What keeps an engine's adaptive strategies informed; None if it has none."""
    config = engine.config
    every: dict[str | None, Any] = {None: config.default}
    every.update(config.per_dim.items())
    found = {v: s for v, s in every.items() if _adapts(s)}
    return Adapting(engine, found) if found else None


def _adapts(strategy: Strategy) -> bool:
    return all(callable(getattr(strategy, m, None)) for m in ("observe", "propose", "adopt"))
