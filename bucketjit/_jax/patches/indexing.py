"""Indexing where the index or its type depends on a symbolic size."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.arrays import explicit_sharding
from bucketjit._jax.jaxprs import value_of_size
from bucketjit._jax.patches.patch import patch

_indexing = names.module("numpy.indexing")
_lax_utils = names.module("lax.utils")
_flags: Any = jax.config  # its flags are public, but have no types


@patch(names.module("lax.lax"), "_const")
def _constant(original: Any, example: Any, value: Any) -> Any:
    """``lax.psum(1, "rows")`` over an open axis is its size, and ``lax.pmean`` divides by it.

    JAX makes an int of it. Since lax.lax, 0.1. Until it takes a symbolic size for a number.
    """
    is_size = is_symbolic_dim(value) and isinstance(example, int)
    return value if is_size else original(example, value)


@patch(_lax_utils, "int_dtype_for_dim")
def _type_for_dim(original: Any, size: Any, *, signed: bool) -> Any:
    """For every size that an executable here can have, the exact run takes int32.

    JAX takes the default integer for open axes, which is int64 with x64 enabled. Since lax.utils,
    0.7. Until JAX takes int32.
    """
    if is_symbolic_dim(size):
        return np.dtype(np.int32 if signed else np.uint32)
    return original(size, signed=signed)


@patch(_indexing, "_parse_indices")
def _sizes(original: Any, indices: Any, shape: Any) -> Any:
    """``x[n - 1]`` and ``x.at[n // 2]`` for a symbolic ``n`` take the number that it is.

    A size is no array, so JAX refuses it. Since numpy.indexing, 0.8. Until JAX takes it.
    """
    parts = original(tuple(map(value_of_size, indices)), shape)
    for part in parts:
        if part.typ.name in ("INTEGER", "ARRAY") and np.ndim(part.index) == 0:
            (axis,) = part.consumed_axes
            # JAX asks whether the size is 0, and takes a symbolic one to be another number.
            if is_symbolic_dim(shape[axis]) and not shape[axis] >= 1:
                raise IndexError(f"index is out of bounds for axis {axis} with size 0")
    return parts


@patch(_indexing, "rewriting_take")
def _clamped(original: Any, arr: Any, idx: Any, *, mode: Any = None, **options: Any) -> Any:
    """``x[i]`` of an array with open axes is a gather that clamps, as the slice of the exact run.

    JAX makes a gather of it that promises to stay inside, whose derivative drops what is outside.
    Since numpy.indexing, 0.8. Until JAX makes the same of ``x[i]`` for all sizes.
    """
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


@patch(_indexing, "rewriting_take")
def _reversed(original: Any, arr: Any, idx: Any, **options: Any) -> Any:
    """``x[::-1]`` of an open axis is a reversal, as in the exact run.

    JAX makes a gather of it, with an index for each element. Since numpy.indexing, 0.8. Until JAX
    makes the same of ``x[::-1]`` for all sizes.
    """
    if not any(map(is_symbolic_dim, arr.shape)) or explicit_sharding(arr) is not None:
        return original(arr, idx, **options)
    parts = _indexing.NDIndexer.from_raw_indices(idx, arr.shape).indices
    axes = [part.consumed_axes[0] for part in parts if _is_reversal(part, arr.shape)]
    if axes:
        arr = jax.lax.rev(arr, axes)
        idx = tuple(slice(None) if _is_reversal(p, arr.shape) else p.index for p in parts)
    return original(arr, idx, **options)


def _is_reversal(part: Any, shape: Any) -> bool:
    """Whether this part of an index is ``::-1`` of an open axis."""
    if part.typ.name != "SLICE" or not is_symbolic_dim(shape[part.consumed_axes[0]]):
        return False
    return part.index == slice(None, None, -1)


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


INDICES = (_constant, _type_for_dim, _clamped, _reversed, _sizes)
