"""Indexing where the index or its type depends on a symbolic size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.arrays import with_type
from bucketjit._jax.patches.patch import Patch

_core = names.module("core")
_indexing = names.module("numpy.indexing")
_lax = names.module("lax.lax")
_lax_utils = names.module("lax.utils")
_flags: Any = jax.config  # its flags are public, but have no types


def open_constants() -> list[Patch]:
    """A symbolic size becomes a traced scalar where JAX makes a constant for an array operation.

    JAX makes it with NumPy (``lax.lax._const``, since 0.1), which refuses symbolic sizes.
    """
    original = _lax._const

    def const(example: Any, value: Any) -> Any:
        if not is_symbolic_dim(value):
            return original(example, value)
        weak = bool(jax.typeof(example).weak_type)
        return with_type(_core.dimension_as_value(value), jax.typeof(example).dtype, weak)

    return [
        Patch(
            _lax,
            "_const",
            const,
            why="jnp.take(mode='wrap') and others make constants of sizes by NumPy.",
            since="lax.lax._const, 0.1",
            delete_when="jax.numpy.take(mode='wrap') takes an axis of symbolic size",
        )
    ]


def open_index_types() -> list[Patch]:
    """Indices into a symbolic axis get the dtype of the unpadded run: int32 or uint32.

    JAX takes the default integer type for them (``lax.utils``, since 0.7).
    """

    def for_dim(original: Callable[..., Any]) -> Callable[..., Any]:
        def dtype(size: Any, *, signed: bool) -> Any:
            if is_symbolic_dim(size):
                return np.dtype(np.int32 if signed else np.uint32)
            return original(size, signed=signed)

        return dtype

    def for_shape(original: Callable[..., Any]) -> Callable[..., Any]:
        def dtype(shape: Any, *, signed: bool) -> Any:
            return original([d for d in shape if not is_symbolic_dim(d)], signed=signed)

        return dtype

    reasons: dict[str, Any] = {
        "why": "JAX takes the default integer, which is int64 with x64 enabled. For every size "
        "that an executable here can have, the exact run takes int32.",
        "since": "lax.utils, 0.7",
        "delete_when": "JAX takes int32 for indices into an axis of symbolic size",
    }
    of_dim, of_shape = _lax_utils.int_dtype_for_dim, _lax_utils.int_dtype_for_shape
    return [
        Patch(_lax_utils, "int_dtype_for_dim", for_dim(of_dim), **reasons),
        Patch(_lax_utils, "int_dtype_for_shape", for_shape(of_shape), **reasons),
    ]


def sizes_as_indices() -> list[Patch]:
    """``x[n - 1]`` and ``x.at[n // 2]`` for a symbolic ``n`` take the number that it is."""
    original = _indexing._parse_indices
    one_each = (_indexing.IndexType.INTEGER, _indexing.IndexType.ARRAY)

    @functools.wraps(original)
    def parse(indices: Any, shape: Any) -> Any:
        numbers = [_core.dimension_as_value(x) if is_symbolic_dim(x) else x for x in indices]
        parts = original(tuple(numbers), shape)
        for part in parts:
            if part.typ in one_each and np.ndim(part.index) == 0:
                (axis,) = part.consumed_axes
                # JAX asks whether the size is 0, and takes a symbolic one to be another number.
                if is_symbolic_dim(shape[axis]) and not shape[axis] >= 1:
                    raise IndexError(f"index is out of bounds for axis {axis} with size 0")
        return parts

    return [
        Patch(
            _indexing,
            "_parse_indices",
            parse,
            why="A size is an integer, but no array, so JAX refuses it as an index.",
            since="numpy.indexing, 0.8",
            delete_when="JAX takes a symbolic size as an index",
        )
    ]


def clamped_indices() -> list[Patch]:
    """``x[i]`` of an array of symbolic shape clamps the index, as the unpadded run does.

    JAX emits another equation for symbolic shapes (``numpy.indexing``, since 0.8), whose derivative
    differs for indices out of bounds.
    """
    original = _indexing.rewriting_take
    mode_of = jax.lax.GatherScatterMode.from_any
    clamping = (None, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)

    @functools.wraps(original)
    def take(arr: Any, idx: Any, *, mode: Any = None, **options: Any) -> Any:
        parsed = None if mode is None else mode_of(mode)
        strategy = options.get("strategy", _indexing.IndexingStrategy.AUTO)
        if (
            parsed in clamping
            and strategy is _indexing.IndexingStrategy.AUTO
            and any(map(is_symbolic_dim, arr.shape))
        ):
            indexer = _indexing.NDIndexer.from_raw_indices(idx, arr.shape)
            # Only where JAX makes a dynamic_slice for plain sizes.
            if all(map(_slices_one, indexer.indices)):
                # The original checks static indices only in the modes that "clip" replaces here.
                if _flags.jax_check_static_indices:
                    by_end = options.get("normalize_indices", True)
                    indexer.validate_static_indices(normalize_indices=by_end)
                mode = "clip"
        return original(arr, idx, mode=mode, **options)

    return [
        Patch(
            _indexing,
            "rewriting_take",
            take,
            why="JAX makes a dynamic_slice of x[i] where the sizes are known. Where they are not, "
            "it makes a gather that promises to stay inside, whose derivative drops what is "
            "outside. A gather that clamps does what the slice does.",
            since="numpy.indexing, 0.8",
            delete_when="JAX makes the same of x[i] for symbolic and for plain sizes",
        )
    ]


def _slices_one(part: Any) -> bool:
    """Whether ``lax.dynamic_slice`` can do this part of an index: a scalar, or a slice of step 1.

    Static slices of step -1 count, too.
    """
    kinds = _indexing.IndexType
    if part.typ is kinds.ARRAY:
        return np.shape(part.index) == ()
    if part.typ is kinds.DYNAMIC_SLICE:
        return bool(part.index.stride == 1)
    return part.typ is not kinds.BOOLEAN and getattr(part.index, "step", None) in (None, 1, -1)
