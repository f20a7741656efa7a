"""Serves calls on the slow path: signature, program, decision, executable, result.

`BucketedExec` asks the fast path first (`bucketjit._runtime.fast_path`) and calls `Engine.serve`
for the calls that it does not know. A call that was served here is then remembered there.
"""

from __future__ import annotations

import functools
import time
import weakref
from contextlib import nullcontext, suppress
from typing import Any

from bucketjit._arrays.padding import plain
from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.executable import Executable, SignatureChanged, sizes_argument
from bucketjit._compile.requests import CompileRequest
from bucketjit._config import Check, Config, Fallback, Out
from bucketjit._events import Event, emit, warn
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import on_default_device
from bucketjit._jax.tracebacks import hide_own_frames, hide_own_lines
from bucketjit._raised import WithoutErrors
from bucketjit._runtime import runs
from bucketjit._runtime.counters import CallCounter
from bucketjit._runtime.decisions import Because, Decision, Decisions, Masked, Refusals, Unpadded
from bucketjit._runtime.engine_parts import TRACED, Parts, SharedState
from bucketjit._runtime.fast_path.dispatch import Arguments, ServedCall
from bucketjit._runtime.fast_path.memory import RememberedCalls
from bucketjit._runtime.learning.learning import Learning
from bucketjit._runtime.recompiles import Recompiles
from bucketjit._tracing.call import Call
from bucketjit._tracing.computed.sizes import NothingSelected
from bucketjit._tracing.resolution import bind_sizes
from bucketjit.errors import ArtifactError, FallbackError, FallbackWarning, MaskingError

_NOT_AS_TRACED = MaskingError(
    "once padded, its arguments are sharded in another way than its program was traced for",
    "give arrays that the mesh cuts into equal parts, padded or not",
)


class Engine:
    """Serves the calls of one configuration.

    Attributes:
        config: The configuration.
        shared: Cache, provider and counters of a function and its derivatives.
        cache: The executables; part of ``shared``.
        provider: Loads or compiles executables; part of ``shared``.
        counters: Count what is done; part of ``shared``.
        recompiles: Warns of too many compiles.
        signer: Finds the signature of a call's arguments.
        requests: Makes compile requests, and the keys of executables.
        memory: The calls that the fast path serves.
        memories_apart: The calls that compiled stages serve; cleared together with ``memory``.
        buckets: Chooses buckets.
        refusals: Programs that cannot be masked, and why.
        decisions: Decides what a call does.
        takes_turns: Whether `map` computes the rows of a batch one after the other, by program; see
            `bucketjit._runtime.rows.run`.
        lock: Held while programs are traced, and while what is known of them changes. Reentrant,
            because the function that is traced may call its own bucketed function.
        preparer: Compiles for later calls (`bucketjit._stages.ahead.Ahead`), or None.
        together: Runs calls in the bucket that all processes of a job agree on, or None; see
            `bucketjit._processes.together.Agreement`.
    """

    def __init__(
        self, config: Config, shared: SharedState | None = None, parts: Parts = TRACED
    ) -> None:
        hide_own_frames()
        hide_own_lines()
        self.config = config
        self.signer = parts.signer(config)
        self.shared = SharedState(config, self.name) if shared is None else shared
        self.shared.engines[self] = None
        self.cache, self.provider = self.shared.cache, self.shared.provider
        self.counters = self.shared.counters
        self.recompiles = Recompiles(config, self.name, self.signer.name, self.shared)
        self.requests = parts.requests(config, self.name, self.cache)
        self.lock = parts.lock()
        self.memory = RememberedCalls(self.cache, self.counters, self.lock)
        self.memories_apart: weakref.WeakSet[RememberedCalls] = weakref.WeakSet()
        self.buckets = parts.buckets(config, self.lock, self.requests)
        self.refusals = Refusals()
        self.takes_turns: weakref.WeakKeyDictionary[Interface, bool] = weakref.WeakKeyDictionary()
        self.explained: weakref.WeakKeyDictionary[Interface, Any] = weakref.WeakKeyDictionary()
        self.decisions = Decisions(self.buckets, self.refusals)
        self.preparer: Any = None
        self.together: Any = None

    def clear(self) -> None:
        """Drop every executable and program, and start the counters again."""
        with self.lock:
            self.shared.clear()
            self.shared.engines[self] = None
            self.signer.clear()
            for memory in (self.memory, *self.memories_apart):
                memory.clear()
            self.refusals.clear()
            self.recompiles.clear()

    @property
    def name(self) -> str:
        return getattr(self.config.fn, "__name__", type(self.config.fn).__name__)

    def emit(self, event: Event) -> None:
        emit(event, self.config.listeners)

    def serve(self, call: Call, arguments: Arguments | None = None, out: Out | None = None) -> Any:
        if self.config.always_exact:
            call = call.resolved(call.signature.declared(call.shapes))
            return self._run_exact(call, out or self.config.out, arguments)
        return self.serve_resolved(self.resolve(call), arguments, out)

    def serve_resolved(
        self, call: Call, arguments: Arguments | None = None, out: Out | None = None
    ) -> Any:
        """Run a call whose sizes and program are known."""
        out = out or self.config.out
        learning = self.buckets.learning(call.program, call)
        if learning is not None:
            with self.lock:
                self.tell_compiled(learning, call.program)
                learning.count(call.sizes)
                affordable = self.provider.allowance.affordable
                if learning.clock.runs_out():
                    learning.look(affordable)
                if not affordable():
                    learning.give_up_plans()
        decision = self.decisions.decide(call)
        match decision:
            case Masked():
                return self._run_masked(decision, call, out, arguments)
            case Unpadded(Because.UNMASKED, why):
                result = self._fall_back(why, call, out, arguments)
                # Tracing failed. Only now that the exact run has succeeded is it known that the
                # cause is not a wrong call, so only now is tracing given up for such calls.
                if call.program is None:
                    with self.lock:
                        call.signature.remember_refusal(call, call.shapes)
                return result
            case Unpadded(Because.BEYOND, why):
                self._note_beyond(why.reason, call)
                return self._run_exact(call, out, arguments, why.reason)
            case Unpadded(because):
                result = self._run_exact(call, out, arguments)
                is_eager = call.signature in self.refusals.eager
                if is_eager and because is Because.NO_OPEN_AXIS:
                    self.note_fallback(runs.NOT_PADDED, is_eager=True)
                return result

    def _run_masked(self, masked: Masked, call: Call, out: Out, arguments: Arguments | None) -> Any:
        if masked.beyond is not None:
            self._note_beyond(masked.beyond, call)
        if self.preparer is not None:
            self.preparer.prepare(self, call, masked.key)
        # The provider may return a stand-in: a larger bucket than `masked.bucket`. So padding and
        # counting use what `entry` says, and a stand-in is not remembered (see the end).
        # After a failure the call goes on outside of the block: no later error shows the failure.
        refused: MaskingError | None = None
        try:
            entry, source, stands_in = self.provider.get(
                masked.key, lambda: self.requests.of(call, masked.bucket)
            )
        except MaskingError as error:  # from the build: no rule masks an equation in this bucket
            refused = error
        if refused is not None:
            self.refusals.note(masked.key, refused)
            return self._fall_back(refused, call, out, arguments)
        is_compiled = source == "compile"
        learning = None if stands_in else self.buckets.learning(call.program)
        if learning is not None:
            with self.lock:
                learning.compiled(masked.bucket, entry.compile_seconds)
        served = self.served(masked.key, entry, call, out)
        served.line.reason = masked.beyond
        run = functools.partial(self.run, entry, call, served, out)
        if learning is not None and not is_compiled:
            run = functools.partial(learning.timed, self.lock, masked.bucket, call.leaves, run)
        try:
            result = run()
        except SignatureChanged:
            return self._fall_back(_NOT_AS_TRACED, call, out, None)
        except NothingSelected as error:  # its results are dropped
            refused = error
        if is_compiled:
            self.recompiles.note(call, entry)
        if refused is not None:
            return self._fall_back(refused, call, out, None)
        if self.config.check is not Check.OFF:
            return result
        # After a stand-in the next call must ask the provider again: its own bucket may be ready.
        # So does one in a bucket that is still timed.
        is_timed = learning is not None and learning.wants_seconds(masked.bucket)
        if arguments is not None and not (stands_in or is_timed):
            # Every call that is larger, up to these padded sizes, has the same bucket.
            up_to = None if masked.beyond is not None else tuple(masked.bucket.values())
            opened = call.signature.open_leaves(call.tokens)
            self.memory.add(call, arguments, opened, served, up_to)
        return result

    def tell_compiled(
        self, learning: Learning, program: Interface | None, of_rows: bool = False
    ) -> None:
        """Tell what learns buckets of those in the cache: a warm-up compiles some, too."""
        for (owner, *_), entry in self.cache.items():
            if owner is program and (entry.rows is not None) == of_rows:
                learning.compiled(entry.sizes, entry.compile_seconds)

    def served(
        self, key: object, entry: Executable, call: Call, out: Out | None = None
    ) -> ServedCall:
        """How an executable serves a call."""
        # An argument from the host would be a transfer, which a guard of JAX may refuse.
        sizes = on_default_device(sizes_argument(call, entry.size_constant_shapes))
        finish = entry.finisher(call, out or self.config.out, self.counters)
        line = runs.counter_of(entry, call)
        learning, clock = self.buckets.learning(call.program), None
        if learning is not None:
            with self.lock:
                learning.watch(line)
                clock = learning.clock
        return ServedCall(key, sizes, finish, line, clock)

    def run(self, entry: Executable, call: Call, served: ServedCall, out: Out) -> Any:
        """Run a call in a bucket, checked if that is configured, and count it."""
        counting = runs.counted(self.counters, served.line)
        run = functools.partial(runs.run_padded, entry, served.sizes, call, served.finish)
        if self.config.check is Check.OFF:
            with counting:
                return run()
        from bucketjit._runtime.checked_calls import checked

        return checked(self, entry, call, out, counting, run)

    def run_unpadded(self, call: Call) -> Any:
        """Run a call at its exact shape, for a comparison; it is not counted."""
        return self._run_exact(call, Out.JAX, is_call=False)

    def _note_beyond(self, reason: str, call: Call) -> None:
        """Log that sizes beyond the largest bucket stay exact, once for each reason."""
        if self.counters.fallback(reason):
            self.emit(Event("fallback", self.name, call.sizes, detail=reason))

    def chosen(self, call: Call, learns: bool = True) -> tuple[Call, Decision]:
        """Resolve a call that is not run, and decide what it would do."""
        call = self.resolve(call) if learns else self.looked_at(call)
        return call, self.decisions.decide(call)

    def looked_at(self, call: Call) -> Call:
        """The call with its sizes and its program; no axis of its signature stays open for it."""
        self.counters.history.settle(but="counts")
        with self.lock, call.signature.restoring_axes():
            return call.resolved(call.signature.resolve(call.shapes))

    def refuse(self, request: CompileRequest, refusal: MaskingError) -> None:
        """Note that a compile request failed because its program cannot be masked."""
        if isinstance(request.key[0], Interface):
            self.counters.history.settle(but="counts")
            self.refusals.note(request.key, refusal)

    def resolve(self, call: Call) -> Call:
        """A call with its sizes and its program; events say what its signature has learnt."""
        self.counters.history.settle(but="counts")
        began = time.perf_counter()
        with self.lock:
            call = call.resolved(call.signature.resolve(call.shapes))
            news = call.signature.take_news()
        if news:
            seconds = time.perf_counter() - began
            for detail in news:
                self.emit(Event("signature", self.name, call.sizes, seconds, detail))
        return call

    def program_beside(self, call: Call) -> Interface | None:
        """The program of a call like this one whose axes are not empty; None if there is none."""
        signature = call.signature
        tokens = signature.guessed_tokens(call.shapes)
        sizes = bind_sizes(tokens, call.shapes, signature.paths)
        filled = {v: n or 2 for v, n in sizes.items()}
        with WithoutErrors():  # of the function, at sizes it was never called with
            return self.resolve(at_sizes(call, tokens, filled)).program
        return None

    def _run_exact(
        self,
        call: Call,
        out: Out,
        arguments: Arguments | None = None,
        reason: str | None = None,
        is_call: bool = True,
    ) -> Any:
        args, kwargs = call.tree.unflatten(map(plain, call.leaves))
        key = self.requests.exact_key(call)
        compiled = self.refusals.compiled_exact(
            call, lambda: self.provider.get(key, lambda: self.requests.of(call))
        )
        if compiled is None:
            line = CallCounter(call.sizes, reason=reason)
            with runs.counted(self.counters, line) if is_call else nullcontext():
                return runs.run_eagerly(call, out, reason)
        entry, source, _ = compiled
        finish = runs.exact_finisher(entry, call, None if reason is None else call.program, out)
        named = call.sizes or call.signature.guessed_sizes(call.shapes)
        line = CallCounter(named, reason=reason, key=call.shape_key)
        # A run that only checks another one (`is_call` is False) does not count as a call.
        with runs.counted(self.counters, line) if is_call else nullcontext():
            result = entry.run(None, args, kwargs)
            result = result if finish is None else finish(result)
        if is_call and source == "compile":
            self.recompiles.note(call, entry, is_fallback=reason is not None)
        if is_call and arguments is not None and self.config.check is Check.OFF:
            opened = [i for i, spec in enumerate(call.signature.specs) if spec is not None]
            self.memory.add(call, arguments, opened, ServedCall(key, None, finish, line))
        return result

    def _fall_back(
        self, refusal: MaskingError, call: Call, out: Out, arguments: Arguments | None
    ) -> Any:
        if self.config.fallback is Fallback.EXACT:  # may raise; such a call is no fallback
            result = self._run_exact(call, out, arguments, refusal.reason)
        elif isinstance(refusal, NothingSelected):  # the function may raise an error of its own
            with suppress(ArtifactError):  # without its source
                runs.run_eagerly(call, out, refusal.reason)
        is_eager = call.signature in self.refusals.eager
        self.note_fallback(refusal, counted=True, is_eager=is_eager)
        return result

    def note_fallback(
        self, refusal: MaskingError, counted: bool = False, is_eager: bool = False
    ) -> None:
        """Count a call that is not masked, and warn of each reason once."""
        if self.config.fallback is Fallback.ERROR:
            raise FallbackError(refusal.reason, refusal.remedy) from refusal
        if self.counters.fallback(refusal.reason, counted):
            self.emit(Event("fallback", self.name, detail=str(refusal)))
            how = "without jit, operation by operation"
            how = how if is_eager else "at its exact shapes, one compile each"
            warn(f"{self.name} runs {how}: {refusal}", FallbackWarning)
