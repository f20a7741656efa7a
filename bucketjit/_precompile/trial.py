"""Measures whether calls that can be cut into chunks are faster whole, and serves the faster way.

    chunks      b=7, s=40   ->   7 runs of (1, 44), several at a time
    whole       b=7, s=40   ->   1 run of (8, 56)

Which one is faster depends on the program, the machine and the sizes: chunks have less padding and
no synchronisation between cores, a whole call has larger matrix products and one dispatch. So one
call of usual size runs both ways, each compiled and run once before it is timed. The times are
scaled by the padded sizes to all calls that the buckets were fitted to. The executable of the
slower way leaves the cache.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from bucketjit._compile.executable import Executable
from bucketjit._config import Check, Config, Out, WholeCalls
from bucketjit._events import Event, shown
from bucketjit._raised import in_one_line
from bucketjit._runtime.decisions import Decisions, Masked
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.fast_path.dispatch import CallArguments
from bucketjit._runtime.fast_path.handler import Evicted, Handler
from bucketjit._runtime.observers import NoTrial
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall

_LEAST_FLOPS = 2e7  # of a usual call; a smaller one takes about a millisecond, and is not measured
_LEAST_SHARE = 0.5  # cost of a call over that of a usual one, below which it tells little
_PATIENCE = 16  # calls and chunks on the slow path, within which a usual call is waited for
_ROUNDS = 3  # runs of each way
_LONGEST = 0.5  # seconds after which no further round begins


class Trial:
    """Decides for one engine whether calls run in chunks or whole.

    Args:
        whole: How calls would be served whole.
    """

    def __init__(self, whole: WholeCalls) -> None:
        self._whole = whole
        self._seen = 0
        self._is_over = False
        self._lock = threading.Lock()

    @property
    def is_waiting(self) -> bool:
        """Whether buckets that no call has asked for should not be compiled yet."""
        return not self._is_over and self._seen < _PATIENCE

    def see(
        self, engine: Engine, signed: SignedCall, call: ResolvedCall, entry: Executable
    ) -> None:
        """Note a call, or a chunk, that took the slow path.

        Args:
            engine: Served it.
            signed: The call.
            call: The same call, resolved.
            entry: Its executable.
        """
        waited = self.is_waiting
        self._seen += 1
        is_known = self._whole.dims <= entry.sizes.keys()
        if waited and is_known and self._is_small(entry.flops, self._cost(entry)):
            self._begins()
        if waited and not self.is_waiting:
            self._prepare(engine, signed, call)

    def hold(
        self,
        engine: Engine,
        signed: SignedCall,
        call: ResolvedCall,
        given: CallArguments,
        chunked: Handler,
        out: Out,
    ) -> None:
        """Measure both ways by a call that was just served in chunks, if it is of usual size.

        The engine then serves calls in the faster way. If calls whole cannot be measured (the
        program cannot be masked in their bucket, or no compile is left), they run in chunks.

        For the arguments see `bucketjit._runtime.observers.Trial`.
        """
        if self._is_over or not self._whole.dims <= call.sizes.keys():
            return
        sizes = {dim: call.sizes[dim] for dim in self._whole.dims}
        usual = self._whole.cost(sizes) >= _LEAST_SHARE * self._whole.usual_cost
        self._seen += 1
        if (usual or self._seen > _PATIENCE) and self._begins():
            self._decide(engine, signed, call, given, chunked, out)
            self._prepare(engine, signed, call)

    @staticmethod
    def _prepare(engine: Engine, signed: SignedCall, call: ResolvedCall) -> None:
        """Compile the buckets that waited for the decision, if there are any."""
        if engine.preparer is not None:
            engine.preparer.prepare(engine, signed, call, None)

    def _begins(self) -> bool:
        """Whether this thread is the one that measures; the others go on in chunks."""
        with self._lock:
            is_over, self._is_over = self._is_over, True
            return not is_over

    def _decide(
        self,
        engine: Engine,
        signed: SignedCall,
        call: ResolvedCall,
        given: CallArguments,
        chunked: Handler,
        out: Out,
    ) -> None:
        try:
            cost = flops = 0.0
            for slot, count in chunked.runs:
                entry = slot.entry
                if entry is None:
                    raise Evicted
                cost, flops = cost + count * self._cost(entry), flops + count * entry.flops
            if self._is_small(flops, cost):
                return
            chunks = _Way(chunked, cost)
            self._compare(engine, signed, call, given, chunks, out)
        except Exception as error:  # the call itself has been served
            why = f"calls run in chunks: {in_one_line(error)}"
            engine.emit(Event("plan", engine.name, call.sizes, 0, why))

    def _compare(
        self,
        engine: Engine,
        signed: SignedCall,
        call: ResolvedCall,
        given: CallArguments,
        chunks: _Way,
        out: Out,
    ) -> None:
        # It has the same programs and the same cache.
        other = Engine(self._whole.of(engine.config), engine.shared)
        decision = other.decide(signed, call)
        if not isinstance(decision, Masked) or decision.beyond is not None:
            return
        is_new = decision.key not in engine.cache
        given = given._replace(fast_path=other.memory.fast_path)
        entry = other.provider.get_own(other.requests.masked(signed, call, decision.bucket))
        served = other.served(decision.key, entry, signed, call, out)
        handler = other.memory.add_masked(signed, given, call, served)
        if handler is None:
            return
        bucket = {dim: decision.bucket[dim] for dim in self._whole.dims}
        whole = _Way(handler, self._whole.cost(bucket))
        seconds = _times((chunks.handler, whole.handler), given.args, given.kwargs)
        other.memory.forget_all()
        # How long all calls of the log take in chunks, over how long they take whole.
        ratio = (seconds[0] / chunks.cost * self._whole.chunks_cost) / (
            seconds[1] / whole.cost * self._whole.whole_cost
        )
        if ratio > 1:
            for key, slot in engine.cache.slots():
                if slot in chunks.handler.slots and slot not in whole.handler.slots:
                    engine.cache.discard(key)
            _become(engine, other)
        elif is_new:
            engine.cache.discard(decision.key)
        better = "whole" if ratio > 1 else "in chunks"
        detail = (
            f"calls run {better}: this one takes {1e3 * seconds[0]:.3g} ms in chunks and"
            f" {1e3 * seconds[1]:.3g} ms whole, so chunks take {ratio:.2g} times as long for the"
            f" logged sizes (whole: {shown(bucket)})"
        )
        engine.emit(Event("plan", engine.name, call.sizes, sum(seconds), detail))

    def _cost(self, entry: Executable) -> float:
        """The cost of one run."""
        return self._whole.cost({dim: entry.sizes[dim] for dim in self._whole.dims})

    def _is_small(self, flops: float, cost: float) -> bool:
        """Whether a usual call is too small to be measured, by what a run of some cost takes.

        False if the floating point operations are not known.
        """
        return flops / cost * self._whole.usual_cost < _LEAST_FLOPS


def _become(engine: Engine, other: Engine) -> None:
    """Serve the calls of an engine by the configuration of another engine from now on."""
    with engine.lock:
        engine.config, engine.requests, engine.buckets = other.config, other.requests, other.buckets
        engine.splitter, engine.trial = other.splitter, other.trial
        engine.decisions = Decisions(engine.buckets, engine.splitter, engine.refusals)
    engine.memory.forget_all()


class _Way(NamedTuple):
    """One way to serve a call, and the cost of its padded sizes."""

    handler: Handler
    cost: float


def _times(
    handlers: tuple[Handler, Handler], args: Any, kwargs: Mapping[str, Any]
) -> tuple[float, float]:
    """The seconds that two handlers take for a call, the least of some runs, in turn.

    The runs are taken out of the counters: they are no calls.
    """
    least = [math.inf, math.inf]
    began = time.perf_counter()
    for turn in range(_ROUNDS + 1):
        for i, handler in enumerate(handlers):
            seconds = _timed(handler.serve, args, kwargs)
            handler.take_back(1)
            if turn:  # the first runs are slower
                least[i] = min(least[i], seconds)
        if turn and time.perf_counter() - began > _LONGEST:
            break
    return least[0], least[1]


def _timed(serve: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(serve(args, kwargs))
    return time.perf_counter() - began


def trial_of(config: Config) -> Trial | NoTrial:
    """The trial of a configuration, which measures nothing if there is nothing to measure.

    Checked calls and donated arguments are left alone: the first take the slow path, the second
    exist once.
    """
    whole = config.whole
    if whole is None or config.check is not Check.OFF or not whole.is_alternative_to(config):
        return NoTrial()
    return Trial(whole)
