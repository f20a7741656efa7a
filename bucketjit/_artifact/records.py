"""Frozen dataclasses from JSON values, checked by their annotations."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from bucketjit.errors import ArtifactError

_LARGEST = 2**63  # sizes and positions are below

T = TypeVar("T")


def decoded_as(kind: type[T], value: object, place: str) -> T:
    """A value of JSON as a value of an annotated type."""
    return typing.cast(T, _decoded(kind, value, place))


def _decoded(kind: Any, value: Any, at: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        found = {}
        for field in dataclasses.fields(kind):
            if field.name not in value:
                raise ArtifactError(
                    f"{at}: there is no {field.name!r}; the file is damaged or was altered"
                )
            found[field.name] = _decoded(
                hints[field.name], value[field.name], f"{at}: {field.name}"
            )
        return kind(**found)
    if origin in (typing.Union, types.UnionType):
        fits = next((one for one in args if _is_like(one, value)), None)
        if fits is not None:
            return _decoded(fits, value, at)
    elif origin is tuple and isinstance(value, list | tuple):
        if args[-1] is Ellipsis:
            return tuple(_decoded(args[0], one, f"{at}[{i}]") for i, one in enumerate(value))
        if len(args) == len(value):
            return tuple(
                _decoded(a, one, f"{at}[{i}]")
                for i, (a, one) in enumerate(zip(args, value, strict=True))
            )
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {name: _decoded(args[1], one, f"{at}.{name}") for name, one in value.items()}
    elif type(value) is kind and not (kind is int and not 0 <= value < _LARGEST):
        return value
    text = repr(value)
    shown = text if len(text) <= 40 else f"{type(value).__name__} {text[:40]}..."
    name = getattr(kind, "__name__", str(kind))
    raise ArtifactError(f"{at}: expected {name}, got {shown}; the file is damaged or was altered")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _is_like(kind: Any, value: Any) -> bool:
    """Whether a value is of the kind of a member of a union."""
    if dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    origin = typing.get_origin(kind)
    return isinstance(value, list | tuple) if origin is tuple else type(value) is kind
