"""`BucketedExec`: the builders and the call path."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from bucketjit import _jax, strategies
from bucketjit._axes import Anonymous, entries_of_arguments, leaf_entries
from bucketjit._cache import CacheInfo, ExecutableCache
from bucketjit._dims import variables_of
from bucketjit._errors import (
    ArgumentError,
    FallbackError,
    FallbackWarning,
    MaskingError,
    SpecError,
    StrategyContractError,
)
from bucketjit._executable import (
    Executable,
    SignatureChanged,
    build_exact,
    build_masked,
    padded_leaf_shapes,
)
from bucketjit._family import Call, Family
from bucketjit._padding import pad
from bucketjit._route import Route, make_route
from bucketjit._rule import Rule
from bucketjit._signature import LeafType, Parameters, Statics, leaf_type
from bucketjit._stats import BucketStats, Counters, Stats
from bucketjit._trace import Program, parse_constraint
from bucketjit.rules import default_rules
from bucketjit.strategies.base import Strategy, checked_bucket

DEFAULT_MAXSIZE = 128
_MAX_ROUTES = 16


class Fallback(enum.Enum):
    """What to do with a call that cannot be masked.

    Attributes:
        EXACT: Run it at its exact shape, warn once per reason, and count it.
        ERROR: Raise `FallbackError` with the reason.
    """

    EXACT = "exact"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class _Config:
    fn: Callable[..., Any]
    dynamic_axes: Any = None
    constraints: tuple[str, ...] = ()
    static_argnums: Any = ()
    static_argnames: Any = ()
    donate_argnums: Any = ()
    fallback: Fallback = Fallback.EXACT
    default: Strategy = dataclasses.field(default_factory=strategies.Exact)
    per_dim: Mapping[str, Strategy] = dataclasses.field(default_factory=dict)
    rules: Mapping[Any, Rule] = dataclasses.field(default_factory=dict)
    maxsize: int | None = DEFAULT_MAXSIZE


class BucketedExec:
    """A function compiled once per bucket of sizes, with the results of the unpadded one.

    The function is traced once with symbolic sizes. Each call rounds its sizes up to a bucket,
    pads the arguments, and runs the bucket's executable, in which padding is masked out. The
    masks are derived from the traced program, so the function needs none. A call that cannot
    be masked runs at its exact shape and says why (see `Fallback`).

    Without a strategy every size gets its own executable; add one with `with_pow2` and the
    like. Executors are immutable: every ``with_...`` returns a new one with an empty cache.
    Calling one from several threads is safe. Called inside ``jax.jit``, ``jax.grad`` and other
    transformations, the function itself is inlined.

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
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        donate_argnums: int | Sequence[int] = (),
        fallback: Fallback = Fallback.EXACT,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        if not isinstance(fallback, Fallback):
            raise SpecError(f"fallback must be Fallback.EXACT or Fallback.ERROR, got {fallback!r}")
        if isinstance(constraints, str):
            constraints = (constraints,)
        for text in constraints:
            try:
                parse_constraint(text)
            except (ValueError, SyntaxError) as error:
                raise SpecError(f"constraints: {error}") from error
        self._setup(
            _Config(
                fn,
                dynamic_axes,
                tuple(constraints),
                static_argnums,
                static_argnames,
                donate_argnums,
                fallback,
            )
        )

    def _setup(self, config: _Config) -> None:
        self._config = config
        self._parameters = Parameters(
            config.fn, config.static_argnums, config.static_argnames, config.donate_argnums
        )
        self._cache: ExecutableCache[Any, Executable] = ExecutableCache(config.maxsize)
        self._counters = Counters()
        self._families: dict[Any, Family] = {}
        self._refused: dict[Program, MaskingError] = {}
        self._lock = threading.RLock()
        self._rules: Mapping[Any, Rule] | None = None
        self._routes: list[Route] = []
        functools.update_wrapper(self, config.fn)

    def _with(self, **changes: Any) -> BucketedExec:
        new = object.__new__(type(self))
        new._setup(dataclasses.replace(self._config, **changes))
        return new

    # --- builders ---

    def with_strategy(self, strategy: Strategy, dim: str | None = None) -> BucketedExec:
        """Round sizes up with a strategy of your own.

        Args:
            strategy: Any object with ``bucket(n: int) -> int``.
            dim: The dimension variable it is for; all that have none of their own by default.

        Returns:
            A new executor.

        Raises:
            StrategyContractError: It has no ``bucket`` method, or is a class.
        """
        if isinstance(strategy, type) or not callable(getattr(strategy, "bucket", None)):
            raise StrategyContractError(
                f"a strategy is an object with a method bucket(n) -> int, got {strategy!r}"
            )
        if dim is None:
            return self._with(default=strategy)
        if not isinstance(dim, str):
            raise SpecError(f"dim must be the name of a dimension variable, got {dim!r}")
        return self._with(per_dim=MappingProxyType({**self._config.per_dim, dim: strategy}))

    def with_pow2(
        self, dim: str | None = None, *, min: int = 1, max: int | None = None, multiple_of: int = 1
    ) -> BucketedExec:
        """Round sizes up to powers of two.

        Args:
            dim: The dimension variable; all that have no strategy of their own by default.
            min: The smallest bucket. A floor pays: it saves compiles at almost no padding.
            max: The largest bucket; beyond it `BucketOverflowError`.
            multiple_of: Buckets are rounded up to a multiple of this.

        Returns:
            A new executor.
        """
        return self.with_strategy(strategies.Pow2(min=min, max=max, multiple_of=multiple_of), dim)

    def with_linear(
        self,
        step: int,
        dim: str | None = None,
        *,
        min: int = 1,
        max: int | None = None,
        multiple_of: int = 1,
    ) -> BucketedExec:
        """Round sizes up to multiples of ``step``; otherwise like `with_pow2`."""
        return self.with_strategy(
            strategies.Linear(step, min=min, max=max, multiple_of=multiple_of), dim
        )

    def with_exponential(
        self,
        base: float,
        dim: str | None = None,
        *,
        min: int = 1,
        max: int | None = None,
        multiple_of: int = 1,
    ) -> BucketedExec:
        """Round sizes up to powers of ``base``; otherwise like `with_pow2`."""
        return self.with_strategy(
            strategies.Exponential(base, min=min, max=max, multiple_of=multiple_of), dim
        )

    def with_buckets(self, buckets: Sequence[int], dim: str | None = None) -> BucketedExec:
        """Use these sizes as buckets, and no others; otherwise like `with_pow2`."""
        return self.with_strategy(strategies.Boundaries(buckets), dim)

    def with_exact(self, dim: str | None = None) -> BucketedExec:
        """Give every size its own executable; otherwise like `with_pow2`."""
        return self.with_strategy(strategies.Exact(), dim)

    def with_dynamic_axes(self, spec: Any) -> BucketedExec:
        """Declare the open axes; see ``dynamic_axes`` of the class."""
        return self._with(dynamic_axes=spec)

    def with_rules(self, rules: Mapping[Any, Rule]) -> BucketedExec:
        """Add masking rules, or replace some.

        Args:
            rules: Primitive to ``rule(ctx, *operands)``, see `RuleContext`.

        Returns:
            A new executor.

        Examples:
            >>> from jax import lax
            >>> import numpy as np
            >>> def product(ctx, operand):
            ...     return ctx.bind(ctx.fill(operand, axes=ctx.params["axes"], value=1))
            >>> total = BucketedExec(lambda x: x.prod()).with_pow2()
            >>> total = total.with_rules({lax.reduce_prod_p: product})
            >>> float(total(np.full(3, 2.0, np.float32)))
            8.0
        """
        return self._with(rules=MappingProxyType({**self._config.rules, **rules}))

    def with_maxsize(self, maxsize: int | None) -> BucketedExec:
        """Bound the number of executables kept; the least recently used goes first.

        Args:
            maxsize: How many; None for no bound. An executable takes 73-145 memory maps of the
                system's 65,530, so some 450 of them end the process.

        Returns:
            A new executor.
        """
        if maxsize is not None and (not isinstance(maxsize, int) or maxsize < 1):
            raise SpecError(f"maxsize must be a positive int or None, got {maxsize!r}")
        return self._with(maxsize=maxsize)

    # --- the call path ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; see the class."""
        if not _jax.at_top_level() or jax.config.jax_disable_jit:
            return self._config.fn(*args, **kwargs)
        if not kwargs:
            for route in self._routes:
                if (sizes := route.sizes(args)) is not None and sizes in route.memo:
                    key, vector = route.memo[sizes]
                    entry = self._cache.get(key)
                    if entry is None:
                        break
                    try:
                        return self._run_route(route, entry, sizes, vector, args)
                    except SignatureChanged:
                        break
        return self._call_slowly(args, kwargs)

    def _run_route(
        self, route: Route, entry: Executable, sizes: tuple[int, ...], vector: Any, args: Any
    ) -> Any:
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
        result = entry.run(sizes, vector, values)
        entry.hits += 1
        self._counters.call(real, total)
        return result

    def _call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dynamic, keywords, statics = self._parameters.split(args, kwargs)
        leaves, tree = jax.tree_util.tree_flatten((dynamic, keywords))
        types, shapes = self._types(leaves, dynamic, keywords)
        family = self._family(tree, types, statics, dynamic, keywords)
        shapes = [
            (int(x),) if t.dtype is None else s
            for x, s, t in zip(leaves, shapes, family.types, strict=True)
        ]
        donate = self._donated(len(args))
        if self._always_exact(family):
            return self._run_exact(family, {}, shapes, donate, leaves, tree)
        with self._lock:
            call = family.resolve(shapes)
        if call.program is None:
            return self._without_program(family, call, shapes, donate, leaves, tree)
        call.program.check_reshapes(call.sizes)
        result = self._run_masked(family, call, shapes, donate, leaves, tree)
        if not kwargs and call.program not in self._refused:
            self._add_route(family, call, args, statics)
        return result

    def _add_route(self, family: Family, call: Call, args: Any, statics: Statics) -> None:
        """Let the next call like this one skip the slow path."""
        assert call.program is not None
        key = (call.program, tuple(self._bucket(call.program, call.sizes).values()))
        for route in self._routes:
            if route.family is family and route.sizes(args) is not None:
                break
        else:
            made = make_route(
                family, call.tokens, args, self._parameters.dynamic_positions(len(args)), statics
            )
            if made is None:
                return
            route = made
            self._routes = [route, *self._routes][:_MAX_ROUTES]
        route.remember(call.sizes, key)

    def _types(
        self, leaves: Sequence[Any], args: Any, kwargs: Any
    ) -> tuple[tuple[LeafType, ...], list[tuple[int, ...]]]:
        try:
            pairs = [leaf_type(x, "") for x in leaves]
        except ArgumentError:
            for path, x in self._paths(args, kwargs):
                leaf_type(x, path)
            raise
        return tuple(t for t, _ in pairs), [s for _, s in pairs]

    def _paths(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        positions = self._parameters.dynamic_positions(
            len(args) + len(self._parameters.static_nums)
        )
        named = [(self._parameters.name(i), a) for i, a in zip(positions, args, strict=False)]
        named += [(k, kwargs[k]) for k in sorted(kwargs)]
        return [
            (name + jax.tree_util.keystr(keys), leaf)
            for name, value in named
            for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
        ]

    def _family(
        self, tree: Any, types: tuple[LeafType, ...], statics: Statics, args: Any, kwargs: Any
    ) -> Family:
        key = (tree, types, statics, _jax.trace_context())
        family = self._families.get(key)
        if family is None:
            with self._lock:
                family = self._families.get(key)
                if family is None:
                    family = self._new_family(tree, types, statics, args, kwargs)
                    self._families[key] = family
        return family

    def _new_family(
        self, tree: Any, types: tuple[LeafType, ...], statics: Statics, args: Any, kwargs: Any
    ) -> Family:
        paths = self._paths(args, kwargs)
        specs = self._leaf_specs(args, kwargs)
        for name in self._config.per_dim:
            self._check_known(name, [s for s, _ in specs])
        final = []
        for kind, (spec, _), (path, value) in zip(types, specs, paths, strict=True):
            if isinstance(spec, str) and isinstance(value, int | np.integer):
                if isinstance(value, bool):
                    raise ArgumentError(f"{path}: a size must be an int, got a bool")
                kind = LeafType(None, True, 1)
            final.append(kind)
        return Family(
            statics.bind(self._config.fn),
            tree,
            final,
            [path for path, _ in paths],
            [spec for spec, _ in specs],
            self._config.constraints,
        )

    def _leaf_specs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        parameters = self._parameters
        spec = self._config.dynamic_axes
        if spec is None:
            by_position = [_default_entry(a) for a in args]
            by_name = {k: _default_entry(v) for k, v in kwargs.items()}
            positions = list(range(len(args)))
        else:
            total = len(args) + len(parameters.static_nums)
            positions = parameters.dynamic_positions(total)[: len(args)]
            count = (positions[-1] + 1) if positions else 0
            entries, by_name = entries_of_arguments(
                spec, max(count, len(args)), parameters.names(count), list(kwargs)
            )
            by_position = [entries[i] for i in positions]
        names = [parameters.name(i) for i in positions]
        found: list[Any] = []
        for name, entry, value in zip(names, by_position, args, strict=True):
            found += leaf_entries(entry, value, name)
        for name in sorted(kwargs):
            found += leaf_entries(by_name.get(name), kwargs[name], name)
        return found

    def _check_known(self, dim: str, specs: Sequence[Any]) -> None:
        if any(isinstance(s, Anonymous) for s in specs):
            return
        texts = [s for s in specs if isinstance(s, str)]
        texts += [n for s in specs if isinstance(s, tuple) for n in s if isinstance(n, str)]
        if not any(dim in t for t in texts):
            raise SpecError(
                f"there is a strategy for dimension {dim!r}, but dynamic_axes "
                f"{self._config.dynamic_axes!r} has no such variable"
            )

    def _donated(self, count: int) -> list[int]:
        donated = self._parameters.donated
        positions = self._parameters.dynamic_positions(count)
        return [new for new, old in enumerate(positions) if old in donated]

    def _strategy(self, dim: str) -> Strategy:
        return self._config.per_dim.get(dim, self._config.default)

    def _always_exact(self, family: Family) -> bool:
        config = self._config
        return isinstance(config.default, strategies.Exact) and all(
            isinstance(s, strategies.Exact) for s in config.per_dim.values()
        )

    def _bucket(self, program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
        bucket = {v: checked_bucket(self._strategy(v), v, n) for v, n in sizes.items()}
        if program.fits(bucket):
            return bucket
        # The largest sizes up to the bucket that satisfy the guards: one for all its sizes.
        for variable, size in sizes.items():
            trial = dict(bucket)
            for n in range(bucket[variable], size - 1, -1):
                trial[variable] = n
                if program.fits(trial):
                    return trial
        return dict(sizes)

    def _run_masked(
        self,
        family: Family,
        call: Call,
        shapes: Sequence[tuple[int, ...]],
        donate: Sequence[int],
        leaves: list[Any],
        tree: Any,
    ) -> Any:
        program = call.program
        assert program is not None
        if (refusal := self._refused.get(program)) is not None:
            return self._fall_back(refusal, family, call, shapes, donate, leaves, tree)
        bucket = self._bucket(program, call.sizes)
        pads = padded_leaf_shapes(call, family, bucket, shapes)
        key = (program, tuple(bucket.values()))

        def build() -> Executable:
            args, kwargs = tree.unflatten(_padded(leaves, pads))
            return build_masked(
                family, call, bucket, pads, self._rule_table(), donate, args, kwargs
            )

        try:
            entry = self._get(key, build)
        except MaskingError as refusal:
            self._refused[program] = refusal
            return self._fall_back(refusal, family, call, shapes, donate, leaves, tree)
        padded = list(leaves)
        real, total = entry.pad_leaves(padded)
        args, kwargs = tree.unflatten(padded)
        ordered = [call.sizes[v] for v in entry.variables]
        result = entry.run(ordered, np.array(ordered, np.int32), args, kwargs)
        self._counters.call(real, total)
        return result

    def _get(self, key: Any, build: Callable[[], Executable]) -> Executable:
        entry = self._cache.get(key)
        if entry is not None:
            entry.hits += 1
            return entry

        def counted() -> Executable:
            built = build()
            self._counters.compile(built.compile_seconds)
            return built

        return self._cache.get_or_compile(key, counted)

    def _without_program(
        self,
        family: Family,
        call: Call,
        shapes: Sequence[tuple[int, ...]],
        donate: Sequence[int],
        leaves: list[Any],
        tree: Any,
    ) -> Any:
        if call.refusal is None:
            return self._run_exact(family, call.sizes, shapes, donate, leaves, tree)
        result = self._fall_back(call.refusal, family, call, shapes, donate, leaves, tree)
        with self._lock:
            family.remember_refusal(call, shapes)
        return result

    def _fall_back(
        self,
        refusal: MaskingError,
        family: Family,
        call: Call,
        shapes: Sequence[tuple[int, ...]],
        donate: Sequence[int],
        leaves: list[Any],
        tree: Any,
    ) -> Any:
        if self._config.fallback is Fallback.ERROR:
            raise FallbackError(refusal.reason, refusal.remedy) from refusal
        result = self._run_exact(family, call.sizes, shapes, donate, leaves, tree)
        if self._counters.fallback(refusal.reason):
            name = getattr(self._config.fn, "__name__", "the function")
            warnings.warn(
                f"{name} runs at its exact shapes, one compile each: {refusal}",
                FallbackWarning,
                stacklevel=4,
            )
        return result

    def _run_exact(
        self,
        family: Family,
        sizes: Mapping[str, int],
        shapes: Sequence[tuple[int, ...]],
        donate: Sequence[int],
        leaves: list[Any],
        tree: Any,
    ) -> Any:
        args, kwargs = tree.unflatten(leaves)
        key = (family, tuple(shapes))
        shown = sizes or {f"{p}[{i}]": n for p, s in zip(family.paths, shapes, strict=True) for i, n in enumerate(s)}
        entry = self._get(key, lambda: build_exact(family, shown, shapes, donate, args, kwargs))
        result = entry.run((), None, args, kwargs)
        self._counters.call(0, 0)
        return result

    def _rule_table(self) -> Mapping[Any, Rule]:
        if self._rules is None:
            self._rules = {**default_rules(), **self._config.rules}
        return self._rules

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
            self._families.clear()
            self._routes = []
            self._refused.clear()
            self._counters.clear()

    def stats(self) -> Stats:
        """A snapshot of what this executor has done; see `Stats`."""
        info = self._cache.info()
        buckets = tuple(
            BucketStats(MappingProxyType(dict(e.sizes)), e.hits, e.compile_seconds, e.exact)
            for _, e in self._cache.items()
        )
        return self._counters.snapshot(info.hits, info.misses, self._cache.evictions, buckets)

    def __repr__(self) -> str:
        config = self._config
        parts = [repr(config.default), *(f"{d}: {s!r}" for d, s in config.per_dim.items())]
        name = getattr(config.fn, "__qualname__", repr(config.fn))
        return f"<BucketedExec {name}, {', '.join(parts)}, {self.cache_size()} executables>"


def _default_entry(value: Any) -> Any:
    """Axis 0 of an argument that is an array with axes; containers and scalars are static."""
    if isinstance(value, jax.Array | np.ndarray) and value.ndim > 0:
        return Anonymous((0,))
    return None


def _padded(leaves: Sequence[Any], pads: Sequence[tuple[int, tuple[int, ...]]]) -> list[Any]:
    padded = list(leaves)
    for i, shape in pads:
        padded[i] = pad(padded[i], shape)
    return padded
