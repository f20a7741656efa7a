"""The type and the shape of each argument leaf; values that are no arrays are refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit._arrays.padded import Padded
from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax import arrays
from bucketjit._jax.arrays import explicit_sharding, on_one_device
from bucketjit._raised import first_line
from bucketjit._tracing.cures import cure, cure_of_dtype, described
from bucketjit.errors import ArgumentError


class LeafType(NamedTuple):
    """Everything that a program depends on of a leaf, except for its sizes.

    Attributes:
        dtype: JAX dtype; None for a Python int that is itself a size.
        weak_type: JAX's weak type (True for Python scalars other than bool).
        rank: Number of axes.
        sharding: How the leaf is sharded over explicit axes of a mesh, which are part of JAX's
            types; None if it is not.
        partitions: The number of equal parts that each axis is cut into over several devices, which
            must divide padded sizes too; None if no axis is cut.
        target: The sharding of a struct on devices of a topology, which are in no process; None for
            all other leaves.
    """

    dtype: Any
    weak_type: bool
    rank: int
    sharding: Any = None
    partitions: tuple[int, ...] | None = None
    target: Any = None


_SCALARS = {
    bool: np.dtype(bool),
    int: np.dtype(int),
    float: np.dtype(float),
    complex: np.dtype(complex),
}

# Signing a call then costs one dict look-up a leaf, in place of a new tuple.
_leaf_type = functools.lru_cache(maxsize=1024)(LeafType)


_TOO_LARGE = 2**63  # bytes of an array: XLA counts them in 64 bits with a sign


def can_be(shape: Sequence[int], dtype: Any) -> bool:
    """Whether an array of this shape has less than 2^63 bytes. Beyond, XLA aborts the process."""
    return math.prod(shape) * int(dtype.itemsize) < _TOO_LARGE


def leaf_type(
    value: object, path: str, remedy: str | None = None, *, structs: bool = False
) -> tuple[LeafType, tuple[int, ...]]:
    """The type and the logical shape of an argument leaf, which may be a struct if ``structs``."""
    if (plain := on_one_device(value)) is not None:
        return _leaf_type(plain.dtype, plain.weak_type, len(plain.shape)), plain.shape
    if isinstance(value, jax.Array):
        weak = bool(getattr(value.aval if hasattr(value, "aval") else value, "weak_type", False))
        placed = explicit_sharding(value), arrays.partitions(value)
        return LeafType(value.dtype, weak, value.ndim, *placed), value.shape
    if structs and isinstance(value, jax.ShapeDtypeStruct):
        return _type_of_struct(value, path)
    if isinstance(value, Padded):
        counts = arrays.partitions(value.array)
        sharding = explicit_sharding(value.array)
        if counts and any(n % count for n, count in zip(value.sizes, counts, strict=True)):
            counts = sharding = None  # JAX cannot cut the logical sizes, so the type is not cut
        known = value.weak_type, value.ndim, sharding, counts
        return LeafType(_canonical(value.dtype, path), *known), value.sizes
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype == jax.dtypes.float0:  # JAX's dtype for tangents of integers
            return LeafType(value.dtype, False, value.ndim), value.shape
        if value.dtype.kind in "OSUMmV" and not _is_extension(value.dtype):
            raise ArgumentError(
                f"{path}: expected a numeric array, got a NumPy array of dtype {value.dtype}; "
                f"{cure_of_dtype(value, path)}"
            )
        if isinstance(value, np.ma.MaskedArray):
            raise ArgumentError(
                f"{path}: expected an array, got a NumPy masked array; pass {path}.filled(0), and "
                f"{path}.mask as an argument of its own"
            )
        return LeafType(_canonical(value.dtype, path), False, value.ndim), value.shape
    for kind in type(value).__mro__:  # subclasses too: an IntEnum is an int
        if (dtype := _SCALARS.get(kind)) is not None:
            return LeafType(jax.dtypes.canonicalize_dtype(dtype), kind is not bool, 0), ()
    raise ArgumentError(
        f"{path}: expected an array or a Python scalar, got {described(value)}; "
        f"{remedy or cure(value, path)}"
    )


def _type_of_struct(value: jax.ShapeDtypeStruct, path: str) -> tuple[LeafType, tuple[int, ...]]:
    if any(map(is_symbolic, value.shape)):
        raise ArgumentError(
            f"{path}: expected the sizes of a call, got the symbolic shape {value.shape}; "
            "dynamic_axes opens axes, and export_dynamic exports the function for all sizes"
        )
    if not can_be(value.shape, value.dtype):
        raise ArgumentError(f"no array of {value.dtype} can have the shape {value.shape}")
    try:
        placed = explicit_sharding(jax.typeof(value)), arrays.partitions(value)
    except ValueError as error:
        raise ArgumentError(f"{value}: {first_line(error)}") from error
    devices = arrays.devices_of(value.sharding)
    target = value.sharding if arrays.is_of_topology(devices) else None
    known = bool(value.weak_type), len(value.shape), *placed, target
    return LeafType(_canonical(value.dtype, path), *known), tuple(value.shape)


def _canonical(dtype: np.dtype[Any], path: str) -> Any:
    """The dtype that JAX gives to an array of this dtype."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    if not dtype.isnative:
        raise ArgumentError(
            f"{path}: expected native byte order, got a NumPy array of {dtype!r}; pass "
            f"{path}.astype({path}.dtype.newbyteorder('='))"
        )
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        raise ArgumentError(
            f"{path}: expected an array of a dtype that JAX has, got {dtype}; pass "
            f"{path}.astype('{'float64' if dtype.kind == 'f' else 'complex128'}')"
        )
    return jax.dtypes.canonicalize_dtype(dtype)


def _is_extension(dtype: np.dtype) -> bool:
    """Whether a dtype is one of ``ml_dtypes``, such as bfloat16: its kind is that of void."""
    try:
        return bool(jax.dtypes.issubdtype(dtype, np.number)) and dtype.kind == "V"
    except TypeError:
        return False


def with_paths(
    names: Sequence[str], values: Sequence[Any], is_leaf: Any = None
) -> list[tuple[str, Any]]:
    """The leaves of some arguments, in the order of ``jax.tree_util``, with their paths."""
    return [
        (name + jax.tree_util.keystr(keys), leaf)
        for name, value in zip(names, values, strict=True)
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf)[0]
    ]
