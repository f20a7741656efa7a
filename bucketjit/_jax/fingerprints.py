"""Texts that identify parameters and types of equations, equal in every process.

`bucketjit._compile.files.fingerprint` makes the digest of a program from them. A value without a
sound text gives None, and the program is then not kept in a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import jax
import numpy as np

# Types whose ``repr`` holds all that a program depends on.
_TELLING = frozenset(
    f"jax._src.{name}"
    for name in (
        *("core.ManualAxisType", "export.shape_poly._DimExpr", "layout.AutoLayout"),
        *("layout.Layout", "memory.Space", "mesh.AbstractMesh"),
        *("named_sharding.UnspecifiedValue", "sharding_impls.UnspecifiedValue"),
    )
)


def parts_of(value: Any) -> Sequence[Any] | None:
    """The parts of a value of JAX that is compared by its parts.

    Non-public: no public name has these types. They are literals with a dtype
    (``literals.TypedInt``, since 0.7), trees (``flattree``, since 0.9), hijax primitives
    (``numpy.hijax``, since 0.10) and dataclasses of JAX.
    """
    kind = type(value)
    if kind.__module__ == "jax._src.literals" and kind.__mro__[1] in (int, float, complex):
        return [kind.__mro__[1](value), value.dtype]
    if kind.__module__ == "jax._src.flattree":
        return list(value.elts) if kind.__name__ == "FTTuple" else [len(value), *value.vals]
    if kind.__module__ == "jax._src.numpy.hijax" and isinstance(getattr(value, "params", 0), dict):
        return [kind.__name__, value.in_avals, value.params]
    if (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and _is_of_jax(kind.__module__)
        and kind.__name__ not in ("ShapedArray", "PRNGImpl")
    ):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def text_of(value: Any) -> str | None:
    """The text of an object of JAX, which holds all that a program depends on in it.

    The text is equal in every process. Non-public: no public name has these types of parameters
    (``core``, ``sharding_impls`` and ``shape_poly``, since 0.4.36).
    """
    kind = type(value)
    named = kind.__name__ if _is_of_jax(kind.__module__) else ""
    if kind is jax.core.ShapedArray:
        dtype = text_of(value.dtype)
        if dtype is None:
            return None
        parts = [repr(getattr(value, name, None)) for name in _SHAPED_FIELDS if name != "dtype"]
        text = f"array {tuple(map(str, value.shape))} {dtype} {' '.join(parts)}"
    elif isinstance(value, np.dtype):
        text = f"dtype {value.name} {value.str}"
    elif named == "KeyTy":
        generator = text_of(value._impl)
        if generator is None:
            return None
        text = f"key {generator}"
    elif named == "JaxprEqnContext":
        # "configs" is left out: these interned dicts of configuration follow from the others.
        fields = [n for n in kind.__slots__ if not n.startswith("_") and n != "configs"]
        text = "context " + " ".join(repr(getattr(value, name, None)) for name in fields)
    elif named == "PRNGImpl":
        functions = [f for f in value if callable(f)]
        if not all(_is_of_jax(f.__module__) and "<" not in f.__qualname__ for f in functions):
            return None
        names = " ".join(f.__qualname__ for f in functions)
        text = f"generator {value.name} {value.key_shape} {names}"
    elif isinstance(value, FunctionType):
        text = f"function {value.__module__}.{value.__qualname__}"
        if not _is_of_jax(value.__module__) or "<" in value.__qualname__:
            return None
    elif isinstance(value, jax.sharding.Mesh):  # its own text does not name its devices
        every = () if value.empty else value.devices.flat
        devices = [(d.id, d.process_index, d.device_kind) for d in every]
        text = f"mesh {[*value.shape.items()]} {value.axis_types} {devices}"
    elif isinstance(value, jax.sharding.NamedSharding):
        mesh = value.mesh
        concrete = text_of(mesh) if isinstance(mesh, jax.sharding.Mesh) else mesh
        text = f"{value.spec!r} {value.memory_kind} {concrete}"
    elif isinstance(value, jax.tree_util.PyTreeDef):
        text = f"tree {value}"
        if "CustomNode" in text:
            return None
    elif kind is jax.sharding.PartitionSpec or f"{kind.__module__}.{named}" in _TELLING:
        text = f"{kind.__qualname__} {value!r}"
    else:
        return None
    return None if " at 0x" in text else text  # an address differs from process to process


def is_name_of_axis(effect: Any) -> bool:
    """Whether an effect only says that a collective names an axis.

    The equation has the name as a parameter (``core.NamedAxisEffect``, since 0.4.36).
    """
    return type(effect).__name__ == "NamedAxisEffect"


_SHAPED_FIELDS = [
    n for n in jax.core.ShapedArray.__slots__ if not n.startswith("_") and n != "shape"
]


def _is_of_jax(module: str) -> bool:
    return module == "jax" or module.startswith("jax.")
