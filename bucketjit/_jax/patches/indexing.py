"""Indexing where the index or its type depends on a symbolic size."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.arrays import with_type
from bucketjit._jax.jaxprs import value_of_size
from bucketjit._jax.patches.patch import Reasons, patch

_indexing = names.module("numpy.indexing")
_lax_utils = names.module("lax.utils")
_flags: Any = jax.config  # its flags are public, but have no types

_CONSTANTS = Reasons(
    why="jnp.take(mode='wrap') and others make constants of sizes by NumPy, which refuses symbolic "
    "ones.",
    since="lax.lax._const, 0.1",
    delete_when="jax.numpy.take(mode='wrap') takes an axis of symbolic size",
)

_TYPES = Reasons(
    why="JAX takes the default integer, which is int64 with x64 enabled. For every size that an "
    "executable here can have, the exact run takes int32.",
    since="lax.utils, 0.7",
    delete_when="JAX takes int32 for indices into an axis of symbolic size",
)

_SIZES = Reasons(
    why="A size is an integer, but no array, so JAX refuses it as an index.",
    since="numpy.indexing, 0.8",
    delete_when="JAX takes a symbolic size as an index",
)

_CLAMPED = Reasons(
    why="JAX makes a dynamic_slice of x[i] where the sizes are known. Where they are not, it makes "
    "a gather that promises to stay inside, whose derivative drops what is outside. A gather that "
    "clamps does what the slice does.",
    since="numpy.indexing, 0.8",
    delete_when="JAX makes the same of x[i] for symbolic and for plain sizes",
)


@patch(names.module("lax.lax"), "_const", _CONSTANTS)
def _constant(original: Any, example: Any, value: Any) -> Any:
    if not is_symbolic_dim(value):
        return original(example, value)
    kind = jax.typeof(example)
    return with_type(value_of_size(value), kind.dtype, bool(kind.weak_type))


@patch(_lax_utils, "int_dtype_for_dim", _TYPES)
def _type_for_dim(original: Any, size: Any, *, signed: bool) -> Any:
    if is_symbolic_dim(size):
        return np.dtype(np.int32 if signed else np.uint32)
    return original(size, signed=signed)


@patch(_lax_utils, "int_dtype_for_shape", _TYPES)
def _type_for_shape(original: Any, shape: Any, *, signed: bool) -> Any:
    return original([d for d in shape if not is_symbolic_dim(d)], signed=signed)


@patch(_indexing, "_parse_indices", _SIZES)
def _sizes(original: Any, indices: Any, shape: Any) -> Any:
    """``x[n - 1]`` and ``x.at[n // 2]`` for a symbolic ``n`` take the number that it is."""
    parts = original(tuple(map(value_of_size, indices)), shape)
    for part in parts:
        if part.typ.name in ("INTEGER", "ARRAY") and np.ndim(part.index) == 0:
            (axis,) = part.consumed_axes
            # JAX asks whether the size is 0, and takes a symbolic one to be another number.
            if is_symbolic_dim(shape[axis]) and not shape[axis] >= 1:
                raise IndexError(f"index is out of bounds for axis {axis} with size 0")
    return parts


@patch(_indexing, "rewriting_take", _CLAMPED)
def _clamped(original: Any, arr: Any, idx: Any, *, mode: Any = None, **options: Any) -> Any:
    modes = jax.lax.GatherScatterMode
    is_plain = mode is None or modes.from_any(mode) is modes.PROMISE_IN_BOUNDS
    strategy = options.get("strategy")
    is_plain &= strategy is None or strategy.name == "AUTO"
    if is_plain and any(map(is_symbolic_dim, arr.shape)):
        indexer = _indexing.NDIndexer.from_raw_indices(idx, arr.shape)
        # Only where JAX makes a dynamic_slice for plain sizes.
        if all(map(_slices_one, indexer.indices)):
            # The original checks static indices only in the modes that "clip" replaces here.
            if _flags.jax_check_static_indices:
                by_end = options.get("normalize_indices", True)
                indexer.validate_static_indices(normalize_indices=by_end)
            mode = "clip"
    return original(arr, idx, mode=mode, **options)


def _slices_one(part: Any) -> bool:
    """Whether ``lax.dynamic_slice`` can do this part of an index: a scalar, or a slice of step 1.

    Static slices of step -1 count, too.
    """
    kind = part.typ.name
    if kind == "ARRAY":
        return np.shape(part.index) == ()
    if kind == "DYNAMIC_SLICE":
        return bool(part.index.stride == 1)
    return kind != "BOOLEAN" and getattr(part.index, "step", None) in (None, 1, -1)


INDICES = (_constant, _type_for_dim, _type_for_shape, _clamped, _sizes)
