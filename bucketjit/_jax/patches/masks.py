"""Selections by masks whose values are known at run time only; see `.selections`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Patch
from bucketjit._jax.patches.traced_sizes import Selecting, entries_of, is_open, is_traced

_core = names.module("core")
_indexing = names.module("numpy.indexing")
_setops = names.module("numpy.setops")


def open_masks(selecting: Selecting) -> list[Patch]:
    """Masks as indices, and functions that choose by a mask."""
    return [
        _nonzeros(selecting),
        _mask_indices(selecting),
        _flag_indices(selecting),
        _sets(selecting),
        _compressions(selecting),
        _deletions(selecting),
    ]


def _nonzeros(selecting: Selecting) -> Patch:
    original = jnp.nonzero

    @functools.wraps(original)
    def nonzero(a: Any, *, size: Any = None, fill_value: Any = None) -> Any:
        open_ = selecting()
        if open_ is None or size is not None or not is_open(a):
            return original(a, size=size, fill_value=fill_value)
        return open_.nonzero(a)

    return Patch(
        jnp,
        "nonzero",
        nonzero,
        why="jnp.nonzero, argwhere, flatnonzero and jnp.where of one argument need a concrete "
        "mask. The program can compute the size.",
        since="numpy.lax_numpy.nonzero, 0.1",
        delete_when="JAX has arrays whose size is computed",
        everywhere=True,
    )


def _mask_indices(selecting: Selecting) -> Patch:
    original = _indexing.NDIndexer.expand_bool_indices
    kinds, part = _indexing.IndexType, _indexing.ParsedIndex

    @functools.wraps(original)
    def expand(self: Any) -> Any:
        open_ = selecting()
        if open_ is None:
            return original(self)
        indices: list[Any] = []
        for place, index in enumerate(self.indices):
            if index.typ is kinds.BOOLEAN and is_traced(index.index) and not is_open(index.index):
                indices.append(index)  # see `_flag_indices`
                continue
            if index.typ is not kinds.BOOLEAN or not is_open(index.index):
                indices += original(_indexing.NDIndexer(shape=self.shape, indices=[index])).indices
                continue
            _check_mask(self.shape, index, place)
            positions = open_.nonzero(index.index)
            indices += [
                part(index=array, typ=kinds.ARRAY, consumed_axes=(axis,))
                for array, axis in zip(positions, index.consumed_axes, strict=True)
            ]
        return _indexing.NDIndexer(shape=self.shape, indices=indices)

    return Patch(
        _indexing.NDIndexer,
        "expand_bool_indices",
        expand,
        why="A mask as an index, as in x[mask] and x.at[mask], must be concrete. The program can "
        "compute the positions.",
        since="numpy.indexing, 0.8",
        delete_when="JAX has arrays whose size is computed",
    )


def _flag_indices(selecting: Selecting) -> Patch:
    original = _indexing.NDIndexer.expand_scalar_bool_indices
    kinds, part = _indexing.IndexType, _indexing.ParsedIndex

    @functools.wraps(original)
    def expand(self: Any, *more: Any) -> Any:
        open_ = selecting()
        flags = {
            i: index.index
            for i, index in enumerate(self.indices)
            if index.typ is kinds.BOOLEAN and is_traced(index.index)
        }
        if open_ is None or not flags:
            return original(self, *more)
        plain = list(self.indices)
        for i in flags:
            plain[i] = part(index=True, typ=kinds.BOOLEAN, consumed_axes=())
        indexer, spec = original(_indexing.NDIndexer(shape=self.shape, indices=plain), *more)
        indices = list(indexer.indices)
        for i, flag in flags.items():
            (places,) = open_.nonzero(jnp.reshape(flag, (1,)))
            indices[i] = part(index=places, typ=kinds.ARRAY, consumed_axes=indices[i].consumed_axes)
        return _indexing.NDIndexer(shape=indexer.shape, indices=indices), spec

    return Patch(
        _indexing.NDIndexer,
        "expand_scalar_bool_indices",
        expand,
        why="x[flag] has a new axis of size 1 or 0, so the flag must be concrete. The program can "
        "compute the size.",
        since="numpy.indexing, 0.8",
        delete_when="JAX has arrays whose size is computed",
    )


def _check_mask(shape: Sequence[Any], index: Any, place: int) -> None:
    """Raise JAX's error for a mask of another shape than the axes that it is an index of."""
    own = tuple(np.shape(index.index))
    wanted = tuple(shape[i] for i in index.consumed_axes)
    if not all(a == b for a, b in zip(own, wanted, strict=True)):
        raise IndexError(
            "boolean index did not match shape of indexed array in index"
            f" {place}: got {own}, expected {list(wanted)}"
        )


def _sets(selecting: Selecting) -> Patch:
    """``jnp.unique`` and functions of sets ask whether arrays are concrete, and need it not."""

    def concrete_or_error(force: Any, value: Any, context: str = "") -> Any:
        if force is None and selecting() is not None and isinstance(value, jax.core.Tracer):
            return jax.lax.stop_gradient(value)  # a concrete value has no tangent either
        return _core.concrete_or_error(force, value, context)

    return Patch(
        _setops,
        "core",
        _Changed(_core, concrete_or_error=concrete_or_error),
        why="jnp.unique, setdiff1d and union1d refuse arrays that are not concrete, and then call "
        "functions that are patched here.",
        since="numpy.setops, 0.4",
        delete_when="JAX has arrays whose size is computed",
    )


class _Changed:
    """A module with some names replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _compressions(selecting: Selecting) -> Patch:
    original = jnp.compress

    @functools.wraps(original)
    def compress(condition: Any, a: Any, axis: Any = None, *, size: Any = None, **more: Any) -> Any:
        open_ = selecting()
        if open_ is None or size is not None or not is_open(condition):
            return original(condition, a, axis, size=size, **more)
        array = jnp.ravel(a) if axis is None else jnp.moveaxis(jnp.asarray(a), axis, 0)
        mask = condition.astype(bool)
        if mask.ndim != 1 or more.get("out") is not None:
            return original(condition, a, axis, size=size, **more)  # raises
        rows, own = array.shape[0], mask.shape[0]
        if is_symbolic_dim(rows) or is_symbolic_dim(own):
            if rows != own:
                open_.refuse(
                    f"compress: a condition of size {own} meets an axis of size {rows}",
                    "give a condition of the size of the axis",
                )
        elif own > rows:
            open_.refuse(
                f"compress: a condition of size {own} is longer than the axis, of size {rows}",
                "give a condition of the size of the axis",
            )
        else:
            array = array[:own]
        return jnp.moveaxis(array[mask], 0, 0 if axis is None else axis)

    return Patch(
        jnp,
        "compress",
        compress,
        why="jnp.compress and jnp.extract look at the condition beyond the end of the array.",
        since="numpy.lax_numpy.compress, 0.2",
        delete_when="JAX has arrays whose size is computed",
        everywhere=True,
    )


def _deletions(selecting: Selecting) -> Patch:
    original = jnp.delete

    @functools.wraps(original)
    def delete(arr: Any, obj: Any, axis: Any = None, **more: Any) -> Any:
        is_slice = isinstance(obj, slice) and any(map(is_traced, entries_of(obj)))
        if selecting() is None or not (is_slice or is_traced(obj)):
            return original(arr, obj, axis, **more)
        array = jnp.ravel(arr) if axis is None else jnp.moveaxis(jnp.asarray(arr), axis, 0)
        chosen = jnp.arange(array.shape[0])[obj] if is_slice else obj
        if chosen.dtype == bool:
            if chosen.shape != array.shape[:1]:
                raise ValueError(
                    "np.delete(arr, obj): for boolean indices, obj must be one-dimensional "
                    "with length matching specified axis."
                )
            mask = ~chosen
        elif np.shape(chosen) == () or more.get("assume_unique_indices"):
            return original(arr, obj, axis, assume_unique_indices=True)
        else:
            mask = jnp.ones(array.shape[:1], bool).at[chosen].set(False, mode="drop")
        return jnp.moveaxis(array[mask], 0, 0 if axis is None else axis)

    return Patch(
        jnp,
        "delete",
        delete,
        why="jnp.delete needs concrete indices, unless they are promised to be unique.",
        since="numpy.lax_numpy.delete, 0.2",
        delete_when="JAX has arrays whose size is computed",
        everywhere=True,
    )
