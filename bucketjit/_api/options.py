"""The options of `BucketedExec` and of `jit`: their types, their checks, and their pickles."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import importlib
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from bucketjit import _config, strategies
from bucketjit._ir.guards import parse_constraint
from bucketjit._tracing.parameters import positions_of
from bucketjit.errors import SpecError
from bucketjit.strategies.base import Strategy, checked_sizes, checked_strategy

DynamicAxes: TypeAlias = "str | int | None | Sequence[DynamicAxes] | Mapping[Any, DynamicAxes]"
"""What ``dynamic_axes`` takes; see `BucketedExec`. (Pytrees of your own classes work as well.)"""

Sizes: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
"""Sizes in increasing order."""

StrategyName: TypeAlias = Literal["auto", "pow2", "exact"]
Buckets: TypeAlias = StrategyName | Sizes | Strategy
"""The buckets of a dimension variable: a name, the sizes, or a strategy."""

FallbackName: TypeAlias = Literal["exact", "error"]
CheckName: TypeAlias = Literal["off", "poison", "exact", "exact always"]
OverflowName: TypeAlias = Literal["error", "extend", "exact"]
OutName: TypeAlias = Literal["jax", "numpy", "padded"]


class Options(TypedDict, total=False):
    """The keyword arguments of `jit`, for type checkers."""

    dynamic_axes: DynamicAxes
    buckets: Buckets | Mapping[str, Buckets] | None
    overflow: _config.Overflow | OverflowName | Mapping[str, _config.Overflow | OverflowName]
    constraints: str | Sequence[str]
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    fallback: _config.Fallback | FallbackName
    check: _config.Check | CheckName
    out: OutName
    copy_inputs: bool
    maxsize: int | None
    compile_budget: _config.CompileBudget | int | None
    compiler_options: Mapping[str, Any] | None
    warn_after: int | None
    in_shardings: Any
    out_shardings: Any


_NAMED: Mapping[str, Callable[[], Strategy]] = {
    "auto": strategies.Auto,
    "pow2": strategies.Pow2,
    "exact": strategies.Exact,
}
E = TypeVar("E", bound=enum.Enum)


def config_of(fn: Callable[..., Any], options: Options) -> _config.Config:
    """Check the options of a bucketed function."""
    names = Options.__annotations__
    if unknown := options.keys() - names.keys():
        raise TypeError(f"there is no option {min(unknown)!r}; there are {', '.join(names)}")
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")
    fields: dict[str, Any] = {}
    for name, value in options.items():
        match name:
            case "buckets" if value is None:
                continue
            case "buckets":
                fields |= _by_dim(name, strategy_of, "default", "per_dim", value)
            case "overflow":
                fields |= _by_dim(name, overflow_policy, "overflow", "overflow_per_dim", value)
            case "compile_budget":
                fields["budget"] = budget_of(value)
            case _:
                fields[name] = _CHECKS[name](name, value) if name in _CHECKS else value
    if named := positions_of(fn, fields.pop("donate_argnames", None), "donate_argnames"):
        donated = fields.get("donate_argnums")
        every = donated if isinstance(donated, Iterable) else () if donated is None else (donated,)
        fields["donate_argnums"] = (*every, *named)
    return _config.Config(fn, **fields)


def member(kind: type[E], name: str, value: object) -> E:
    """The member of an enum that an option names."""
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(repr(each.value) for each in kind)
        raise SpecError(f"{name} must be one of {choices}, got {value!r}") from None


def strategy_of(name: str, entry: object) -> Strategy:
    """The strategy that one entry of ``buckets`` describes."""
    if isinstance(entry, str) and not entry.isdecimal():  # a number is shown as a list of sizes
        if entry not in _NAMED:
            close = difflib.get_close_matches(entry.lower(), _NAMED, 1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            others = " or a strategy such as bucketjit.strategies.Linear(32)"
            if name != "strategy":
                others = f", a list of sizes,{others}, or a dict of these by dimension"
            raise SpecError(f"{name}={entry!r}: expected one of {sorted(_NAMED)}{others}{meant}")
        return _NAMED[entry]()
    if isinstance(entry, type) or hasattr(entry, "bucket"):
        return checked_strategy(name, entry)
    return strategies.Boundaries(checked_sizes(name, entry, " a name, a strategy or"))


def positive(name: str, value: Any, besides: str = "") -> int:
    """Check a number of at least 1."""
    if not _config.is_int_from(value, 1):
        raise SpecError(f"{name} must be a positive int{besides}, got {value!r}")
    return int(value)


def bound(name: str, value: Any) -> int | None:
    """Check a number of at least 1, or None."""
    return None if value is None else positive(name, value, " or None")


def flag(name: str, value: object) -> bool:
    """Check a bool."""
    if not isinstance(value, bool):
        raise SpecError(f"{name} must be True or False, got {value!r}")
    return value


def budget_of(budget: Any) -> _config.CompileBudget:
    """A compile budget, or that of so many compiles."""
    return budget if isinstance(budget, _config.CompileBudget) else _config.CompileBudget(budget)


def checked_dim(dim: object, what: str = "dim") -> str:
    """The name of a dimension variable, checked to be text."""
    if not isinstance(dim, str):
        raise SpecError(f"{what} must be the name of a dimension variable, got {dim!r}")
    return dim


def overflow_policy(name: str, policy: object) -> _config.Overflow:
    """The overflow policy that an option names; see `member`."""
    if isinstance(policy, str) and policy == "split":
        raise SpecError(
            f"{name} cannot be 'split'; use the method map, which runs rows in batches, or 'extend'"
        )
    return member(_config.Overflow, name, policy)


def _by_dim(
    option: str, check: Callable[[str, object], Any], field: str, per_dim: str, value: object
) -> dict[str, Any]:
    """An option that is one field for all variables, and another one for single ones, checked."""
    if not isinstance(value, Mapping):
        return {field: check(option, value)}
    entries = {
        checked_dim(dim, f"a key of {option}"): check(f"{option}[{dim!r}]", entry)
        for dim, entry in value.items()
    }
    return {per_dim: MappingProxyType(entries)}


def shardings_tree(name: str, tree: Any) -> Any:
    """Check that the leaves of a tree are shardings, partition specs or None."""
    kinds = (jax.sharding.Sharding, jax.sharding.PartitionSpec)
    for leaf in jax.tree_util.tree_leaves(tree, is_leaf=lambda x: isinstance(x, kinds)):
        if not isinstance(leaf, kinds):
            raise SpecError(
                f"{name} must be shardings, PartitionSpecs under jax.set_mesh, or None, in a tree "
                f"as jax.jit takes it; got {leaf!r}"
            )
    return tuple(tree) if isinstance(tree, list) else tree


def _constraints(constraints: object) -> tuple[str, ...]:
    texts = (constraints,) if isinstance(constraints, str) else constraints
    if not isinstance(texts, Iterable):
        raise SpecError(f"constraints must be a list such as ['s >= 4'], got {constraints!r}")
    texts = tuple(texts)
    for text in texts:
        if not isinstance(text, str):
            raise SpecError(f"constraints: expected text such as 's >= 4', got {text!r}")
        try:
            parse_constraint(text)
        except (ValueError, SyntaxError) as error:
            raise SpecError(f"constraints: {error}") from error
    return texts


# What checks the options that are fields of the configuration as they are, by name and value.
_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "constraints": lambda _, value: _constraints(value),
    "fallback": partial(member, _config.Fallback),
    "check": partial(member, _config.Check),
    "out": partial(member, _config.Out),
    "copy_inputs": flag,
    "maxsize": bound,
    "compiler_options": lambda _, value: _config.checked_options(value),
    "warn_after": lambda _, value: _config.checked_count(value),
    "in_shardings": shardings_tree,
    "out_shardings": shardings_tree,
}


# --- pickles ---


def global_name(value: Any) -> str | None:
    """The name of a value in its module, which a pickle has in its place; None in a script."""
    name = getattr(value, "__qualname__", "")
    with contextlib.suppress(AttributeError, KeyError):
        member = operator.attrgetter(name)(sys.modules[value.__module__])
        return name if member is value and value.__module__ != "__main__" else None
    return None


def options_of(config: _config.Config) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """The options that differ from the defaults; and module, name and rule of primitives."""
    chosen = {
        field.name: dict(value) if isinstance(value, MappingProxyType) else value
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) is not field.default
    }
    del chosen["fn"], chosen["rules"]
    for name, tree in config.shardings.items():
        if any(isinstance(x, jax.sharding.Sharding) for x in jax.tree_util.tree_leaves(tree)):
            raise TypeError(
                f"{name}: devices cannot be pickled; give PartitionSpecs, and call under "
                "jax.set_mesh"
            )
    return chosen, [(*_place_of(primitive), rule) for primitive, rule in config.rules.items()]


def configured(
    fn: Callable[..., Any], options: Mapping[str, Any], rules: Iterable[Any]
) -> _config.Config:
    """The configuration of a function and the options of a pickle."""
    table = {getattr(importlib.import_module(module), name): rule for module, name, rule in rules}
    return _config.Config(fn, rules=table, **options)


def _place_of(primitive: Any) -> tuple[str, str]:
    """A module that has a primitive, and its name there: a copy would be another primitive."""
    for module, owner in list(sys.modules.items()):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if value is primitive and module != "__main__":
                return module, name
    raise TypeError(
        f"with_rules: the primitive {primitive} is in no module, so its rule cannot be pickled; "
        "make it a global of a module that the other process imports"
    )
