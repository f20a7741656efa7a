"""The configuration of a bucketed function: one frozen record, and the enums of its options.

`bucketjit._api` makes it from what the user chose, and all other packages read it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bucketjit import strategies
from bucketjit._events import Listener
from bucketjit.errors import SpecError
from bucketjit.strategies.base import Strategy

DEFAULT_MAXSIZE = 128  # executables in the cache of a bucketed function


class Check(enum.Enum):
    """How much of each call to check.

    Attributes:
        OFF: Nothing.
        POISON: Every masked call runs twice, with two different poisons in all padding. The results
            must be equal to the bit.
        EXACT: The first call of each bucket also runs unpadded. The results must agree within the
            rounding of their dtype: 4e-4 of a value and of the largest of its output in float32,
            0.5 % in float16, 4 % in bfloat16. If they do not, the function runs once more, one
            operation at a time. If these results agree with the bucket, ``jax.jit`` is wrong: that
            is logged, and not raised.
        EXACT_ALWAYS: As EXACT, for every masked call.
    """

    OFF = "off"
    POISON = "poison"
    EXACT = "exact"
    EXACT_ALWAYS = "exact always"


class Out(enum.Enum):
    """The form in which a bucketed function returns its results.

    Attributes:
        JAX: ``jax.Array`` of logical shape. A result with open axes is cut in host memory, so the
            call waits for it.
        NUMPY: ``numpy.ndarray`` of logical shape, a read-only view where that saves a copy. The
            call waits for every result. (Typed random keys remain ``jax.Array``.)
        PADDED: `Padded` for a result with open axes, ``jax.Array`` for any other. The call waits
            for nothing.
    """

    JAX = "jax"
    NUMPY = "numpy"
    PADDED = "padded"


class Fallback(enum.Enum):
    """What to do with a call that cannot be masked.

    Attributes:
        EXACT: Run it at its exact shape, warn once per reason, and count it.
        ERROR: Raise `FallbackError` with the reason.
    """

    EXACT = "exact"
    ERROR = "error"


class Overflow(enum.Enum):
    """What to do with a size beyond the largest bucket of its variable.

    Attributes:
        ERROR: Raise `BucketOverflowError`.
        EXTEND: Continue the strategy's rule beyond its largest bucket, if it has one. Otherwise use
            twice the largest bucket, four times, and so on.
        EXACT: Give that variable its exact size in this call, which costs a compile for each such
            size. The call is counted in ``stats().fallback_calls``, without a warning.
    """

    ERROR = "error"
    EXTEND = "extend"
    EXACT = "exact"


@dataclasses.dataclass(frozen=True)
class CompileBudget:
    """How much compiling a bucketed function may do; executables loaded from files do not count.

    Attributes:
        compiles: The most compiles; None for no limit.
        seconds: The most seconds spent compiling; None for no limit. A compile that has begun is
            not cut short.
        action: What happens beyond a limit to a call that waits for a compile: ``"error"`` raises
            `CompileBudgetError`, ``"warn"`` compiles and warns. A compile that no call waits for,
            in the background or ahead of calls, is skipped beyond a limit.

    Raises:
        SpecError: A limit is negative or of another type, or the action is none of the two.
    """

    compiles: int | None = None
    seconds: float | None = None
    action: str = "error"

    def __post_init__(self) -> None:
        limits: tuple[tuple[str, Any, Any, str], ...] = (
            ("compiles", self.compiles, int | np.integer, "a whole number, 0 or more"),
            ("seconds", self.seconds, int | float, "0 or more"),
        )
        for name, limit, kinds, what in limits:
            # A bool is an int to Python. ``not limit >= 0`` refuses NaN, too.
            wrong = isinstance(limit, bool) or not isinstance(limit, kinds | None)
            if wrong or (limit is not None and not limit >= 0):
                raise SpecError(f"compile budget: {name} must be {what}, or None, got {limit!r}")
        if self.action not in ("error", "warn"):
            raise SpecError(
                f"compile budget: action must be 'error' or 'warn', got {self.action!r}"
            )


@dataclasses.dataclass(frozen=True)
class Background:
    """How to compile in the background.

    Attributes:
        workers: Number of threads that compile.
        queue: The most compiles that wait for a thread. If it is full, a later call of the bucket
            asks again.
    """

    workers: int = 1
    queue: int = 64


@dataclasses.dataclass(frozen=True)
class Agreed:
    """How several processes agree on the bucket of a call.

    Attributes:
        timeout: How long a call waits for other processes, in seconds.
        by: ``"kv"`` for the key-value store of ``jax.distributed``, or a function from the bucket
            of this process to that of all processes.
    """

    timeout: float = 60.0
    by: str | Callable[[dict[str, int]], Mapping[str, int]] = "kv"


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The shards of which each call of a process gives its own.

    Attributes:
        mesh: The mesh of devices.
        axis: The axis of the mesh along which the shards are.
    """

    mesh: Any
    axis: str

    @property
    def count(self) -> int:
        return int(self.mesh.shape[self.axis])


@dataclasses.dataclass(frozen=True)
class Persistent:
    """Where executables are kept in files.

    Attributes:
        directory: The directory; None to keep none.
        max_bytes: The most bytes of all files; None for no bound.
    """

    directory: str | None = None
    max_bytes: int | None = None


def checked_options(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Check options of XLA, and copy them to a dict as ``jit`` takes it."""
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise SpecError(
            "compiler_options must be a dict such as {'xla_backend_optimization_level': 1}, got "
            f"{options!r}"
        )
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, bool | int | float | str | bytes):
            raise SpecError(
                f"compiler_options[{name!r}] must be a bool, a number or text by the name of an "
                f"option, got {value!r}"
            )
    return dict(options)


def is_int_from(value: Any, least: int) -> bool:
    """Whether ``value`` is an int of Python or NumPy, no bool, of at least ``least``."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_int and bool(value >= least)


def checked_count(warn_after: object) -> int | None:
    """Check ``warn_after``, and return it."""
    if warn_after is None or is_int_from(warn_after, 0):
        return None if warn_after is None else int(warn_after)  # type: ignore[call-overload]
    raise SpecError(
        "warn_after must be a number of executables, 0 for no warning, or None for 18 above the "
        f"number of buckets; got {warn_after!r}"
    )


NOT_CHOSEN = strategies.Exact()  # another one than any that the user gives


@dataclasses.dataclass(frozen=True)
class Config:
    """What a bucketed function is configured with; `BucketedExec` and its methods describe it.

    Attributes:
        fn: The user's function.
        dynamic_axes: Its open axes, as the user wrote them.
        constraints: Comparisons of sizes that hold in every call.
        static_argnums: Positions of static arguments, as for ``jax.jit``.
        static_argnames: Names of static arguments.
        donate_argnums: Positions of donated arguments.
        fallback: What to do with a call that cannot be masked.
        check: How much of each call to check.
        out: The form of the results.
        copy_inputs: Whether NumPy arguments are copied before the call.
        default: The strategy of variables that are not in ``per_dim``.
        per_dim: Strategies by variable.
        rules: The user's masking rules by primitive.
        maxsize: The most executables in the cache; None for no bound.
        max_bytes: The most bytes of executables in the cache; None for no bound.
        budget: How much may be compiled.
        background: How to compile in the background; None not to.
        ahead: How many threads compile all listed buckets with the first call, 0 for as many as
            there are cores, up to four; None not to.
        listeners: Functions that get each event.
        overflow: What to do with sizes beyond the largest bucket.
        overflow_per_dim: The same by variable, where it differs.
        persistence: Where executables are kept in files.
        compiler_options: Options of XLA.
        warn_after: How many executables are compiled before a warning; None for 18 above the number
            of buckets, 0 for no warning.
        agreed: How several processes agree on buckets; None if they do not.
        sharded: The shards that calls give the rows of; None if the function is not one of a shard.
        in_shardings: Where the arguments are put, as for ``jax.jit``.
        out_shardings: Where the results are, as for ``jax.jit``.
    """

    fn: Callable[..., Any]
    dynamic_axes: Any = None
    constraints: tuple[str, ...] = ()
    static_argnums: Any = ()
    static_argnames: Any = ()
    donate_argnums: Any = ()
    fallback: Fallback = Fallback.EXACT
    check: Check = Check.OFF
    out: Out = Out.JAX
    copy_inputs: bool = False
    default: Strategy = NOT_CHOSEN
    per_dim: Mapping[str, Strategy] = dataclasses.field(default_factory=dict)
    rules: Mapping[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    maxsize: int | None = DEFAULT_MAXSIZE
    max_bytes: int | None = None
    budget: CompileBudget = dataclasses.field(default_factory=CompileBudget)
    background: Background | None = None
    ahead: int | None = None
    listeners: tuple[Listener, ...] = ()
    overflow: Overflow = Overflow.ERROR
    overflow_per_dim: Mapping[str, Overflow] = dataclasses.field(default_factory=dict)
    persistence: Persistent | None = None  # None: in JAX's own cache directory, if one is in use
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    warn_after: int | None = None
    agreed: Agreed | None = None
    sharded: Sharded | None = None
    in_shardings: Any = None
    out_shardings: Any = None

    def strategy_of(self, dim: str) -> Strategy:
        return self.per_dim.get(dim, self.default)

    def has_room(self, dim: str) -> bool:
        """Whether arrays of a variable get room for results that calls take again."""
        is_padded = not isinstance(self.strategy_of(dim), strategies.Exact)
        return is_padded and self.out is Out.PADDED and self.sharded is None

    @property
    def shardings(self) -> dict[str, Any]:
        """The options of ``jax.jit`` that place arguments and results, those that the user gave."""
        every = {"in_shardings": self.in_shardings, "out_shardings": self.out_shardings}
        return {name: tree for name, tree in every.items() if tree is not None}

    @property
    def always_exact(self) -> bool:
        """Whether every call runs at its exact shape: no variable has a strategy that pads."""
        every = (self.default, *self.per_dim.values())
        return all(isinstance(s, strategies.Exact) for s in every)

    @property
    def learns(self) -> bool:
        """Whether buckets of some variables are learnt from calls.

        Processes that agree on buckets learn nothing: each sees other calls.
        """
        every = (self.default, *self.per_dim.values())
        is_alone = self.agreed is None and self.sharded is None
        return is_alone and any(isinstance(s, strategies.Auto) for s in every)

    @property
    def has_no_strategy(self) -> bool:
        """Whether the user chose no strategy, not even `Exact`."""
        return self.default is NOT_CHOSEN and not self.per_dim


def check_seconds(what: str, seconds: Any) -> None:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and seconds >= 0):
        raise SpecError(f"{what} must be seconds, or None, got {seconds!r}")
