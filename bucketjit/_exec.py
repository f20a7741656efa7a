"""`BucketedExec`: the call path."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Self

import jax
import numpy as np

from bucketjit import _autodiff, _jax, strategies
from bucketjit._axes import STATIC
from bucketjit._builders import Builders
from bucketjit._cache import CacheInfo, ExecutableCache
from bucketjit._check import POISONS, Check, blame, compare, failed
from bucketjit._config import Config, Fallback
from bucketjit._dims import is_symbolic, variables_of
from bucketjit._errors import FallbackError, FallbackWarning, MaskingError, SpecError
from bucketjit._executable import (
    Executable,
    SignatureChanged,
    arguments_with,
    build_exact,
    build_masked,
    padded_leaf_shapes,
    run_poisoned,
    sizes_argument,
)
from bucketjit._explain import Explanation, array_like, describe, masked_equations
from bucketjit._family import Call
from bucketjit._padding import pad
from bucketjit._route import Known, Route, make_route
from bucketjit._rule import Rule
from bucketjit._signing import Signed, Signer
from bucketjit._stats import BucketStats, Counters, FrozenDict, Stats
from bucketjit._trace import Program, parse_constraint
from bucketjit.rules import default_rules
from bucketjit.strategies.base import checked_bucket

_MAX_ROUTES = 16
_LARGEST_LEAKS = 4096  # elements that a route keeps on the device for each logical size


class BucketedExec(Builders):
    """A function compiled once per bucket of sizes, with the results of the unpadded one.

    The function is traced once with symbolic sizes. Each call rounds its sizes up to a bucket,
    pads the arguments, and runs the bucket's executable, in which padding is masked out. The
    masks are derived from the traced program, so the function needs none. A call that cannot
    be masked runs at its exact shape and says why (see `Fallback`).

    Without a strategy every size gets its own executable; add one with `with_pow2` and the
    like. Executors are immutable: every ``with_...`` returns a new one with an empty cache.
    Calling one from several threads is safe. Called inside ``jax.jit``, ``jax.vmap`` and the like
    the function itself is inlined; its derivatives by ``jax.grad`` and ``jax.jvp`` are bucketed.

    Args:
        fn: A function that ``jax.jit`` accepts.
        dynamic_axes: Which axes are open. One entry per positional argument: a string as in
            ``jax.export`` (``"b, s, _"``, ``"b, ..."``), ``None`` (static), a dict
            ``{0: "b"}``, a tuple ``("b", None)``, a list of axes ``[0, 1]``, or a pytree
            (prefix) of these for containers; or a dict of entries by argument name. One name
            is one size. A Python int argument with entry ``"n"`` is a size itself. By default
            axis 0 of every argument that is an array, called ``batch``.
        constraints: What always holds of the sizes, as in ``jax.export``: ``"s >= 4"``,
            ``"mod(s, 2) == 0"``.
        static_argnums: Positions of arguments that are compile-time constants, as in ``jit``.
        static_argnames: Names of such arguments.
        donate_argnums: Positions of arguments whose buffers may be reused, as in ``jit``.
            Arguments with open axes are padded copies and are not donated.
        fallback: What to do with calls that cannot be masked.
        check: Checked execution, for tests; see `Check`.

    Raises:
        TypeError: ``fn`` is not callable.
        SpecError: An option is malformed.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> mean = BucketedExec(lambda x: jnp.mean(x, axis=0)).with_pow2()
        >>> [float(mean(np.arange(n, dtype=np.float32))) for n in (3, 5, 7)]
        [1.0, 2.0, 3.0]
        >>> mean.cache_size()  # the buckets 4 and 8
        2
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        dynamic_axes: Any = None,
        constraints: Sequence[str] = (),
        static_argnums: int | Sequence[int] | None = (),
        static_argnames: str | Sequence[str] | None = (),
        donate_argnums: int | Sequence[int] | None = (),
        fallback: Fallback = Fallback.EXACT,
        check: Check = Check.OFF,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        if not isinstance(fallback, Fallback):
            raise SpecError(f"fallback must be Fallback.EXACT or Fallback.ERROR, got {fallback!r}")
        if not isinstance(check, Check):
            raise SpecError(f"check must be a member of bucketjit.Check, got {check!r}")
        if isinstance(constraints, str):
            constraints = (constraints,)
        for text in constraints:
            if not isinstance(text, str):
                raise SpecError(f"constraints: expected text such as 's >= 4', got {text!r}")
            try:
                parse_constraint(text)
            except (ValueError, SyntaxError) as error:
                raise SpecError(f"constraints: {error}") from error
        self._setup(
            Config(
                fn,
                dynamic_axes,
                tuple(constraints),
                static_argnums,
                static_argnames,
                donate_argnums,
                fallback,
                check,
            )
        )

    def _setup(self, config: Config) -> None:
        self._config = config
        self._signer = Signer(config)
        self._cache: ExecutableCache[Any, Executable] = ExecutableCache(config.maxsize)
        self._counters = Counters()
        self._refused: dict[Program, MaskingError] = {}
        self._cut: dict[Program, dict[Any, dict[str, int]]] = {}
        self._found: dict[tuple[Program, tuple[int, ...]], dict[str, int]] = {}
        self._differentiated: dict[Any, _autodiff.Bucketed] = {}
        self._routes: list[Route] = []
        self._lock = threading.RLock()
        # The attributes of a callable object are its own: it may have one named like one here.
        functools.update_wrapper(self, config.fn, updated=())

    def _with(self, **changes: Any) -> Self:
        new = object.__new__(type(self))
        new._setup(dataclasses.replace(self._config, **changes))
        return new

    def __copy__(self) -> Self:
        return self._with()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._with(fn=copy.deepcopy(self._config.fn, memo))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method, where the function is one of a class, as with ``jax.jit``."""
        return self if instance is None else MethodType(self, instance)

    # --- the call path ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; see the class."""
        if not _jax.at_top_level() or _jax.jit_disabled():
            return self._inside(args, kwargs)
        if not kwargs:
            for route in self._routes:
                sizes = route.sizes(args)
                if sizes is not None and (known := route.memo.get(sizes)) is not None:
                    entry = self._cache.get(known.key)
                    if entry is None:
                        break
                    try:
                        return self._run_route(route, entry, known, args)
                    except SignatureChanged:
                        break
                    except Exception:
                        self._signer.sign(args, kwargs)  # an argument may be what it cannot take
                        raise
        return self._call_slowly(args, kwargs)

    def _run_route(self, route: Route, entry: Executable, known: Known, args: Any) -> Any:
        values = list(args)
        real = total = 0
        for leaf, shape in entry.pads:
            position = route.position_of_leaf[leaf]
            value = values[position]
            real += value.size
            total += math.prod(shape)
            values[position] = pad(value, shape)
        if route.dynamic is not None:
            values = [values[i] for i in route.dynamic]
        result = entry.run(known.ordered, known.sizes, values)
        entry.hits += 1
        self._counters.call(real, total)
        return result

    def _inside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call inside a transformation: the function itself, or a derivative in buckets."""
        if not _jax.only_differentiated() or _jax.jit_disabled() or self._always_exact():
            return self._config.fn(*args, **kwargs)
        with _jax.eval_context():
            signed = self._signer.sign(args, kwargs)
            with self._lock:
                call = signed.family.resolve(signed.shapes)
        refusal: MaskingError | None = call.refusal
        if call.program is not None:
            refusal = self._refused.get(call.program) or _not_differentiated(signed, call.program)
        if refusal is not None:
            self._note_fallback(refusal)
        if call.program is None or refusal is not None:
            return self._config.fn(*args, **kwargs)
        with self._lock:
            key = (signed.family, call.tokens, call.program)
            fn = self._differentiated.get(key)
            if fn is None:
                fn = self._differentiated[key] = self._differentiable(signed, call, call.program)
        return call.program.out_tree.unflatten(_autodiff.call(fn, signed.leaves))

    def _differentiable(self, signed: Signed, call: Call, program: Program) -> _autodiff.Bucketed:
        signed = dataclasses.replace(signed, leaves=[])  # kept, and the arguments need not be
        family = signed.family

        def flat(*leaves: Any) -> list[Any]:
            args, kwargs = signed.tree.unflatten(leaves)
            return jax.tree_util.tree_leaves(family.fn(*args, **kwargs))

        def execute(*leaves: Any) -> list[Any]:
            shapes = [np.shape(x) for x in leaves]
            given = dataclasses.replace(signed, leaves=list(leaves), shapes=shapes)
            return jax.tree_util.tree_leaves(self._serve(given))

        def derive(fn: Callable[..., list[Any]], ins: _autodiff.Shapes) -> Callable[..., list[Any]]:
            names = {v for row in ins for t in row if t != STATIC for v in variables_of(t)}
            executor = self._with(
                fn=fn,
                per_dim={v: s for v, s in self._config.per_dim.items() if v in names},
                dynamic_axes=tuple(", ".join(row) if row else None for row in ins),
                constraints=(),
                static_argnums=(),
                static_argnames=(),
                donate_argnums=(),
            )
            executor._cache, executor._counters = self._cache, self._counters
            return executor

        flat.__name__ = self._name
        _autodiff.register()
        outs = tuple(
            tuple(str(d) if is_symbolic(d) else STATIC for d in shape)
            for shape in program.out_shapes
        )
        ins = tuple(tuple(STATIC if t.isdigit() else t for t in row) for row in call.tokens)
        # An executable that donates its arguments must not be given those of a derivative.
        run = derive(flat, ins) if signed.donate else execute
        dtypes = tuple(dtype for dtype, _ in program.out_types)
        return _autodiff.Bucketed(flat, run, ins, outs, derive, dtypes)

    def _call_slowly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._serve(self._signer.sign(args, kwargs), None if kwargs else args)

    def _serve(self, signed: Signed, args: tuple[Any, ...] | None = None) -> Any:
        """Run a call; ``args`` are given if the next one like it may skip the slow path."""
        if self._always_exact():
            return self._run_exact(signed, signed.family.declared_sizes(signed.shapes))
        with self._lock:
            call = signed.family.resolve(signed.shapes)
        program = call.program
        if program is None:
            if call.refusal is None:
                return self._run_exact(signed, call.sizes)
            result = self._fall_back(call.refusal, signed, call)
            with self._lock:
                signed.family.remember_refusal(call, signed.shapes)
            return result
        program.check_reshapes(call.sizes)
        if (refusal := self._refused.get(program)) is not None:
            return self._fall_back(refusal, signed, call)
        with self._lock:
            bucket = self._bucket_of(program, call)
        try:
            entry, compiled = self._masked_entry(signed, call, bucket)
        except MaskingError as error:
            self._refused[program] = error
            return self._fall_back(error, signed, call)
        if self._config.check is Check.OFF:
            result = self._run_masked(entry, signed, call)
            if args is not None:
                self._add_route(signed, call, args, entry, (program, tuple(bucket.values())))
            return result
        return self._run_checked(entry, compiled, signed, call, bucket)

    def _always_exact(self) -> bool:
        config = self._config
        every = (config.default, *config.per_dim.values())
        return all(isinstance(s, strategies.Exact) for s in every)

    def _bucket_of(self, program: Program, call: Call) -> dict[str, int]:
        """Padded size of each variable, those of the program's own included."""
        bucket = self._bucket(program, call.sizes)
        if not program.found:
            return bucket
        # Nothing bounds these over the bucket, so room is made for the largest seen in it.
        largest = self._found.setdefault((program, tuple(bucket.values())), {})
        there = program.found_sizes(bucket) or {}
        for name, size in zip(program.found, call.leaks.sizes, strict=True):
            known = max(there.get(name, 0), largest.get(name, 0))
            largest[name] = known if size <= known else max(size, 2 * known)
        return {**bucket, **largest}

    def _bucket(self, program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
        """Padded size of each variable: the strategies' choice, or what the guards allow of it."""
        config = self._config
        bucket = {
            v: checked_bucket(config.per_dim.get(v, config.default), v, n) for v, n in sizes.items()
        }
        if program.fits(bucket):
            return bucket
        key = tuple(sizes.items())
        known = self._cut.setdefault(program, {})
        if key not in known:
            known[key] = self._cut_bucket(program, sizes, bucket)
        return known[key]

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

    def _masked_entry(
        self, signed: Signed, call: Call, bucket: Mapping[str, int]
    ) -> tuple[Executable, bool]:
        """The executable of a bucket, and whether this call compiled it."""
        pads = padded_leaf_shapes(call, signed.family, bucket, signed.shapes)

        def build() -> Executable:
            leaves = list(signed.leaves)
            for i, shape in pads:
                leaves[i] = pad(leaves[i], shape)
            check = self._config.check
            return build_masked(signed, call, bucket, pads, self._rules, leaves, check)

        return self._entry((call.program, tuple(bucket.values())), build)

    def _entry(self, key: Any, build: Callable[[], Executable]) -> tuple[Executable, bool]:
        entry = self._cache.get(key)
        if entry is not None:
            entry.hits += 1
            return entry, False
        compiled = False

        def counted() -> Executable:
            nonlocal compiled
            built = build()
            compiled = True
            self._counters.compile(built.compile_seconds)
            built.on_compile = self._counters.compile
            return built

        entry = self._cache.get_or_compile(key, counted)
        if not compiled:
            entry.hits += 1
        return entry, compiled

    def _run_masked(self, entry: Executable, signed: Signed, call: Call) -> Any:
        leaves = list(signed.leaves)
        real = total = 0
        for i, shape in entry.pads:
            real += leaves[i].size
            total += math.prod(shape)
            leaves[i] = pad(leaves[i], shape)
        args, kwargs = signed.tree.unflatten(leaves)
        sizes = sizes_argument(call, entry.leak_shapes)
        result = entry.run(call.ordered, sizes, args, kwargs)
        self._counters.call(real, total)
        return result

    def _run_checked(
        self,
        entry: Executable,
        compiled: bool,
        signed: Signed,
        call: Call,
        bucket: Mapping[str, int],
    ) -> Any:
        if self._config.check is Check.POISON:
            results = [run_poisoned(entry, signed, call, i) for i in range(len(POISONS))]
            result, other, what = results[0], results[1], "the same call with other padding"
            exactly = True
            self._counters.call(0, 0)
        else:
            result = self._run_masked(entry, signed, call)
            if not compiled and self._config.check is not Check.EXACT_ALWAYS:
                return result
            other, what, exactly = self._run_exact(signed, call.sizes), "the unpadded run", False
        if problem := compare(result, other, what, exactly):
            assert call.program is not None
            blamed = blame(
                call.program,
                self._rules,
                dict(zip(call.variables, call.ordered, strict=True)),
                bucket,
                call.leaks.values,
                lambda kind: arguments_with(entry, signed, kind),
                not exactly,
            )
            raise failed(self._name, problem, blamed)
        return result

    def _fall_back(self, refusal: MaskingError, signed: Signed, call: Call) -> Any:
        if self._config.fallback is Fallback.EXACT:
            result = self._run_exact(signed, call.sizes)  # it may raise; then it is no fallback
        self._note_fallback(refusal)
        return result

    def _note_fallback(self, refusal: MaskingError) -> None:
        """Count a call that is not masked, and warn of it once per reason.

        Raises:
            FallbackError: The policy is to raise.
        """
        if self._config.fallback is Fallback.ERROR:
            raise FallbackError(refusal.reason, refusal.remedy) from refusal
        if self._counters.fallback(refusal.reason):
            warnings.warn(
                f"{self._name} runs at its exact shapes, one compile each: {refusal}",
                FallbackWarning,
                stacklevel=_frames_inside(),
            )

    def _run_exact(self, signed: Signed, sizes: Mapping[str, int]) -> Any:
        args, kwargs = signed.tree.unflatten(signed.leaves)
        named = zip(signed.family.paths, signed.shapes, strict=True)
        shown = sizes or {f"{path}[{i}]": n for path, s in named for i, n in enumerate(s)}
        key = self._exact_key(signed)
        check = self._config.check
        entry, _ = self._entry(key, lambda: build_exact(signed, shown, args, kwargs, check))
        result = entry.run((), None, args, kwargs)
        self._counters.call(0, 0)
        return result

    def _add_route(
        self, signed: Signed, call: Call, args: Any, entry: Executable, key: Any
    ) -> None:
        """Let the next call like this one skip the slow path."""
        for route in self._routes:
            if route.tokens is call.tokens and route.sizes(args) is not None:
                break
        else:
            made = make_route(signed.family, call.tokens, args, signed.dynamic, signed.statics)
            if made is None:
                return
            route = made
            self._routes = [route, *self._routes][:_MAX_ROUTES]
        sizes = sizes_argument(call, entry.leak_shapes)
        if sum(map(math.prod, entry.leak_shapes)) > _LARGEST_LEAKS:
            return
        route.remember(call.sizes, Known(key, call.ordered, jax.device_put(sizes)))

    @functools.cached_property
    def _rules(self) -> Mapping[Any, Rule]:
        return {**default_rules(), **self._config.rules}

    @property
    def _name(self) -> str:
        return getattr(self._config.fn, "__name__", type(self._config.fn).__name__)

    # --- the cache ---

    def cache_size(self) -> int:
        """How many executables the cache holds."""
        return len(self._cache)

    def cache_info(self) -> CacheInfo:
        """Hits, misses, bound and size of the cache, as in `functools.lru_cache`."""
        return self._cache.info()

    def cache_clear(self) -> None:
        """Drop every executable and program, and start the counters again."""
        with self._lock:
            self._cache.clear()
            self._signer.clear()
            self._routes = []
            self._refused.clear()
            self._cut.clear()
            self._found.clear()
            self._differentiated.clear()
            self._counters.clear()

    def stats(self) -> Stats:
        """A snapshot of what this executor has done; see `Stats`."""
        info = self._cache.info()
        buckets = tuple(
            BucketStats(FrozenDict(e.sizes), e.hits, e.compile_seconds, e.exact)
            for _, e in self._cache.items()
        )
        return self._counters.snapshot(info.hits, info.misses, self._cache.evictions, buckets)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Say what a call with these arguments would do, without compiling or running it.

        Args:
            *args: The arguments of the call; ``jax.ShapeDtypeStruct`` will do for arrays.
            **kwargs: Likewise.

        Returns:
            The sizes and the bucket, which program serves it under which guards, what is masked
            and where, or why the call would run exact and what to do about it. ``print`` it.

        Raises:
            ArgumentError, SpecError, StrategyError: What the call would raise.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> total = BucketedExec(lambda x: jnp.sum(x + 1), dynamic_axes="n").with_pow2()
            >>> told = total.explain(jax.ShapeDtypeStruct((5,), jnp.float32))
            >>> told.kind, dict(told.bucket), [e.primitive for e in told.masked]
            ('masked', {'n': 8}, ['reduce_sum'])
        """
        given = tuple(map(array_like, args))
        named = {name: array_like(value) for name, value in kwargs.items()}
        signed = self._signer.sign(given, named)
        if self._always_exact():
            sizes = signed.family.declared_sizes(signed.shapes)
            compiled = self._exact_key(signed) in self._cache
            reason = "there is no strategy: every size has an executable of its own"
            return Explanation(
                self._name, sizes, sizes, "exact", compiled, "", (), (), reason, "add .with_pow2()"
            )
        with self._lock, signed.family.unlearning():
            call = signed.family.resolve(signed.shapes)
        if call.program is None:
            refusal = call.refusal or MaskingError(
                "an axis of size 0 has no bucket" if call.sizes else "no axis is open"
            )
            return self._explained_exact(signed, call, refusal)
        call.program.check_reshapes(call.sizes)
        if (known := self._refused.get(call.program)) is not None:
            return self._explained_exact(signed, call, known)
        with self._lock:
            bucket = self._bucket_of(call.program, call)
        try:
            masked = masked_equations(call.program, bucket, self._rules)
        except MaskingError as error:
            return self._explained_exact(signed, call, error)
        return Explanation(
            self._name,
            FrozenDict(call.sizes),
            FrozenDict(bucket),
            "masked" if call.program.pairing is None else "paired",
            (call.program, tuple(bucket.values())) in self._cache,
            describe(call.program),
            tuple(map(str, call.program.guards)),
            masked,
        )

    def _explained_exact(self, signed: Signed, call: Call, why: MaskingError) -> Explanation:
        sizes = FrozenDict(call.sizes)
        compiled = self._exact_key(signed) in self._cache
        return Explanation(
            self._name, sizes, sizes, "exact", compiled, reason=why.reason, remedy=why.remedy
        )

    @staticmethod
    def _exact_key(signed: Signed) -> Any:
        return signed.family, tuple(signed.shapes)

    def __repr__(self) -> str:
        config = self._config
        parts = [repr(config.default), *(f"{d}: {s!r}" for d, s in config.per_dim.items())]
        name = getattr(config.fn, "__qualname__", repr(config.fn))
        return f"<BucketedExec {name}, {', '.join(parts)}, {self.cache_size()} executables>"


def _not_differentiated(signed: Signed, program: Program) -> MaskingError | None:
    """Why derivatives of a program are not bucketed, if they are not."""
    if any(t.dtype is None for t in signed.family.types):
        return MaskingError(
            "a function of a size argument is not differentiated in buckets",
            "open an axis of an array in its place, or make an executor of its gradient",
        )
    if program.jaxpr.effects:
        return MaskingError(
            "a derivative in buckets would run the function's effects (io_callback, debug.print) "
            "once more",
            "make an executor of the gradient",
        )
    return None


def _frames_inside() -> int:
    """How many frames up from the caller the first one is that is the user's."""
    depth = 1
    while sys._getframe(depth).f_globals.get("__name__", "").startswith(("bucketjit.", "jax.")):
        depth += 1
    return depth
