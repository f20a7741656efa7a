"""Strategies that follow the sizes that occur: who tells them, and compiles what they propose."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Mapping
from typing import Any

from bucketjit import _jax
from bucketjit._apart.pool import Ended
from bucketjit._building import without_values
from bucketjit._config import Background
from bucketjit._engine import Engine
from bucketjit._errors import BucketOverflowError, in_one_line
from bucketjit._events import Event
from bucketjit._family import Call
from bucketjit._signing import Signed
from bucketjit._warmup import at_sizes
from bucketjit._workers import Workers

_EVERY = 64  # calls between two looks for a better plan


class Adapting:
    """Keeps the adaptive strategies of an engine informed.

    Calls go by the present plan until the buckets of the next one are compiled, in a thread of its
    own; then the plans are swapped.

    Args:
        engine: Serves the calls.
        strategies: The adaptive strategies by dimension variable; that of None is the one for all
            others.
    """

    def __init__(self, engine: Engine, strategies: Mapping[str | None, Any]) -> None:
        self._engine = weakref.ref(engine)  # it holds this, and goes with its last reference
        self._strategies = dict(strategies)
        self._own = engine.config.per_dim.keys()
        self._calls = itertools.count(1).__next__
        self._failed: set[str] = set()
        self._latest: tuple[Signed, Call, _jax.ThreadConfig] | None = None
        self.workers = Workers(Background(1, 1))

    def learn(self, signed: Signed, call: Call) -> None:
        """Take note of how calls look, to compile for others like it."""
        self._latest = without_values(signed), call, _jax.ThreadConfig()

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
        if self._latest is None or engine is None:
            return
        signed, call, config = self._latest
        for variable in call.sizes:
            strategy = self._of(variable)
            if strategy is None:
                continue
            made = {
                entry.sizes[variable]
                for _, entry in engine.cache.items()
                if not entry.exact and variable in entry.sizes
            }
            sizes = here = {variable: call.sizes[variable]}
            try:
                proposal = strategy.propose(made)
                if proposal is None or (proposal.new_buckets and not engine.supply.affordable()):
                    continue
                for bucket in proposal.new_buckets:
                    sizes = {variable: bucket}
                    config.run(_compile, engine, signed, call, variable, bucket)
            except Ended:  # so does the interpreter
                return
            except Exception as error:  # nobody waits for this thread
                self._tell_failed(engine, sizes, in_one_line(error))
                return
            if strategy.adopt(proposal):
                engine.forget_routes()
                detail = f"{proposal.plan!r} saves {proposal.saving:.0%} a call"
                engine.tell(Event("plan", engine.name, here, 0, detail))

    def _tell_failed(self, engine: Engine, sizes: Mapping[str, int], why: str) -> None:
        """Tell of an error, once: the next look for a better plan may well end in the same."""
        if why not in self._failed:
            self._failed.add(why)
            engine.tell(Event("error", engine.name, sizes, detail=f"the plan stays: {why}"))

    def _of(self, variable: str) -> Any:
        return self._strategies.get(variable if variable in self._own else None)


def _compile(engine: Engine, signed: Signed, call: Call, variable: str, bucket: int) -> None:
    at = at_sizes(signed, call.tokens, {**call.sizes, variable: bucket})
    wanted = engine.resolve(at)
    if wanted.program is None or wanted.program in engine.refused:
        return
    with engine.lock:
        chosen = {**engine.bucket_of(wanted.program, wanted), variable: bucket}
    if wanted.program.fits(chosen):
        order = engine.orders.masked(at, wanted, chosen)
        engine.supply.prepare(order, first_run=True, beside_calls=True)


def adaptive(engine: Engine) -> Adapting | None:
    """What keeps an engine's adaptive strategies informed; None if it has none."""
    config = engine.config
    every: dict[str | None, Any] = {None: config.default}
    every.update(config.per_dim.items())
    found = {v: s for v, s in every.items() if _adapts(s)}
    return Adapting(engine, found) if found else None


def _adapts(strategy: Any) -> bool:
    return all(callable(getattr(strategy, m, None)) for m in ("observe", "propose", "adopt"))
