"""The call path behind `BucketedExec`: signature, program, bucket, executable, result."""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import cachetools

from bucketjit import strategies
from bucketjit._arrays.padding import pad, plain
from bucketjit._arrays.results import Change, Out, as_numpy, as_padded, at_leaves
from bucketjit._compile.build_exact import one_by_one
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.executable import (
    Executable,
    SignatureChanged,
    arguments_with,
    run_poisoned,
    sizes_argument,
)
from bucketjit._compile.files.preload import Preloading
from bucketjit._compile.provider import Supply
from bucketjit._compile.requests import Order, Orders
from bucketjit._config import Config, Fallback
from bucketjit._errors import (
    BucketOverflowError,
    CompileBudgetError,
    FallbackError,
    FallbackWarning,
    MaskingError,
    frames_inside,
    is_of_machine,
)
from bucketjit._events import LONGEST, Event, logger, one_line, printable, shown, tell
from bucketjit._jax.arrays import on_default_device
from bucketjit._jax.compiler import failed_running
from bucketjit._masking.checks import POISONS, Check, blame, compare, failed
from bucketjit._runtime.buckets import exactly, padded_sizes
from bucketjit._runtime.chunks.splitter import Splitter
from bucketjit._runtime.counters import Counters, Line
from bucketjit._runtime.fast_path.handler import Way
from bucketjit._runtime.fast_path.layout import arguments_of, elements, host_arguments, layout_of
from bucketjit._runtime.fast_path.plan import Plan, give_away
from bucketjit._runtime.fast_path.route import Given, Route, Routes, make_plan
from bucketjit._runtime.open_outputs import open_outs
from bucketjit._runtime.refusals import Refusals
from bucketjit._runtime.shared_state import Relatives, make_cache
from bucketjit._signature.resolved_call import Call
from bucketjit._signature.signer import Signed, Signer
from bucketjit._tracing.program import Program

_LARGEST_LEAKS = 4096  # elements that a plan keeps on the device for each logical size


class Watcher(Protocol):
    """Who is told of each call; see `bucketjit._precompile.adaptive`."""

    def learn(self, signed: Signed, call: Call) -> None:
        """Take note of how calls look."""

    def note(self, sizes: Mapping[str, int]) -> None:
        """Take note of a call."""


class Preparer(Protocol):
    """Who is told of each new call before it runs; see `bucketjit._precompile.listed_buckets`."""

    def prepare(self, engine: Engine, signed: Signed, call: Call, key: Any) -> None:
        """Compile what calls like this one will need; ``key`` is that of its own executable."""


_CUT = 1024  # sizes of a program whose cut bucket is remembered

_NOT_AS_TRACED = MaskingError(
    "once padded, its arguments are sharded in another way than its program was traced for",
    "give arrays that the mesh cuts into equal parts, padded or not",
)


class _PartRefused(Exception):
    """A part of a call cannot be served by the program, and so must not be served at all.

    Attributes:
        refusal: Why.
        is_chosen: Whether it is the user who wants such sizes to run exact.
    """

    def __init__(self, refusal: MaskingError, is_chosen: bool = False) -> None:
        super().__init__(refusal.reason)
        self.refusal, self.is_chosen = refusal, is_chosen


class Engine:
    """Serves the calls of one configuration.

    Args:
        config: The configuration.
        kin: An engine of a derivative of the same function; cache and counters are shared with it.

    Attributes:
        config: The configuration.
        signer: From arguments to families.
        cache: The executables.
        preloading: What is loaded from files before it is asked for.
        counters: What was done so far.
        orders: What to ask of the cache.
        routes: The warm path: ways to read the arguments.
        chunk_routes: Those of chunks, whose results are padded, by the program of the whole.
        relatives: Itself and the engines of derivatives, all that share cache and counters.
        refusals: Programs that cannot be masked, and why.
        lock: Held while programs are traced.
        watcher: Who is told of each call, or None.
        preparer: Who compiles what later calls will need, or None.
        splitter: Runs calls in chunks that are beyond the largest bucket.
    """

    def __init__(self, config: Config, kin: Engine | None = None) -> None:
        self.config = config
        self.signer = Signer(config)
        self.cache: ExecutableCache[Any, Executable]
        self.supply: Supply
        self.counters: Counters
        self.relatives: Relatives[Engine]
        if kin is None:
            self.counters = Counters()
            self.relatives = Relatives()
            self.cache, self.supply = make_cache(config, self.name, self.counters, self.relatives)
            self.preloading = Preloading(self.cache)
        else:
            self.preloading, self.relatives = kin.preloading, kin.relatives
            self.cache, self.supply, self.counters = kin.cache, kin.supply, kin.counters
        self.relatives.add(self)
        self.orders = Orders(config, self.name, self.cache, self.preloading)
        self.routes = Routes()
        self.chunk_routes: dict[weakref.ref[Program], Routes] = {}
        self.refusals = Refusals()
        self.lock = threading.RLock()
        self.watcher: Watcher | None = None
        self.preparer: Preparer | None = None
        self.splitter = Splitter(config, self.lock)
        self._cut: weakref.WeakKeyDictionary[Program, Any] = weakref.WeakKeyDictionary()
        self._found: weakref.WeakKeyDictionary[Program, dict[Any, dict[str, int]]]
        self._found = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Drop every executable and program, and start the counters again."""
        with self.lock:
            self.supply.clear()
            self.cache.clear()
            self.signer.clear()
            self.preloading.clear()
            self.routes.clear()
            self.chunk_routes.clear()
            self.refusals.clear()
            self.relatives.clear()
            self.relatives.add(self)
            self.splitter.clear()
            self._cut.clear()
            self._found.clear()
            self.counters.clear()

    @property
    def name(self) -> str:
        """How messages name the function."""
        return getattr(self.config.fn, "__name__", type(self.config.fn).__name__)

    @property
    def always_exact(self) -> bool:
        """Whether no variable has a strategy."""
        config = self.config
        every = (config.default, *config.per_dim.values())
        return config.plan is None and all(isinstance(s, strategies.Exact) for s in every)

    def tell(self, event: Event) -> None:
        """Log an event, and hand it to the listeners."""
        tell(event, self.config.listeners)

    # --- a call ---

    def serve(
        self,
        signed: Signed,
        given: Given | None = None,
        out: Out | None = None,
        part: Call | None = None,
    ) -> Any:
        """Run a call.

        Args:
            signed: The call.
            given: Its arguments as they came, if the next one like it may skip the slow path.
            out: The form of its results; by default the configured one.
            part: The same call, resolved, if it is a part of another one.
        """
        out = out or self.config.out
        if self.always_exact:
            sizes = signed.family.declared_sizes(signed.shapes)
            return self._run_exact(signed, sizes, out, given)
        call = part or self.resolve(signed)
        program = call.program
        if program is None:
            if call.refusal is None:
                return self._run_exact(signed, call.sizes, out, given)
            result = self._fall_back(call.refusal, signed, call, out, given)
            with self.lock:
                signed.family.remember_refusal(call, signed.shapes)
            return result
        program.check_reshapes(call.sizes)
        if (refusal := self.refusals.of_program(program)) is not None:
            return self._fall_back(refusal, signed, call, out, given)
        try:
            with self.lock:
                bucket = self.bucket_of(program, call)
        except BucketOverflowError as error:
            return self._run_split(signed, call, error, out, given)
        beyond = exactly(self.config, call.sizes)
        if beyond is not None and self.counters.fallback(beyond.reason):
            self.tell(Event("fallback", self.name, call.sizes, detail=beyond.reason))
        if beyond is not None and beyond.wholly:
            if call.whole is not None:
                raise _PartRefused(MaskingError(beyond.reason), is_chosen=True)
            return self._run_exact(signed, call.sizes, out, given, program, beyond.reason)
        key = self.orders.masked_key(program, bucket)
        if self.preparer is not None:
            self.preparer.prepare(self, signed, call, key)
        if (refusal := self.refusals.of(key)) is not None:
            return self._fall_back(refusal, signed, call, out, given)
        try:
            entry, source, stands_in = self.supply.get(
                key, lambda: self.orders.masked(signed, call, bucket)
            )
            compiled = source == "compile"
        except MaskingError as error:
            self.refusals.note(key, error)
            return self._fall_back(error, signed, call, out, given)
        if self.config.check is not Check.OFF:
            try:
                return self._run_checked(entry, compiled, signed, call, out)
            except SignatureChanged:
                return self._fall_back(_NOT_AS_TRACED, signed, call, out, None)
        sizes = sizes_argument(call, entry.leak_shapes)
        finish = entry.finisher(call, out)
        line = _line(entry, call, signed)
        line.reason = None if beyond is None else beyond.reason
        try:
            with self._counting(line, compiled):
                result = self._run(entry, sizes, signed, finish)
        except SignatureChanged:
            return self._fall_back(_NOT_AS_TRACED, signed, call, out, None)
        if self.watcher is not None:
            self.watcher.learn(signed, call)
            self.watcher.note(call.sizes)
        if given is not None and not stands_in:
            self._remember_masked(signed, given, call, key, sizes, finish, line)
        return result

    def find_way(self, signed: Signed, call: Call, given: Given) -> Way | None:
        """How chunks like this one are served, if what serves them is there and is known to do so.

        Args:
            signed: A chunk. It is not run.
            call: The same, resolved; it has a program.
            given: Its arguments as they came.
        """
        if self.always_exact or self.config.check is not Check.OFF:
            return None
        program = call.program
        assert program is not None
        program.check_reshapes(call.sizes)
        try:
            if exactly(self.config, call.sizes):
                return None
            with self.lock:
                bucket = self.bucket_of(program, call)
        except BucketOverflowError:
            return None
        key = self.orders.masked_key(program, bucket)
        slot = None if self.refusals.of(key) else self.cache.slot(key)
        entry = None if slot is None else slot.entry
        if entry is None:
            return None
        finish = entry.finisher(call, Out.PADDED)
        sizes, line = sizes_argument(call, entry.leak_shapes), _line(entry, call, signed)
        way = self._remember_masked(signed, given, call, key, sizes, finish, line)
        if way is not None and self.watcher is not None:
            self.watcher.learn(signed, call)
        return way

    def refuse(self, order: Order, refusal: MaskingError) -> None:
        """Take note that the program of an order cannot be masked, or not in its bucket."""
        if isinstance(order.key[0], Program):
            self.refusals.note(order.key, refusal)

    def resolve(self, signed: Signed) -> Call:
        """The sizes and the program of a call; what is learnt from it is told."""
        began = time.perf_counter()
        with self.lock:
            if signed.family.tokens is None:
                self.orders.expect(signed)
            call = signed.family.resolve(signed.shapes)
            news = signed.family.take_news()
        if news:
            seconds = time.perf_counter() - began
            for detail in news:
                self.tell(Event("signature", self.name, call.sizes, seconds, detail))
        return call

    def bucket_of(self, program: Program, call: Call) -> dict[str, int]:
        """Padded size of each variable, those of the program's own included."""
        bucket = self.chosen(program, call.sizes)
        if not program.found:
            return bucket
        # Nothing bounds these over the bucket, so room is made for the largest seen in it.
        largest = self._found.setdefault(program, {}).setdefault(tuple(bucket.values()), {})
        there = program.found_sizes(bucket) or {}
        for name, size in zip(program.found, call.leaks.sizes, strict=True):
            known = max(there.get(name, 0), largest.get(name, 0))
            largest[name] = known if size <= known else max(size, 2 * known)
        return {**bucket, **largest}

    def chosen(self, program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
        """Padded size of each variable: the strategies' choice, or what the guards allow of it."""
        bucket = padded_sizes(self.config, sizes)
        if program.fits(bucket):
            return bucket
        key = (*sizes.items(), *bucket.items())  # a strategy may change its mind
        with self.lock:
            known = self._cut.setdefault(program, cachetools.LRUCache(_CUT))
            if key not in known:
                known[key] = self._cut_bucket(program, sizes, bucket)
            found: dict[str, int] = known[key]
            return found

    def _cut_bucket(
        self, program: Program, sizes: Mapping[str, int], bucket: Mapping[str, int]
    ) -> dict[str, int]:
        """The largest sizes up to the bucket that satisfy the guards: one for all its sizes."""
        for variable, size in sizes.items():
            trial = dict(bucket)
            for n in range(bucket[variable], size - 1, -1):
                trial[variable] = n
                if program.fits(trial):
                    return trial
        return dict(sizes)

    @contextmanager
    def _counting(self, line: Line, compiled: bool) -> Iterator[None]:
        """Count a call when its executable has run, well or not."""
        try:
            yield
        except Exception as error:
            if failed_running(error):
                self.counters.call(line, compiled)
            raise
        self.counters.call(line, compiled)

    def _run(self, entry: Executable, sizes: Any, signed: Signed, finish: Change | None) -> Any:
        args, kwargs = signed.tree.unflatten(_padded(signed.leaves, entry.pads))
        result = entry.run(sizes, args, kwargs)
        give_away([signed.leaves[i] for i in entry.donated_leaves])
        return result if finish is None else finish(result)

    def _run_exact(
        self,
        signed: Signed,
        sizes: Mapping[str, int],
        out: Out,
        given: Given | None = None,
        program: Program | None = None,
        reason: str | None = None,
        is_call: bool = True,
    ) -> Any:
        args, kwargs = signed.tree.unflatten(map(plain, signed.leaves))
        key = self.orders.exact_key(signed)
        entry, source, _ = self.supply.get(key, lambda: self.orders.exact(signed, sizes))
        finish = _exact_finisher(entry, signed, program, out)
        line = Line(sizes or signed.family.guessed_sizes(signed.shapes), reason=reason)
        counting = self._counting(line, source == "compile") if is_call else nullcontext()
        with counting:
            result = entry.run(None, args, kwargs)
            result = result if finish is None else finish(result)
        if is_call and given is not None and self.config.check is Check.OFF:
            opened = [i for i, spec in enumerate(signed.family.specs) if spec is not None]
            self._remember(signed, given, opened, key, None, finish, line)
        return result

    def _run_split(
        self,
        signed: Signed,
        call: Call,
        error: BucketOverflowError,
        out: Out,
        given: Given | None,
    ) -> Any:
        def serve(chunk: Signed, part: Call, chunk_given: Given | None) -> Any:
            return self.serve(chunk, chunk_given, Out.PADDED, part)

        assert call.program is not None
        routes = self._routes_of_parts(call.program)
        given = given if self.config.check is Check.OFF else None
        try:
            result, way = self.splitter.run(
                serve, self.find_way, signed, call, error, out, given, routes
            )
        except _PartRefused as refused:
            if call.whole is not None:
                raise
            why = refused.refusal
            if refused.is_chosen:
                return self._run_exact(signed, call.sizes, out, given, call.program, why.reason)
            return self._fall_back(why.without_frames(), signed, call, out, given)
        except CompileBudgetError as refused:
            of = shown(call.sizes)
            raise CompileBudgetError(f"{refused} That is a chunk of a call with {of}.") from None
        if way is not None and given is not None:
            opened = signed.family.open_leaves(call.tokens)
            layout = layout_of(
                signed,
                opened,
                given.args,
                given.kwargs,
                arguments_of(signed, given.args, given.kwargs),
            )
            if layout is not None:
                with self.lock:
                    # Who cleared the routes meanwhile does not count its chunks any more.
                    if self.counters.counts(way.lines):
                        self._keep(given, *given.routes.of(layout), way)
        if self.config.check in (Check.EXACT, Check.EXACT_ALWAYS) and call.whole is None:
            other = self._run_exact(
                signed, call.sizes, Out.JAX, program=call.program, is_call=False
            )
            problem = compare(result, other, "the run in one piece", False)
            if problem and not self._is_of_jit(problem, signed, result):
                raise failed(self.name, problem, "")
        args, _ = signed.tree.unflatten(signed.leaves)
        give_away([args[i] for i in signed.donate])
        return result

    def _routes_of_parts(self, program: Program) -> Routes:
        with self.lock:
            for gone in [ref for ref in self.chunk_routes if ref() is None]:
                self._forget(self.chunk_routes.pop(gone).clear())
            return self.chunk_routes.setdefault(weakref.ref(program), Routes())

    def _run_checked(
        self,
        entry: Executable,
        compiled: bool,
        signed: Signed,
        call: Call,
        out: Out,
    ) -> Any:
        finish = entry.finisher(call, out)
        counting = self._counting(_line(entry, call, signed), compiled)
        if self.config.check is Check.POISON:
            with counting:
                results = [run_poisoned(entry, signed, call, i, out) for i in range(len(POISONS))]
            result, other, what = results[0], results[1], "the same call with other padding"
            to_the_bit = True
        else:
            sizes = sizes_argument(call, entry.leak_shapes)
            with counting:
                result = self._run(entry, sizes, signed, finish)
            if call.whole is not None or (
                entry.checked and self.config.check is not Check.EXACT_ALWAYS
            ):
                return result  # the whole is compared, and the function may do other things here
            other, what, to_the_bit = (
                self._run_exact(signed, call.sizes, Out.JAX, is_call=False),
                "the unpadded run",
                False,
            )
        problem = compare(result, other, what, to_the_bit)
        if problem and (to_the_bit or not self._is_of_jit(problem, signed, result)):
            assert call.program is not None
            blamed = blame(
                call.program,
                self.orders.rules(),
                dict(zip(call.variables, call.ordered, strict=True)),
                entry.sizes,
                call.leaks.values,
                lambda kind: arguments_with(entry, signed, kind),
                not to_the_bit,
            )
            raise failed(self.name, problem, blamed)
        entry.checked = True
        return result

    def _is_of_jit(self, problem: str, signed: Signed, result: Any) -> bool:
        """Whether it is the compiled unpadded run that is wrong, and the bucket is right."""
        try:
            want = one_by_one(signed)
        except Exception as error:
            if is_of_machine(error):
                raise
            why = one_line(f"{self.name}: does not run one operation at a time: {error}", LONGEST)
            logger.debug("%s", why)
            return False
        if compare(result, want, "it", False):
            return False
        logger.warning(
            "%s: %s, but agrees with the unpadded run of one operation at a time: XLA rounds a"
            " value in more than one way where jax.jit compiles them together",
            *(one_line(self.name), one_line(problem, LONGEST)),
        )
        return True

    # --- falling back ---

    def _fall_back(
        self, refusal: MaskingError, signed: Signed, call: Call, out: Out, given: Given | None
    ) -> Any:
        if call.whole is not None:
            raise _PartRefused(refusal)
        if self.config.fallback is Fallback.EXACT:  # it may raise; then it is no fallback
            result = self._run_exact(signed, call.sizes, out, given, call.program, refusal.reason)
        self.note_fallback(refusal, counted=True)
        return result

    def note_fallback(self, refusal: MaskingError, counted: bool = False) -> None:
        """Count a call that is not masked, and warn of it once per reason.

        Args:
            refusal: Why it is not.
            counted: It was counted already, with the reason.

        Raises:
            FallbackError: The policy is to raise.
        """
        if self.config.fallback is Fallback.ERROR:
            raise FallbackError(refusal.reason, refusal.remedy) from refusal
        if self.counters.fallback(refusal.reason, counted):
            self.tell(Event("fallback", self.name, detail=str(refusal)))
            message = f"{self.name} runs at its exact shapes, one compile each: {refusal}"
            warnings.warn(printable(message, LONGEST), FallbackWarning, stacklevel=frames_inside())

    # --- the warm path ---

    def _remember_masked(
        self,
        signed: Signed,
        given: Given,
        call: Call,
        key: Any,
        sizes: Any,
        finish: Change | None,
        line: Line,
    ) -> Way | None:
        if sum(x.size for x in call.leaks.values) > _LARGEST_LEAKS:
            return None
        on_device = on_default_device(sizes)
        opened = signed.family.open_leaves(call.tokens)
        return self._remember(signed, given, opened, key, on_device, finish, line, call.sizes)

    def _remember(
        self,
        signed: Signed,
        given: Given,
        opened: Sequence[int],
        key: Any,
        sizes: Any,
        finish: Change | None,
        line: Line,
        logical: Mapping[str, int] | None = None,
    ) -> Way | None:
        """Let the next call like this one skip the slow path. Returns what it takes instead."""
        slot = self.cache.slot(key)
        if slot is None:
            return None
        arguments = arguments_of(signed, given.args, given.kwargs)
        layout = layout_of(signed, opened, given.args, given.kwargs, arguments)
        if layout is None:
            return None
        note = None
        if self.watcher is not None and logical is not None:
            note = functools.partial(self.watcher.note, logical)
        hosts = host_arguments(arguments, opened)
        with self.lock:
            self.counters.open(line)
            route, gone = given.routes.of(layout)
            joined = given.routes is not self.routes
            plan = make_plan(layout, slot, sizes, signed.leaves, finish, line, note, hosts, joined)
            self._keep(given, route, gone, plan)
        return plan

    def _keep(self, given: Given, route: Route, gone: list[Way], way: Way) -> None:
        gone += route.remember(given.args, given.kwargs, way)
        if given.routes is not self.routes and any(other.is_alive for other in gone):
            gone += self.routes.clear()  # they may lead to chunks that are not counted any more
        self._forget(gone)

    def forget_routes(self) -> None:
        """Let every call look for its bucket anew."""
        with self.lock:
            every = [self.routes, *self.chunk_routes.values()]
            self._forget([way for routes in every for way in routes.clear()])

    def _forget(self, ways: Sequence[Way]) -> None:
        for way in ways:
            if isinstance(way, Plan):  # the chunks of others count for themselves
                self.counters.close(way.line)


def _line(entry: Executable, call: Call, signed: Signed) -> Line:
    """What is counted of calls like one that was served by an executable."""
    logical = dict(zip(call.variables, call.ordered, strict=True))
    real, total = elements(entry.pads, signed.leaves)
    return Line(logical, entry.sizes, real, total, entry.flops)


def _exact_finisher(
    entry: Executable, signed: Signed, program: Program | None, out: Out
) -> Change | None:
    if out is Out.JAX:
        return None
    change = as_numpy if out is Out.NUMPY else as_padded
    opened: Sequence[int] = range(entry.out_tree.num_leaves)
    if out is Out.PADDED:
        opened = open_outs(entry, signed) if program is None else program.open_outs
    return at_leaves(entry.out_tree, dict.fromkeys(opened, change))


def _padded(leaves: Sequence[Any], pads: Sequence[tuple[int, tuple[int, ...]]]) -> list[Any]:
    """The leaves of a call as an executable takes them."""
    shapes = dict(pads)
    return [pad(x, shapes[i]) if i in shapes else plain(x) for i, x in enumerate(leaves)]
