"""The options of `BucketedExec` and of `jit`, which take the same ones: their types and checks."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

from bucketjit import strategies
from bucketjit._config import (
    DEFAULT_MAXSIZE,
    NOT_CHOSEN,
    Check,
    CompileBudget,
    Config,
    Fallback,
    Out,
    Overflow,
    checked_count,
    checked_options,
    is_positive_int,
)
from bucketjit._ir.guards import parse_constraint
from bucketjit._tracing.parameters import positions_of
from bucketjit.errors import SpecError, StrategyContractError
from bucketjit.strategies.base import Strategy

DynamicAxes: TypeAlias = "str | int | None | Sequence[DynamicAxes] | Mapping[Any, DynamicAxes]"
"""What ``dynamic_axes`` takes; see `BucketedExec`. (Pytrees of your own classes work as well.)"""

Buckets: TypeAlias = Literal["pow2", "exact"] | Sequence[int] | Strategy
"""The buckets of a dimension variable: a name, the sizes, or a strategy."""

FallbackName: TypeAlias = Literal["exact", "error"]
CheckName: TypeAlias = Literal["off", "poison", "exact", "exact always"]
OverflowName: TypeAlias = Literal["error", "extend", "exact"]
OutName: TypeAlias = Literal["jax", "numpy", "padded"]


class Options(TypedDict, total=False):
    """The keyword arguments of `jit`, for type checkers."""

    dynamic_axes: DynamicAxes
    buckets: Buckets | Mapping[str, Buckets] | None
    overflow: Overflow | OverflowName | Mapping[str, Overflow | OverflowName]
    constraints: str | Sequence[str]
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    fallback: Fallback | FallbackName
    check: Check | CheckName
    out: OutName
    copy_inputs: bool
    maxsize: int | None
    compile_budget: CompileBudget | int | None
    compiler_options: Mapping[str, Any] | None
    warn_after: int | None
    in_shardings: None
    out_shardings: None


DEFAULTS: Options = {
    "dynamic_axes": None,
    "buckets": None,
    "overflow": "error",
    "constraints": (),
    "static_argnums": None,
    "static_argnames": None,
    "donate_argnums": None,
    "donate_argnames": None,
    "fallback": "exact",
    "check": "off",
    "out": "jax",
    "copy_inputs": False,
    "maxsize": DEFAULT_MAXSIZE,
    "compile_budget": None,
    "compiler_options": None,
    "warn_after": None,
    "in_shardings": None,
    "out_shardings": None,
}


_NAMED: Mapping[str, Callable[[], Strategy]] = {
    "pow2": strategies.Pow2,
    "exact": strategies.Exact,
}

_SHARDINGS = {
    "in_shardings": "place the arguments before the call, by jax.device_put(x, sharding): a call "
    "keeps the shardings of its arguments",
    "out_shardings": "call jax.lax.with_sharding_constraint on the results in the function",
}

E = TypeVar("E", bound=enum.Enum)


def config_of(fn: Callable[..., Any], given: Options) -> Config:
    """Check the options of a bucketed function."""
    if unknown := given.keys() - DEFAULTS.keys():
        raise TypeError(f"there is no option {min(unknown)!r}; there are {', '.join(DEFAULTS)}")
    options: Any = {**DEFAULTS, **given}
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")
    for name, instead in _SHARDINGS.items():
        if options[name] is not None:
            raise SpecError(f"{name} is not an option of bucketjit; {instead}")
    if not isinstance(options["copy_inputs"], bool):
        raise SpecError(f"copy_inputs must be True or False, got {options['copy_inputs']!r}")
    budget = options["compile_budget"]
    default, per_dim = _strategies(options["buckets"])
    overflow, overflow_per_dim = _policies(options["overflow"])
    return Config(
        fn,
        options["dynamic_axes"],
        _constraints(options["constraints"]),
        options["static_argnums"],
        options["static_argnames"],
        _donated(fn, options),
        member(Fallback, "fallback", options["fallback"]),
        member(Check, "check", options["check"]),
        member(Out, "out", options["out"]),
        options["copy_inputs"],
        default=default,
        per_dim=per_dim,
        overflow=overflow,
        overflow_per_dim=overflow_per_dim,
        maxsize=bound("maxsize", options["maxsize"]),
        budget=budget if isinstance(budget, CompileBudget) else CompileBudget(budget),
        compiler_options=checked_options(options["compiler_options"]),
        warn_after=checked_count(options["warn_after"]),
    )


def member(kind: type[E], name: str, given: object) -> E:
    """The member of an enum that an option names."""
    try:
        return kind(given)
    except ValueError:
        choices = ", ".join(repr(each.value) for each in kind)
        raise SpecError(f"{name} must be one of {choices}, got {given!r}") from None


def strategy_of(buckets: object) -> Strategy:
    """The strategy that one entry of ``buckets`` describes."""
    if isinstance(buckets, str):
        if buckets not in _NAMED:
            raise SpecError(
                f"buckets={buckets!r}: expected one of {sorted(_NAMED)}, a list of sizes, a "
                "strategy such as bucketjit.strategies.Linear(32), or a dict of these by dimension"
            )
        return _NAMED[buckets]()
    if isinstance(buckets, list | tuple | range):
        return strategies.Boundaries(buckets)
    return checked_strategy(buckets)


def checked_strategy(given: object) -> Strategy:
    """A strategy, checked to have the method of one."""
    if isinstance(given, type) or not callable(getattr(given, "bucket", None)):
        raise StrategyContractError(
            f"a strategy is an object with a method bucket(n) -> int, got {given!r}"
        )
    return given  # type: ignore[return-value]  # a class of the user's own


def bound(name: str, given: Any) -> int | None:
    """Check the bound of a cache."""
    if given is None:
        return None
    if not is_positive_int(given):
        raise SpecError(f"{name} must be a positive int or None, got {given!r}")
    return int(given)


def checked_dim(dim: object) -> str:
    """The name of a dimension variable, checked to be text."""
    if not isinstance(dim, str):
        raise SpecError(f"dim must be the name of a dimension variable, got {dim!r}")
    return dim


def _strategies(buckets: object) -> tuple[Strategy, Mapping[str, Strategy]]:
    """The strategy of all variables, and those of single ones."""
    if buckets is None:
        return NOT_CHOSEN, MappingProxyType({})
    if not isinstance(buckets, Mapping):
        return strategy_of(buckets), MappingProxyType({})
    per_dim = {checked_dim(dim): strategy_of(each) for dim, each in buckets.items()}
    return NOT_CHOSEN, MappingProxyType(per_dim)


def overflow_policy(name: str, given: object) -> Overflow:
    """The overflow policy that an option names; see `member`."""
    if isinstance(given, str) and given == "split":
        raise SpecError(
            f"{name} cannot be 'split'; use the method map, which runs rows in batches, or 'extend'"
        )
    return member(Overflow, name, given)


def _policies(overflow: object) -> tuple[Overflow, Mapping[str, Overflow]]:
    """The overflow policy of all variables, and those of single ones."""
    if not isinstance(overflow, Mapping):
        return overflow_policy("overflow", overflow), MappingProxyType({})
    per_dim = {
        checked_dim(dim): overflow_policy(f"overflow[{dim!r}]", each)
        for dim, each in overflow.items()
    }
    return Overflow.ERROR, MappingProxyType(per_dim)


def _donated(fn: Callable[..., Any], options: Options) -> Any:
    """The positions of donated arguments, those by name included."""
    given, names = options["donate_argnums"], options["donate_argnames"]
    named = positions_of(fn, names, "donate_argnames")
    if not named:
        return given
    by_number = tuple(given) if isinstance(given, Iterable) else () if given is None else (given,)
    return (*by_number, *named)


def _constraints(given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Iterable):
        raise SpecError(f"constraints must be a list such as ['s >= 4'], got {given!r}")
    texts = tuple(texts)
    for text in texts:
        if not isinstance(text, str):
            raise SpecError(f"constraints: expected text such as 's >= 4', got {text!r}")
        try:
            parse_constraint(text)
        except (ValueError, SyntaxError) as error:
            raise SpecError(f"constraints: {error}") from error
    return texts
