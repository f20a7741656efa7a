"""The modules of files: those of buckets, and which of them are trusted.

program   jaxpr of symbolic sizes, constants
module    main(constants..., int32[k] sizes, size constants..., padded arrays...)
          -> padded results
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export  # an attribute of jax only after this import
import numpy as np

from bucketjit._compile.bodies import masked
from bucketjit._extras import Extra
from bucketjit._ir.jax_patches import forgetful_jax, lenient_jax
from bucketjit._ir.program import Program
from bucketjit._jax import stablehlo
from bucketjit._jax.arrays import key_impl, traced_for, with_type
from bucketjit._masking.interpreter import Hook
from bucketjit._masking.rule_context import RuleTable
from bucketjit._raised import in_one_line, is_of_machine
from bucketjit._stages.modules.dynamic import evaluator, exported_from
from bucketjit._tracing.call import Call
from bucketjit.errors import ArtifactError, ExportError, MaskingError

# Kernels for one kind of accelerator, and functions of TensorFlow: JAX keeps their form stable, but
# they are programs of their own, that nothing here can look into.
_OPAQUE = frozenset(("tpu_custom_call", "mosaic_gpu_v2", "tf.call_tf_function"))


def plain_constant(value: Any) -> np.ndarray:
    """A constant of a program as an array of NumPy; random keys as their words."""
    return np.asarray(jax.random.key_data(value) if _is_key(value) else value)


def _is_key(value: Any) -> bool:
    return bool(jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key))


def _plain_type(value: Any) -> jax.ShapeDtypeStruct:
    """The type of `plain_constant`; an array on an accelerator stays there."""
    if _is_key(value):
        return jax.eval_shape(jax.random.key_data, value)
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _restored(array: Any, like: Any) -> Any:
    """A constant as the program has it, from its plain form."""
    if _is_key(like):
        return jax.random.wrap_key_data(array, impl=key_impl(like.dtype))
    return with_type(array, array.dtype, bool(getattr(like, "weak_type", False)))


Types = Sequence[tuple[Any, bool]]  # dtype and weak type of each array


def _as_traced(
    program: Program, types: Types, constants: Any, arrays: Any
) -> tuple[list[Any], list[Any]]:
    """The constants and the arguments of a module, with the types of the program."""
    consts = [_restored(x, c) for x, c in zip(constants, program.consts, strict=True)]
    return consts, [with_type(x, d, weak) for x, (d, weak) in zip(arrays, types, strict=True)]


def bucket_module(
    program: Program,
    call: Call,
    bucket: Mapping[str, int],
    rules: RuleTable,
    after: Callable[[], Hook] | None,
    types: Types,
    platforms: Sequence[str] | None,
) -> jax.export.Exported:
    """The masked program of a bucket as an exported module."""
    padded = program.sizes_in(bucket).padded_shape

    def main(constants: Any, sizes: Any, by_size: Any, arrays: Any) -> list[Any]:
        consts, padded_arrays = _as_traced(program, types, constants, arrays)
        body = masked(program, consts, bucket, call.variables, rules, after)
        return body(sizes, tuple(by_size), padded_arrays)

    values = zip(program.size_constant_shapes, call.size_constants.values, strict=True)
    by_size = [jax.ShapeDtypeStruct(padded(s), np.asarray(value).dtype) for s, value in values]
    pairs = zip(program.in_shapes, types, strict=True)
    arrays = [jax.ShapeDtypeStruct(padded(shape), dtype) for shape, (dtype, _) in pairs]
    sizes = jax.ShapeDtypeStruct((len(call.variables),), np.int32)
    args = list(map(_plain_type, program.consts)), sizes, by_size, arrays
    return exported(main, platforms, args, {})


def exported(
    function: Callable[..., Any],
    platforms: Sequence[str] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> jax.export.Exported:
    """A function as a module that takes every argument, unused ones too."""
    jitted = jax.jit(function, keep_unused=True)
    try:
        # If tracing fails, JAX must not keep the trace alive.
        with forgetful_jax(), traced_for(frozenset(platforms or ())):
            return jax.export.export(jitted, platforms=platforms)(*args, **kwargs)
    except MaskingError:
        raise
    except Exception as error:
        if is_of_machine(error):
            raise
        raise ArtifactError(f"jax.export cannot export it: {in_one_line(error)}") from error


def serialized(module: jax.export.Exported) -> bytes:
    """The bytes of a module."""
    with Extra("saved functions", "flatbuffers", "export"):
        # JAX's own error is an ImportError that names no package.
        import flatbuffers  # type: ignore[import-untyped]  # noqa: F401

        stablehlo.register_namedtuples(module.in_tree)
        stablehlo.register_namedtuples(module.out_tree)
        try:
            return bytes(stablehlo.for_older_readers(module).serialize())
        except (ValueError, NotImplementedError) as error:
            raise ArtifactError(
                f"jax.export cannot serialize it: {in_one_line(error)} (a NamedTuple need not be "
                "registered if it can be imported by its name)"
            ) from error


def deserialized(raw: bytes, place: str, trusted: bool = False) -> jax.export.Exported:
    """The module in bytes that `serialized` made."""
    try:
        module: jax.export.Exported = exported_from(raw, place)
    except ExportError as error:
        raise ArtifactError(str(error)) from error
    allowed = stablehlo.stable_targets() - (frozenset() if trusted else _OPAQUE)
    try:
        foreign = stablehlo.foreign_operations(module.mlir_module_serialized, allowed)
    except stablehlo.BadModule as error:
        raise ArtifactError(f"{place}: it holds no module that can be read: {error}") from error
    if foreign:
        raise ArtifactError(
            f"{place}: the module has {foreign[0]}, which is not one of the operations that are "
            "trusted in a file; do not load files of people whom you do not trust"
        )
    return module


def dynamic_module(
    program: Program, sizes: Mapping[str, int], types: Types, platforms: Sequence[str] | None
) -> jax.export.Exported:
    """A program as a module of all sizes, unmasked.

    Its flat arguments are the constants of the program and the arrays.
    """
    try:
        run = evaluator(program, sizes)
    except ExportError as error:
        raise ArtifactError(f"dynamic=True: {error}") from error

    def main(constants: Any, arrays: Any) -> list[Any]:
        return run(*_as_traced(program, types, constants, arrays))

    pairs = zip(program.in_shapes, types, strict=True)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, (dtype, _) in pairs]
    with lenient_jax():
        args = list(map(_plain_type, program.consts)), arrays
        module = exported(main, platforms, args, {})
    return stablehlo.without_assertion_effects(module)
