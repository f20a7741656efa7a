"""What a Python function can get at besides its arguments and its globals."""

from __future__ import annotations

import dataclasses
import functools
from types import CellType, FunctionType, MethodType
from typing import Any

_UNBOUND = object()  # in place of a name that a closure has not bound yet


def held_by(value: Any) -> tuple[Any, ...] | None:
    """The parts that a function, a method, a partial, a dataclass or a container is made of.

    Returns:
        The parts, in a fixed order; None for any other kind of value.
    """
    if isinstance(value, FunctionType):
        cells = tuple(_contents(cell) for cell in value.__closure__ or ())
        return (value.__defaults__, value.__kwdefaults__, *cells)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(getattr(value, f.name) for f in dataclasses.fields(value))
    if isinstance(value, tuple | list):
        return tuple(value)
    if isinstance(value, dict):
        return (tuple(value), *value.values())
    return None


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNBOUND
