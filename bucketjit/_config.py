"""Policies and the configuration of an executor."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bucketjit import strategies
from bucketjit._errors import SpecError
from bucketjit._events import Listener
from bucketjit.strategies.base import Strategy

DEFAULT_MAXSIZE = 128


class Check(enum.Enum):
    """How much of each call to check.

    Attributes:
        OFF: Nothing.
        POISON: Every masked call runs twice, with two poisons in all padding; the results must
            be the same.
        EXACT: The first call of each bucket also runs unpadded; the results must agree, within
            the rounding of their dtype: 4e-4 of a value and of the largest of its output in
            float32, 0.5 % in float16, 4 % in bfloat16. Where they do not, and those of one
            operation at a time agree with the bucket, ``jax.jit`` is the one that is wrong: that
            is logged, and not raised.
        EXACT_ALWAYS: Every masked call also runs unpadded.
    """

    OFF = "off"
    POISON = "poison"
    EXACT = "exact"
    EXACT_ALWAYS = "exact always"


class Out(enum.Enum):
    """In which form an executor returns its results.

    Attributes:
        JAX: ``jax.Array`` of logical shape. One with open axes has to be waited for before it
            can be cut, in host memory.
        NUMPY: ``numpy.ndarray`` of logical shape, read-only views where that saves a copy. Waits
            for every result. (Typed random keys remain ``jax.Array``.)
        PADDED: `Padded` for results with open axes, ``jax.Array`` for others; waits for nothing.
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
        EXTEND: Go on by the strategy's rule, where it has one, and else with twice the largest
            bucket, four times and so on; see `strategies.Extended`.
        EXACT: Give that variable its exact size in this call, which costs a compile of its own;
            the call is counted in ``stats().fallback_calls``, without a warning.
        SPLIT: Cut the call into chunks of the largest bucket along that variable, and put their
            results together. Raises `SplitError` unless the program shows that its outputs are
            independent along it.
    """

    ERROR = "error"
    EXTEND = "extend"
    EXACT = "exact"
    SPLIT = "split"


@dataclasses.dataclass(frozen=True)
class CompileBudget:
    """How much compiling an executor may do; what is stored already does not count.

    Attributes:
        compiles: The most compiles; None for no limit.
        seconds: The most seconds spent compiling; a compile that is under way is not cut short.
        action: ``"error"`` raises `CompileBudgetError` for a call that needs one more, ``"warn"``
            compiles and warns. In the background, and of a plan that is compiled ahead of calls,
            nothing is compiled beyond a limit, for no call needs it.

    Raises:
        SpecError: A limit is negative or no such number, or the action is another.
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
        workers: Threads that compile.
        queue: How many executables may wait for one; beyond that, calls ask again later.
        process: Whether another process compiles for CPU, where there can be one.
    """

    workers: int = 1
    queue: int = 64
    process: bool = True


@dataclasses.dataclass(frozen=True)
class AheadOfCalls:
    """Compile every bucket that the strategies list when the first call of a signature comes.

    Attributes:
        workers: Threads that compile; None for as many as there are cores, up to four.
    """

    workers: int | None = None


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
    """Options of XLA as ``jit`` takes them.

    Raises:
        SpecError: They are no dict of names to values. (What XLA knows it says when it compiles.)
    """
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
    """Whether it is an int of at least that, of Python or NumPy."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_int and bool(value >= least)


def is_positive_int(value: object) -> bool:
    """Whether it is an int of at least 1, of Python or NumPy."""
    return is_int_from(value, 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything an executor is configured with; see `BucketedExec`."""

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
    default: Strategy = dataclasses.field(default_factory=strategies.Exact)
    per_dim: Mapping[str, Strategy] = dataclasses.field(default_factory=dict)
    rules: Mapping[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    maxsize: int | None = DEFAULT_MAXSIZE
    max_bytes: int | None = None
    policy: str = "lru"
    hysteresis: int = 0
    budget: CompileBudget = dataclasses.field(default_factory=CompileBudget)
    background: Background | None = None
    ahead: AheadOfCalls | None = None
    listeners: tuple[Listener, ...] = ()
    plan: Any = None
    overflow: Overflow = Overflow.ERROR
    overflow_per_dim: Mapping[str, Overflow] = dataclasses.field(default_factory=dict)
    persistence: Persistent | None = None  # None: in JAX's own cache directory, if it has one
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Variables along which a plan is for chunks that run together, and how many there are.
    chunked: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def strategy_of(self, dim: str) -> Strategy:
        """The strategy of a dimension variable."""
        return self.per_dim.get(dim, self.default)

    @property
    def always_exact(self) -> bool:
        """Whether no variable has a strategy."""
        every = (self.default, *self.per_dim.values())
        return self.plan is None and all(isinstance(s, strategies.Exact) for s in every)

    @property
    def chunks(self) -> float:
        """How many chunks of a call run at the same time, as a rule; 0 if it is for whole calls."""
        counts = [
            count
            for dim, count in self.chunked.items()
            if self.overflow_per_dim.get(dim) is Overflow.SPLIT
        ]
        return math.prod(counts) if counts else 0

    @property
    def planned(self) -> tuple[str, ...]:
        """The dimension variables of the joint plan."""
        return () if self.plan is None else tuple(self.plan.dims)
