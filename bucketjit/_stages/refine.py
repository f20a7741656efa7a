"""Fix the sizes of an exported module, without the Python code that it was made from.

JAX lowers a call of the module at fixed sizes, and XLA's shape refinement follows them through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export  # an attribute of jax only after this import

from bucketjit._config import is_int_from
from bucketjit._extras import Extra
from bucketjit._ir.expressions import evaluate, is_symbolic, variables_of
from bucketjit._jax.stablehlo import reason_in, refined, register_named_in
from bucketjit._raised import first_line, is_of_machine
from bucketjit.errors import ExportError

_WIDE = ("int64", "uint64", "float64", "complex128")  # types that JAX narrows without x64
_MOST = 2**31 - 1  # of a size: XLA and the masks of bucketjit count in int32


def refine(artifact: object, sizes: object, platform: str | None = None) -> bytes:
    """Fix the sizes of an exported module; see `bucketjit.refine`."""
    if not isinstance(artifact, bytes | bytearray | memoryview):
        raise ExportError(f"artifact: expected bytes, got {type(artifact).__name__}")
    exported = exported_from(bytes(artifact), "artifact")
    if platform not in (None, *exported.platforms):
        raise ExportError(
            f"platform: the module is for {', '.join(exported.platforms)}, not for {platform!r}"
        )
    dims = [d for aval in exported.in_avals for d in aval.shape if is_symbolic(d)]
    variables = dict.fromkeys(v for d in dims for v in variables_of(str(d)))
    checked = checked_sizes(sizes, list(variables))
    try:
        leaves = [
            jax.ShapeDtypeStruct(tuple(evaluate(d, checked) for d in aval.shape), aval.dtype)
            for aval in exported.in_avals
        ]
        args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, leaves)
        platforms = exported.platforms if platform is None else (platform,)
        with jax.enable_x64(any(str(aval.dtype) in _WIDE for aval in exported.in_avals)):
            traced = jax.jit(exported.call).trace(*args, **kwargs)
            return refined(traced.lower(lowering_platforms=platforms).compiler_ir())
    except Exception as error:
        if is_of_machine(error):
            raise
        raise ExportError(
            f"sizes: the module does not hold at these: {reason_in(error)}"
        ) from error


def checked_sizes(sizes: object, variables: Sequence[str]) -> dict[str, int]:
    """The sizes as ints, if each variable of a module has one."""
    if not isinstance(sizes, Mapping) or set(sizes) != set(variables):
        raise ExportError(
            "sizes: expected a dict with the size of each variable of the module "
            f"({', '.join(variables) or 'none'}), got {sizes!r}"
        )
    for name, size in sizes.items():
        if not is_int_from(size, 1) or size > _MOST:
            raise ExportError(f"sizes: {name}: expected an int from 1 to {_MOST}, got {size!r}")
    return {name: int(size) for name, size in sizes.items()}


def exported_from(raw: bytes, place: str) -> Any:
    """The module in the bytes of ``jax.export.Exported.serialize()``."""
    with Extra("exported functions", "flatbuffers", "export"):
        import flatbuffers  # type: ignore[import-untyped]  # noqa: F401
    try:
        register_named_in(raw)
        exported = jax.export.deserialize(bytearray(raw))
    except Exception as error:
        if isinstance(error, ImportError) or "register_pytree_node_serialization" in str(error):
            raise ExportError(
                f"{place}: its arguments or results are of a class that this process does not "
                f"know: {first_line(error)} (register it by "
                "jax.export.register_pytree_node_serialization)"
            ) from error
        raise ExportError(
            f"{place}: expected the bytes of jax.export.Exported.serialize(), got {len(raw)} bytes "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    version, newest = (
        exported.calling_convention_version,
        jax.export.maximum_supported_calling_convention_version,
    )
    if version > newest:
        raise ExportError(
            f"{place}: it has version {version} of jax.export's calling convention, and jax "
            f"{jax.__version__} knows those up to {newest}; upgrade jax"
        )
    return exported
