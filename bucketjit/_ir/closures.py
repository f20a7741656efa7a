"""Look into Python values: what a function closes over, and whether a size is among it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit._ir.expressions import Dim, is_symbolic


class SizedHost(NamedTuple):
    """Stands in an equation for a host function that may differ from size to size.

    Attributes:
        at: Returns the function of the trace at these logical sizes.
        depends_on: A symbolic size. It marks the equation as one that depends on sizes.
    """

    at: Callable[[Mapping[str, int]], Any]
    depends_on: Dim


# Types of values that hold no size.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, type, np.dtype),
    *(ModuleType, BuiltinFunctionType, type(...)),
)
_COLLECTED = 1 << 14  # ``Py_TPFLAGS_HAVE_GC``: the collector knows what objects of a class refer to
_MOST_SEARCHED = 20_000  # objects; as many are searched in about 20 ms
_UNBOUND = object()  # the contents of a cell whose variable is not assigned yet


def held_by(value: object) -> tuple[Any, ...] | None:
    """The parts that a function, a method, a partial, a dataclass or a container is made of.

    A function's parts are its defaults and the contents of its closure.
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


def holds_a_size(value: object, depth: int = 12, seen: Any = None) -> bool | None:
    """Whether a symbolic size (an expression such as ``2*n``) can be reached from a value.

    The search follows closures, and what the garbage collector knows of all other objects.
    """
    seen = {} if seen is None else seen
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
    if type(value).__module__.startswith("bucketjit."):  # it holds the sizes of its own programs
        return False
    parts = _parts_of(value)
    if parts is None or depth == 0 or len(seen) == _MOST_SEARCHED:
        return None
    seen[id(value)] = value  # a reference, so that no other object gets this id meanwhile
    answers = {holds_a_size(part, depth - 1, seen) for part in parts}
    return True if True in answers else None if None in answers else False


def _parts_of(value: object) -> Sequence[Any] | None:
    """What a value refers to, but for the global names of a function; None if nobody knows."""
    if isinstance(value, FunctionType):
        return (*(held_by(value) or ()), value.__dict__)
    if isinstance(value, weakref.ref):
        return (value(), *gc.get_referents(value))
    # An object of a compiled class may hold what the collector does not know.
    kinds = (k for k in type(value).__mro__ if k.__basicsize__ > object.__basicsize__)
    return gc.get_referents(value) if all(k.__flags__ & _COLLECTED for k in kinds) else None
