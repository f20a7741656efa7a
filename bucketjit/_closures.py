"""What a Python function can get at besides its arguments and its globals."""

from __future__ import annotations

import dataclasses
import functools
from types import CellType, FunctionType, MethodType
from typing import Any

import jax

from bucketjit._dims import is_symbolic

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


def holds_a_size(value: Any, depth: int = 8) -> bool:
    """Whether a host function can get at a symbolic size: it would see an expression, not an int.

    Looks into closures, partial arguments, methods and containers.
    """
    if is_symbolic(value):
        return True
    if isinstance(value, jax.core.Tracer):
        return any(map(is_symbolic, value.shape))
    if depth == 0:
        return False
    held = [*(held_by(value) or ())]
    if callable(value):
        held += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        held += getattr(value, "__dict__", {}).values()
    return any(holds_a_size(v, depth - 1) for v in held if v is not value)
