"""Strategies that follow the sizes that occur: who tells them, and compiles what they propose."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bucketjit import _jax
from bucketjit._apart.pool import Ended
from bucketjit._building import without_values
from bucketjit._config import Background
from bucketjit._engine import Engine
from bucketjit._errors import BucketOverflowError, CompileBudgetError, in_one_line
from bucketjit._events import Event
from bucketjit._family import Call
from bucketjit._signing import Signed
from bucketjit._supply import Cleared
from bucketjit._trace import Program
from bucketjit._warmup import at_sizes
from bucketjit._workers import Workers

_EVERY = 64  # calls between two looks for a better plan
_MOST_KINDS, _MOST_SIZES = 256, 4096
_SHARE = 0.05  # of the calls, below which a kind of them is not compiled for ahead

Others = tuple[tuple[str, int], ...]  # padded sizes of the other variables


@dataclass
class _Kind:
    """Calls that share an executable wherever they share a bucket of one variable.

    Attributes:
        signed, call: The latest of them that was new.
        config: The configuration of JAX in force then.
        sizes: Sizes of the variable.
    """

    signed: Signed
    call: Call
    config: _jax.ThreadConfig
    sizes: set[int]


class Adapting:
    """Keeps the adaptive strategies of an engine informed.

    Calls go by the present plan until the buckets of the next one are compiled, in a thread of its
    own; then the plans are swapped. They are compiled for each kind of call that has a share in
    what was called: of any types, in the buckets of other variables, of derivatives.

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
        self._kinds: dict[tuple[str, Program, Others], _Kind] = {}
        self.workers = Workers(Background(1, 1))

    def learn(self, signed: Signed, call: Call, bucket: Mapping[str, int]) -> None:
        """Take note of how calls look, to compile for others like it."""
        assert call.program is not None
        like, config = without_values(signed), _jax.ThreadConfig()
        for variable, size in call.sizes.items():
            if self._of(variable) is None:
                continue
            key = variable, call.program, _others(bucket, variable)
            kind = self._kinds.get(key)
            sizes = set() if kind is None else kind.sizes
            if len(sizes) < _MOST_SIZES:
                sizes.add(size)
            self._kinds[key] = _Kind(like, call, config, sizes)
            if len(self._kinds) > _MOST_KINDS:
                self._kinds.pop(next(iter(self._kinds)), None)

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
        engine = self._engine()
        if engine is None:
            return
        for variable in dict.fromkeys(variable for variable, *_ in list(self._kinds)):
            strategy = self._of(variable)
            assert strategy is not None
            kinds = _kinds_in_use(engine, variable, strategy)
            if not kinds:
                continue
            epoch = engine.supply.epoch
            made = set().union(*(used.buckets for used in kinds))
            sizes = here = {variable: kinds[0].kind.call.sizes[variable]}
            try:
                proposal = strategy.propose(made)
                if proposal is None:
                    continue
                may_compile = _affordable(engine, proposal.plan, kinds)
                if not may_compile and engine.orders.shelf.store() is None:
                    continue
                if why := _too_many(engine, strategy, proposal.plan, kinds):
                    self._tell_failed(engine, sizes, why)
                    continue
                for used in kinds:
                    kind = used.kind
                    for bucket in _buckets_for(proposal.plan, kind.sizes):
                        sizes = {variable: bucket}
                        given = used.engine, kind, variable, bucket, may_compile, epoch
                        kind.config.run(_compile, *given)
            except (Ended, Cleared):  # so does the interpreter; the calls are forgotten
                return
            except CompileBudgetError:  # others have spent it, or it is not in files
                continue
            except Exception as error:  # nobody waits for this thread
                self._tell_failed(engine, sizes, in_one_line(error))
                return
            if strategy.adopt(proposal):
                for relative in list(engine.relatives):
                    relative.forget_routes()
                detail = f"{proposal.plan!r} saves {proposal.saving:.0%} a call"
                engine.tell(Event("plan", engine.name, here, 0, detail))

    def _tell_failed(self, engine: Engine, sizes: Mapping[str, int], why: str) -> None:
        """Tell of an error, once: the next look for a better plan may well end in the same."""
        if why not in self._failed:
            self._failed.add(why)
            engine.tell(Event("error", engine.name, sizes, detail=f"the plan stays: {why}"))

    def _of(self, variable: str) -> Any:
        if variable in self._planned:
            return None
        return self._strategies.get(variable if variable in self._own else None)

    def kinds_of(self, variable: str, strategy: Any) -> dict[tuple[Program, Others], _Kind]:
        """The kinds of calls whose buckets of a variable a strategy chooses."""
        if self._of(variable) is not strategy:
            return {}
        return {key[1:]: kind for key, kind in list(self._kinds.items()) if key[0] == variable}


class _Used(NamedTuple):
    """A kind of calls, and what the cache holds for it.

    Attributes:
        engine: Serves them.
        kind: The kind.
        calls: How many there were, about.
        buckets: Of the variable.
    """

    engine: Engine
    kind: _Kind
    calls: int
    buckets: set[int]


def _kinds_in_use(engine: Engine, variable: str, strategy: Any) -> list[_Used]:
    """Kinds of calls with a share in all of them, derivatives included; the largest first."""
    uses = _uses(engine, variable)
    least = _SHARE * sum(calls for calls, _ in uses.values())
    found = [
        _Used(relative, kind, *uses[key])
        for relative in list(engine.relatives)
        if isinstance(relative.watcher, Adapting)
        for key, kind in relative.watcher.kinds_of(variable, strategy).items()
        if key in uses and uses[key][0] >= least
    ]
    return sorted(found, key=lambda used: -used.calls)


def _others(bucket: Mapping[str, int], variable: str) -> Others:
    return tuple((v, n) for v, n in bucket.items() if v != variable)


def _uses(engine: Engine, variable: str) -> dict[tuple[Program, Others], tuple[int, set[int]]]:
    """How often executables of each kind were called, and their buckets of a variable."""
    found: dict[tuple[Program, Others], tuple[int, set[int]]] = {}
    for (program, *_), slot in engine.cache.slots():
        entry = slot.entry
        if entry is None or entry.exact or variable not in entry.sizes:
            continue
        key = program, _others(entry.sizes, variable)
        count, buckets = found.get(key, (0, set()))
        found[key] = count + 1 + slot.uses.read(), {*buckets, entry.sizes[variable]}
    return found


def _affordable(engine: Engine, plan: Any, kinds: Sequence[_Used]) -> bool:
    """Whether all that is new of a plan may be compiled."""
    new = sum(len({*_buckets_for(plan, used.kind.sizes)} - used.buckets) for used in kinds)
    return not new or engine.supply.affordable(new)


def _too_many(engine: Engine, strategy: Any, plan: Any, kinds: Sequence[_Used]) -> str:
    """Why the cache is too small for a plan, where it has more buckets than the one in use."""
    bound = engine.config.maxsize
    needed, now = (
        sum(len(_buckets_for(p, used.kind.sizes)) for used in kinds) for p in (plan, strategy)
    )
    if bound is None or needed <= max(bound, now):
        return ""
    return f"another one needs {needed} executables, and the cache holds {bound}"


def _buckets_for(plan: Any, sizes: Collection[int]) -> list[int]:
    """The buckets of a plan for some sizes, without those that it has none for."""
    found = set()
    for size in list(sizes):
        with contextlib.suppress(BucketOverflowError):
            found.add(plan.bucket(size))
    return sorted(found)


def _compile(
    engine: Engine, kind: _Kind, variable: str, bucket: int, may_compile: bool, epoch: object
) -> None:
    signed, call = kind.signed, kind.call
    at = at_sizes(signed, call.tokens, {**call.sizes, variable: bucket})
    wanted = engine.resolve(at)
    if wanted.program is None or wanted.program in engine.refused:
        return
    with engine.lock:
        chosen = {**engine.bucket_of(wanted.program, wanted), variable: bucket}
    if wanted.program.fits(chosen):
        order = engine.orders.masked(at, wanted, chosen)
        engine.supply.prepare(
            order,
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


def _adapts(strategy: Any) -> bool:
    return all(callable(getattr(strategy, m, None)) for m in ("observe", "propose", "adopt"))
