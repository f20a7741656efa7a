"""Look into Python values: what a function closes over, and whether a size is among it."""

from __future__ import annotations

import dataclasses
import enum
import functools
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from bucketjit._sizes.expressions import is_symbolic

# Types of values that hold no size.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, type, np.dtype),
    *(ModuleType, BuiltinFunctionType, type(...)),
)
_UNBOUND = object()  # the contents of a cell whose variable is not assigned yet


def held_by(value: object) -> tuple[Any, ...] | None:
    """The parts that a function, a method, a partial, a dataclass or a container is made of.

    A function's parts are its defaults and the contents of its closure.

    Args:
        value: Any value.

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


def holds_a_size(value: object) -> bool | None:
    """Whether a symbolic size (an expression such as ``2*n``) can be reached from a value.

    The search follows closures, partial arguments, methods, dataclasses, attributes and containers.

    Args:
        value: A host function, or data that is no array.

    Returns:
        Whether it holds a size; None if some part of it cannot be searched.
    """
    return _holds_a_size(value, 8, {})


def _holds_a_size(value: object, depth: int, seen: dict[int, Any]) -> bool | None:
    if is_symbolic(value):
        return True
    # A tracer may stand for a number that was computed from a size, so it is never a plain "no".
    if isinstance(value, jax.core.Tracer):
        return any(map(is_symbolic, value.shape)) or None
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return None if value.dtype == object else False
    if isinstance(value, jax.ShapeDtypeStruct):
        return any(map(is_symbolic, value.shape))
    if isinstance(value, _PLAIN) or id(value) in seen:
        return False
    if depth == 0:
        return None
    seen[id(value)] = value  # a reference, so that no other object gets this id meanwhile
    held = tuple(value) if isinstance(value, set | frozenset) else held_by(value)
    parts = [*(held or ())]
    if callable(value):
        parts += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        parts += getattr(value, "__dict__", {}).values()
    answers = {_holds_a_size(part, depth - 1, seen) for part in parts}
    if True in answers:
        return True
    return None if held is None or None in answers else False
