"""Fix the sizes of a serialized module, without the Python code that it was made from.

    before   func main(%x: tensor<?x8xf32>) { ... stablehlo.dynamic_broadcast_in_dim ... }
    after    func main(%x: tensor<16x8xf32>) { ... stablehlo.broadcast_in_dim ... }      b = 16

Only the types of ``main`` are replaced here. XLA's shape refinement follows them through the
module. Nothing is traced, so it takes milliseconds.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export  # an attribute of jax only after this import

from bucketjit._extras import Extra
from bucketjit._ir.expressions import evaluate, is_symbolic, variables_of
from bucketjit._jax import stablehlo
from bucketjit._jax.exporting import register_named_in
from bucketjit._jax.module_building import with_sizes
from bucketjit._jax.stablehlo import BadModule, Module, Tensor
from bucketjit._raised import first_line
from bucketjit.errors import ExportError

_MOST = 2**31 - 1  # of a size: XLA and the masks of bucketjit count in int32

Sizes = Mapping[str, int] | Sequence[Any]


def refine(artifact: object, sizes: Sizes, platform: str | None = None) -> bytes:
    """Fix the sizes of an exported module; see `bucketjit.refine`."""
    if not isinstance(artifact, bytes | bytearray | memoryview):
        raise ExportError(f"artifact: expected bytes, got {type(artifact).__name__}")
    raw = bytes(artifact)
    if raw.startswith(stablehlo.MAGIC):
        return _refine_portable(raw, sizes, platform)
    return _refine_exported(exported_from(raw, "artifact"), sizes, platform)


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
            f"{place}: expected the bytes of jax.export.Exported.serialize(), or a StableHLO "
            f"portable artifact; got {len(raw)} bytes that are neither "
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


def _read(raw: bytes) -> Module:
    try:
        return stablehlo.read_module(raw)
    except BadModule as error:
        of, own = stablehlo.version_of(raw), stablehlo.versions()
        if _numbers(of) > _numbers(own):
            raise ExportError(
                f"artifact: it was written for StableHLO {of}, and this jaxlib has {own} "
                f"({error}); upgrade jax"
            ) from error
        raise ExportError(f"artifact: cannot read its StableHLO module: {error}") from error


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("."))) if version else ()


# --- the bytes of Exported ------------------------------------------------------------------


def _refine_exported(exported: Any, sizes: Sizes, platform: str | None) -> bytes:
    at = _checked(sizes, _variables(exported))
    module = _read(exported.mlir_module_serialized)
    arguments = stablehlo.arguments_of(module)
    kept = [exported.in_avals[i] for i in exported.module_kept_var_idx]
    # Before the arrays stand the number of the platform, and a token for each ordered effect.
    before = len(arguments) - len(kept)
    shapes = [()] * before + [
        _at(aval.shape, argument, at)
        for aval, argument in zip(kept, arguments[before:], strict=True)
    ]
    fixed = {}
    if platform is not None:
        if platform not in exported.platforms:
            raise ExportError(
                f"platform: the module is for {', '.join(exported.platforms)}, not for {platform!r}"
            )
        if stablehlo.has_platform_index(module):
            fixed[0] = exported.platforms.index(platform)
    if not (at or fixed or exported.uses_global_constants):
        return bytes(exported.mlir_module_serialized)
    return _refined(module, shapes, fixed)


def _variables(exported: Any) -> list[str]:
    """The dimension variables of an exported function, in order of first appearance."""
    dims = [d for aval in exported.in_avals for d in aval.shape if is_symbolic(d)]
    return list(dict.fromkeys(v for d in dims for v in variables_of(str(d))))


def _checked(sizes: Sizes, variables: Sequence[str]) -> dict[str, int]:
    """The sizes as ints, in the order of the variables."""
    named = ", ".join(variables) or "none"
    if not isinstance(sizes, Mapping):
        raise ExportError(
            f"sizes: expected a dict with the size of each of the module's variables ({named}), "
            f"got {type(sizes).__name__}"
        )
    for name in sizes:
        if name not in variables:
            raise ExportError(f"sizes: the module has no variable {name!r}; it has {named}")
    for name in variables:
        if name not in sizes:
            raise ExportError(f"sizes: the size of variable {name!r} is missing; it has {named}")
    return {name: _size(sizes[name], f"sizes: {name}") for name in variables}


def _size(value: object, what: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ExportError(f"{what}: expected an int, got {value!r}") from None
    if not 1 <= size <= _MOST:
        raise ExportError(f"{what}: expected a size from 1 to {_MOST}, got {size}")
    return size


def _at(shape: Sequence[Any], argument: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an argument of ``main`` at these sizes.

    A random key has further axes in the module, for its words; they are fixed.
    """
    found = []
    for dim in shape:
        size = evaluate(dim, sizes)
        if not 0 <= size <= _MOST:
            told = ", ".join(f"{v}={n}" for v, n in sizes.items())
            raise ExportError(f"sizes: at {told}, an axis of size {dim} would have {size} elements")
        found.append(size)
    return (*found, *(n for n in argument.shape[len(shape) :] if n is not None))


# --- portable artifacts ---------------------------------------------------------------------


def _refine_portable(raw: bytes, sizes: Sizes, platform: str | None) -> bytes:
    module = _read(raw)
    arguments = stablehlo.arguments_of(module)
    if platform is not None:
        raise ExportError(
            f"platform: a portable artifact does not name its platforms, so {platform!r} cannot be "
            "found; pass the bytes of jax.export.Exported.serialize()"
        )
    told = ", ".join(map(str, arguments))
    if isinstance(sizes, Mapping | str | bytes) or not isinstance(sizes, Sequence):
        raise ExportError(
            "sizes: a portable artifact does not name its sizes; expected a list with the shape of "
            f"each argument of main, ({told}); got {type(sizes).__name__}"
        )
    if len(sizes) != len(arguments):
        raise ExportError(
            f"sizes: main has {len(arguments)} arguments, ({told}); got {len(sizes)} entries"
        )
    bounded = [str(i) for i, argument in enumerate(arguments) if argument.is_bounded]
    if bounded:
        raise ExportError(
            f"artifact: its sizes have bounds (argument {', '.join(bounded)}), and its masks are "
            "those of the bucket; refine a dynamic module, from export_dynamic"
        )
    shapes = [_wanted(*pair, i) for i, pair in enumerate(zip(sizes, arguments, strict=True))]
    if all(argument.is_static for argument in arguments) and not stablehlo.is_dynamic(module):
        return raw
    return _refined(module, shapes, {})


def _wanted(given: Any, argument: Tensor, position: int) -> tuple[int, ...]:
    """The shape that an entry of ``sizes`` gives to an argument."""
    what = f"sizes[{position}]"
    element = None
    if given is None:
        given = argument.shape
        if not argument.is_static:
            raise ExportError(f"{what}: argument {position} is a {argument}; give its shape")
    elif isinstance(given, str):
        given, element = _parsed(given, what)
    elif hasattr(given, "shape") and hasattr(given, "dtype"):
        given, element = given.shape, stablehlo.element_of(given.dtype)
    if not isinstance(given, Sequence):
        raise ExportError(f"{what}: expected a shape such as (16, 8), got {given!r}")
    shape = tuple(
        n if n == 0 and known == 0 else _size(n, what)
        for n, known in zip(given, argument.shape, strict=False)
    )
    fits = len(given) == len(argument.shape) and all(
        known in (None, n) for n, known in zip(shape, argument.shape, strict=True)
    )
    if not fits or element not in (None, argument.element):
        got = "x".join(map(str, (*given, element or argument.element)))
        raise ExportError(
            f"{what}: argument {position} of main is a {argument}, which tensor<{got}> does not fit"
        )
    return shape


def _parsed(text: str, what: str) -> tuple[tuple[int, ...], str | None]:
    """The shape and the element type in a text such as ``16x8xf32`` or ``16x8``."""
    found = re.fullmatch(r"(?:tensor<)?((?:\d+x)*)(\d+|\w+(?:<\w+>)?)>?", text.strip())
    if found is None:
        raise ExportError(f"{what}: expected a type such as 16x8xf32, got {text!r}")
    sizes, last = found.groups()
    shape = [int(n) for n in sizes.split("x") if n]
    return ((*shape, int(last)), None) if last.isdigit() else (tuple(shape), last)


def _refined(module: Module, shapes: Sequence[Sequence[int]], fixed: Mapping[int, int]) -> bytes:
    try:
        return with_sizes(module, shapes, fixed)
    except BadModule as error:
        raise ExportError(f"sizes: the module does not hold at these: {error}") from error
