"""`BucketedExec`: what users call."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, Self

from bucketjit._api.bucket_builders import Builders
from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import without_padding
from bucketjit._arrays.results import Out
from bucketjit._autodiff.derivatives import Derivatives
from bucketjit._compile.cache import CacheInfo
from bucketjit._compile.executable import SignatureChanged
from bucketjit._compile.provider import CompileGuard
from bucketjit._config import CompileBudget, Config, Fallback, checked_options, is_int_from
from bucketjit._errors import ArgumentError, SpecError
from bucketjit._events import Event
from bucketjit._inspect.explain import Explanation, array_like, explain
from bucketjit._inspect.views import Views
from bucketjit._jax.arrays import NotPlaced
from bucketjit._jax.config import jit_disabled
from bucketjit._jax.transformations import NO_TRACE, THREAD_TRACE, only_differentiated
from bucketjit._masking.checks import Check
from bucketjit._precompile.adaptive import Adapting, adaptive
from bucketjit._precompile.listed_buckets import ahead
from bucketjit._precompile.manifest import Manifest, changes_of, manifest_of
from bucketjit._precompile.report import WarmupReport, none_begun, none_warmed, report_of
from bucketjit._precompile.warmup import check_options, check_seconds, warm_up
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.fast_path.handler import Evicted
from bucketjit._runtime.fast_path.route import Given, Routes
from bucketjit._signature.signer import Signed
from bucketjit._sizes.guards import parse_constraint

_THREAD_TRACE, _NO_TRACE = THREAD_TRACE, NO_TRACE


class BucketedExec(Builders, Views):
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
            Of an argument with open axes the padded copy is donated, where an output can reuse
            it; the argument itself is then deleted, as it is where it needs no padding.
        fallback: What to do with calls that cannot be masked.
        check: Checked execution, for tests; see `Check`.
        out: The form of results: ``"jax"`` for arrays of logical shape, ``"numpy"`` for host
            arrays, ``"padded"`` for `Padded` ones, which the next executor takes as they are.
        copy_inputs: Whether NumPy arguments are copied before the call, so that they may be
            overwritten as soon as it returns. Without it, as in ``jit``, one that fits its bucket,
            or has no open axes, may be read after the call has returned: wait for the result
            before you write to it.
        compile_budget: How much may be compiled: a number of compiles, or a `CompileBudget`.
        compiler_options: Options of XLA by name, as in ``jit``, for everything that is compiled.
            Called in another ``jit``, that one's options hold.

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

        A buffer that is filled anew for each call, before the last result is waited for:

        >>> total = BucketedExec(jnp.sum, copy_inputs=True).with_pow2()
        >>> buffer, totals = np.empty(4, np.float32), []
        >>> for value in (1, 2):
        ...     buffer[:] = value
        ...     totals.append(total(buffer))
        >>> [float(x) for x in totals]
        [4.0, 8.0]
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
        out: str = "jax",
        copy_inputs: bool = False,
        compile_budget: int | CompileBudget | None = None,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        if not isinstance(fallback, Fallback):
            raise SpecError(f"fallback must be Fallback.EXACT or Fallback.ERROR, got {fallback!r}")
        if not isinstance(check, Check):
            raise SpecError(f"check must be a member of bucketjit.Check, got {check!r}")
        if out not in [form.value for form in Out]:
            raise SpecError(f"out must be 'jax', 'numpy' or 'padded', got {out!r}")
        if not isinstance(copy_inputs, bool):
            raise SpecError(f"copy_inputs must be True or False, got {copy_inputs!r}")
        if not isinstance(compile_budget, CompileBudget):
            compile_budget = CompileBudget(compile_budget)
        if isinstance(constraints, str):
            constraints = (constraints,)
        if not isinstance(constraints, Iterable):
            raise SpecError(f"constraints must be a list such as ['s >= 4'], got {constraints!r}")
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
                Out(out),
                copy_inputs,
                budget=compile_budget,
                compiler_options=checked_options(compiler_options),
            )
        )

    def _setup(self, config: Config, kin: Engine | None = None) -> None:
        self._config = config
        self._engine = Engine(config, kin)
        self._routes = self._engine.routes
        self._engine.watcher = adaptive(self._engine)
        self._engine.preparer = ahead(config)
        make = functools.partial(self._of_kin, self._engine)
        self._derivatives = Derivatives(self._engine, make)
        # The attributes of a callable object are its own: it may have one named like one here.
        functools.update_wrapper(self, config.fn, updated=())
        self._of_copies: BucketedExec | None = None
        if config.copy_inputs:
            # It serves the calls, of copies. This one has no routes, so it comes to where they are
            # made, and an executor that makes none does not ask on its warm path.
            twin = object.__new__(type(self))
            vars(twin).update(vars(self))
            self._of_copies, self._routes = twin, Routes()

    def _with(self, **changes: Any) -> Self:
        new = object.__new__(type(self))
        new._setup(dataclasses.replace(self._config, **changes))
        return new

    @classmethod
    def _of_kin(cls, kin: Engine, config: Config) -> tuple[Self, Engine]:
        new = object.__new__(cls)
        new._setup(config, kin)
        return new, new._engine

    def __copy__(self) -> Self:
        return self._with()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._with(fn=copy.deepcopy(self._config.fn, memo))

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be pickled: its executables are those of this process; wrap the "
            "function again where it is needed (with_persistence shares what is compiled)"
        )

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method, where the function is one of a class, as with ``jax.jit``."""
        return self if instance is None else MethodType(self, instance)

    # --- the call path ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; see the class."""
        if _THREAD_TRACE.value not in _NO_TRACE:
            return self._inside(args, kwargs)
        route = self._routes.latest
        while route is not None:
            try:
                plan = route.plans.get(route.key(args, kwargs))
            except TypeError:  # a static argument that cannot be hashed
                break
            while plan is not None:
                try:
                    return plan.serve(args, kwargs)
                except (SignatureChanged, NotPlaced):
                    plan = plan.following
                except Evicted:
                    plan = None
                except Exception:
                    engine = self._engine
                    signed = engine.signer.sign(args, kwargs)  # it may name what is wrong
                    if any(isinstance(x, Padded) for x in signed.leaves):
                        return engine.serve(signed)
                    raise
            route = route.following
        if jit_disabled():
            return self._inside(args, kwargs)
        if self._of_copies is not None:
            args, kwargs = self._engine.signer.with_copies(args, kwargs)
            return self._of_copies(*args, **kwargs)
        signed = self._engine.signer.sign(args, kwargs)
        return self._engine.serve(signed, Given(args, kwargs, self._routes))

    def _inside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call inside a transformation: the function itself, or a derivative in buckets."""
        engine = self._engine
        if self._config.copy_inputs:
            args, kwargs = engine.signer.with_copies(args, kwargs)
        args, kwargs = without_padding((args, dict(kwargs)))
        if only_differentiated() and not jit_disabled() and not engine.always_exact:
            differentiated = self._derivatives.of(args, kwargs)
            if differentiated is not None:
                return differentiated()
        return self._config.fn(*args, **kwargs)

    @property
    def _name(self) -> str:
        return self._engine.name

    # --- the cache ---

    def cache_size(self) -> int:
        """How many executables the cache holds."""
        return len(self._engine.cache)

    def cache_info(self) -> CacheInfo:
        """Hits, misses, bound and size of the cache, as in `functools.lru_cache`."""
        return self._engine.cache.info()

    def cache_clear(self) -> None:
        """Drop every executable and program, and start the counters again."""
        self._derivatives.clear()
        self._engine.clear()

    def pin(self, pinned: bool = True, **sizes: int) -> int:
        """Keep executables in the cache whatever else is compiled; eviction passes them over.

        Args:
            pinned: False to let go of them again.
            **sizes: Padded sizes by dimension variable; all executables of these are meant, and
                without any, all there are.

        Returns:
            How many executables that was.

        Raises:
            SpecError: ``pinned`` is no bool, a size is no int, or no executable has a dimension
                of that name.

        Examples:
            >>> import numpy as np
            >>> double = BucketedExec(lambda x: 2 * x).with_pow2().with_maxsize(2)
            >>> for n in (3, 5):
            ...     _ = double(np.ones(n))
            >>> double.pin(batch=4)
            1
            >>> for n in (9, 17):
            ...     _ = double(np.ones(n))
            >>> [dict(bucket.sizes) for bucket in double.stats().buckets]
            [{'batch': 4}, {'batch': 32}]
        """
        if not isinstance(pinned, bool):
            raise SpecError(
                f"pin: pinned is True or False, got {pinned!r}; sizes go by name: pin(batch=8)"
            )
        for variable, size in sizes.items():
            if not is_int_from(size, 0):
                raise SpecError(f"pin: {variable} must be a padded size, an int, got {size!r}")
        cache = self._engine.cache
        entries = cache.items()
        known = {variable for _, entry in entries for variable in entry.sizes}
        if entries and (unknown := sizes.keys() - known):
            raise SpecError(
                f"pin: no executable has a dimension {min(unknown)!r}, "
                f"they have {', '.join(sorted(known)) or 'none'}"
            )
        meant = [
            key for key, entry in entries if all(entry.sizes.get(v) == n for v, n in sizes.items())
        ]
        return sum(cache.pin(key, pinned) for key in meant)

    def warmup(
        self,
        *args: Any,
        sizes: Any = None,
        workers: int | None = None,
        time_budget: float | None = None,
        progress: bool = True,
        first_run: bool = False,
        **kwargs: Any,
    ) -> WarmupReport:
        """Compile buckets before calls need them, several at the same time.

        Buckets that are compiled already are passed over, so a warm-up that was interrupted, or
        ran out of time, is gone on with by asking again. The largest bucket comes first.

        Where ``dynamic_axes`` are not given, a call with another size along an axis that was taken
        as static opens that axis, and new shapes are then served by buckets of the opened program,
        which are compiled anew: name the axes that vary. With `Check.EXACT`, the exact shapes that
        results are compared with are compiled by the calls.

        Args:
            *args: Arguments like those of the calls to come; ``jax.ShapeDtypeStruct`` will do for
                arrays. Arrays that will be committed to a device should be so here. Or a
                `Manifest` of what another process had compiled, and nothing else; what of it fails
                is reported, and so is what has changed since it was made.
            sizes: Sizes of the calls to come: a dict of a variable to sizes or to a strategy that
                has a largest bucket (`strategies.buckets_of`; one of your own lists its buckets as
                ``boundaries``), of which all combinations are warmed up; a list of dicts of a
                variable to a size; a joint plan; or, of a single variable, its strategy. By default
                the sizes of ``args``. Of more than 4,096 combinations, the smallest and the
                largest size in each bucket stand for those between.
            workers: Threads that compile; by default as many as there are cores, up to four.
            time_budget: Seconds after which no other compile begins.
            progress: Whether to tell how far it is, on standard error: by tqdm in a terminal, if
                it is installed, and by lines elsewhere.
            first_run: Whether to run each executable once, on zeros, as soon as it is compiled.
                On CPU, the first run of one with many matrix multiplications takes longer, by
                45 ms for a 6-layer encoder. Nothing runs that has effects, callbacks or a
                ``while_loop``, takes over 10 GFLOP or 1 GiB, or is for another device than the
                host.
            **kwargs: Keyword arguments like those of the calls to come.

        Returns:
            What was compiled, what was there, what failed and why, and what is left.

        Raises:
            SpecError: ``sizes`` is malformed, or names a dimension that these arguments lack;
                ``workers`` or ``time_budget`` is out of range, or a flag is no bool.
            ArgumentError: The arguments are not such as calls take. What the function itself
                raises of them is reported as failed.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> total = BucketedExec(jnp.sum, dynamic_axes="n").with_pow2()
            >>> like = jax.ShapeDtypeStruct((1,), jnp.float32)
            >>> report = total.warmup(like, sizes={"n": range(1, 65)}, progress=False)
            >>> [bucket["n"] for bucket in report.compiled]
            [64, 32, 16, 8, 4, 2, 1]
            >>> total.warmup(like, sizes=[{"n": 3}, {"n": 5}], progress=False).present
            ({'n': 4}, {'n': 8})
        """
        check_options(workers, time_budget, progress=progress, first_run=first_run)
        how: dict[str, Any] = {"workers": workers, "progress": progress, "first_run": first_run}
        if any(isinstance(x, Manifest) for x in (*args, *kwargs.values())):
            if len(args) != 1 or sizes is not None or kwargs:
                raise SpecError(
                    "warmup: a manifest stands alone; it has its own arguments and sizes"
                )
            return self._warmup_as_in(args[0], time_budget, **how)
        engine = self._engine
        epoch = engine.supply.epoch
        try:
            signed = _sign_like(engine, args, kwargs)
        except ArgumentError as error:
            if len(args) == 1 and isinstance(args[0], str | os.PathLike):
                path = os.fspath(args[0])
                raise ArgumentError(
                    f"{error}; of a manifest in a file, warmup(Manifest.load({path!r}))"
                ) from None
            raise
        warmed = warm_up(engine, signed, sizes, time_budget=time_budget, epoch=epoch, **how)
        return report_of([warmed], engine, epoch)

    def _warmup_as_in(
        self, manifest: Manifest, time_budget: float | None, **how: Any
    ) -> WarmupReport:
        """Warm up what a manifest names; a signature that fails does not lose the others."""
        engine, began = self._engine, time.monotonic()
        epoch = engine.supply.epoch
        stale = manifest.changes()
        if manifest.function != engine.name:
            stale.insert(0, f"it was made for {manifest.function}, this is {engine.name}")
        warmed = []
        for entry in manifest.entries():
            if engine.supply.epoch is not epoch:
                warmed.append(none_begun(entry.sizes))
                continue
            left = None if time_budget is None else time_budget - (time.monotonic() - began)
            try:
                if entry.problem is not None:
                    raise SpecError(entry.problem)
                called, of = engine, entry.derivative
                if of is not None:
                    differentiated = _sign_like(engine, of.args, of.kwargs)
                    called = self._derivatives.engine_at(differentiated, of.path)
                signed = _sign_like(called, entry.args, entry.kwargs)
                sizes = list(entry.sizes) or None
                warmed.append(warm_up(called, signed, sizes, time_budget=left, epoch=epoch, **how))
                stale += changes_of(called, signed, entry.fingerprint)
            except Exception as error:
                warmed.append(none_warmed(entry.sizes, error))
        report = report_of(warmed, engine, epoch, stale, manifest.left_out)
        for why in report.stale:
            engine.tell(Event("stale", engine.name, detail=f"the manifest: {why}"))
        return report

    def forbid_compiles(self) -> CompileGuard:
        """Compile nothing any more: a call that would have to raises `CompileBudgetError`.

        What is kept in files is loaded all the same. Where ``jit`` compiles an executable once
        more by itself, for arguments that are placed otherwise than those before (committed to a
        device, say), that is warned of.

        Returns:
            What allows compiles again: ``with executor.forbid_compiles(): ...`` does at the end
            of the block, and its ``release()`` at any time.

        Examples:
            >>> import numpy as np
            >>> double = BucketedExec(lambda x: 2 * x).with_pow2()
            >>> _ = double(np.ones(3))
            >>> with double.forbid_compiles():
            ...     double(np.ones(5))
            Traceback (most recent call last):
                ...
            bucketjit._errors.CompileBudgetError: <lambda>: a call with batch=5 needs the bucket ...
        """
        return CompileGuard(self._engine.supply)

    def wait_for_compiles(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to compile in the background.

        Args:
            timeout: The most seconds to wait; None for no limit.

        Returns:
            Whether nothing is left.

        Raises:
            SpecError: The timeout is no such number, or negative.
        """
        check_seconds("wait_for_compiles: timeout", timeout)
        engine = self._engine
        deadline = None if timeout is None else time.monotonic() + timeout
        watchers = [relative.watcher for relative in engine.relatives]
        for workers in (
            *(watcher.workers for watcher in watchers if isinstance(watcher, Adapting)),
            engine.supply.workers,
        ):
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if workers is not None and not workers.wait(left):
                return False
        return True

    def manifest(self) -> Manifest:
        """What the cache holds, derivatives included, to be warmed up in another process.

        See `Manifest`.
        """
        return manifest_of(self._engine, self._derivatives.known())

    def save_manifest(self, path: str | os.PathLike[str]) -> None:
        """Write what the cache holds to a file; ``Manifest.load`` reads it.

        Args:
            path: The file, which is replaced as a whole.

        Raises:
            OSError: It cannot be written.
        """
        self.manifest().save(path)

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
        return explain(self._engine, self._engine.signer.sign(given, named))


def _sign_like(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signed:
    """The signature of calls with arguments like these, structs among them."""
    signer = engine.signer
    named = {name: array_like(value) for name, value in kwargs.items()}
    signed = signer.sign(tuple(map(array_like, args)), named)
    # Structs may say more than the arrays that stood for them: where they are placed.
    return dataclasses.replace(signed, leaves=signer.leaves_of(args, kwargs))
