"""What has a size that the program computes, while a function is traced for buckets.

JAX raises for these in a trace, since their size is known at run time only. While a function is
traced for buckets, the program computes it; see `bucketjit._tracing.computed`. In other threads,
and in other traces, JAX's own functions run. With ``size=``, ``length=`` or
``total_repeat_length=`` they do what JAX does.

- Masks, here: ``x[mask]`` with masks of any rank, among slices, integers and index arrays;
  ``x.at[mask].set``, ``get``, ``add``, ``multiply``, ``min``, ``max``, ``apply`` and others;
  ``jnp.nonzero``, ``flatnonzero``, ``argwhere``, ``where`` of one argument; ``compress``,
  ``extract``; ``unique`` and ``unique_values``, ``unique_counts``, ``unique_inverse``,
  ``unique_all``; ``setdiff1d``, ``union1d``, ``intersect1d``, ``setxor1d``.
- Slices (`.slices`): ``x[:k]``, ``x[k:]``, ``x[a:b]``, ``x[..., :k, :m]``, clamped as
  in Python; ``x.at[:k].set`` and others; ``lax.dynamic_slice``, ``dynamic_slice_in_dim``,
  ``lax.slice`` and ``slice_in_dim`` with sizes and ends that are computed.
- Shapes, here, where the size has a bound: ``jnp.ones``, ``zeros``, ``full``,
  ``empty``, ``broadcast_to``, ``eye``, ``linspace``, ``tile``, ``lax.top_k``, random numbers,
  ``jax.random.split`` and ``permutation``, ``arange``; ``repeat`` by counts; ``bincount``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim
from jax.extend import core as jex_core

from bucketjit._jax import names
from bucketjit._jax.patches import patch
from bucketjit._jax.patches.slices import SLICES

# --- computed shapes ---

# Arrays whose shape is computed: ``jnp.ones((k,))``, ``jnp.arange(k)``, ``jnp.repeat(x, counts)``.
#
# Their size needs a bound, since an executable has room for the largest one. It is that of another
# array which is cut to as many rows, or it follows from the program: a number of chosen elements is
# at most the number of elements. See `bucketjit._tracing.computed.values`.


_core = names.module("core")


def _dimension(open_: Any, original: Any, size: Any, *more: Any, **named: Any) -> Any:
    """``jnp.ones((k,))``, random numbers etc. Since core, 0.1. Until sizes can be computed."""
    if is_symbolic_dim(size):  # JAX raises and catches an error, which holds its own frame
        return size
    if not patch.is_traced_size(size):
        return original(size, *more, **named)
    return open_.size(size, "an array of a computed shape")


def _with_sizes(
    position: int, keyword: str, open_: Any, original: Any, *args: Any, **kwargs: Any
) -> Any:
    """It takes a size for a traced integer. Since 0.1. Until sizes can be computed."""
    arguments = list(args)
    if keyword in kwargs:
        kwargs[keyword] = _sizes(open_, kwargs[keyword], original.__name__)
    elif len(arguments) > position:
        arguments[position] = _sizes(open_, arguments[position], original.__name__)
    return original(*arguments, **kwargs)


def _sizes(open_: Any, value: Any, of: str) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_sizes(open_, x, of) for x in value)
    return open_.size(value, of) if patch.is_traced_size(value) else value


@patch.opened(jnp, "arange")
def _arange(
    open_: Any,
    original: Any,
    start: Any,
    stop: Any = None,
    step: Any = None,
    dtype: Any = None,
    **more: Any,
) -> Any:
    """Its ends may be computed. Since numpy.lax_numpy, 0.1. Until sizes can be computed."""
    numbers = [x for x in (start, stop, step) if x is not None]
    is_computed = any(patch.is_traced(x) and np.ndim(x) == 0 for x in numbers)
    has_size = any(map(is_symbolic_dim, numbers)) and any(isinstance(x, float) for x in numbers)
    if not (is_computed or has_size):
        return original(start, stop, step, dtype, **more)
    # A symbolic size is a Python int to the unpadded run.
    kind = dtype or jnp.result_type(*(0 if is_symbolic_dim(x) else x for x in numbers))
    ends = (0, start) if stop is None else (start, stop)
    first, last, by = map(_whole, (*ends, 1 if step is None else step))
    if None in (first, last, by) or patch.is_traced(by):
        if not is_computed:
            return original(start, stop, step, dtype, **more)
        open_.refuse(
            "jnp.arange: an end that is computed is no integer, or the step is none",
            "compute with whole numbers, as in 0.5 * jnp.arange(k)",
        )
    if is_computed:
        first, last, by = map(_number, (first, last, by))
        size = open_.size(_count(first, last, by), "jnp.arange", is_clamped=True)
    else:
        size = jax.core.max_dim(0, _count(first, last, by))
    is_short = jnp.issubdtype(kind, np.floating) and jnp.finfo(kind).bits < 32
    working = np.float32 if is_short else kind
    places = lax.broadcasted_iota(working, (size,), 0)
    if not _is(by, 1):
        places = lax.convert_element_type(_number(by), working) * places
    if not _is(first, 0):
        places = lax.convert_element_type(_number(first), working) + places
    return lax.convert_element_type(places, kind)


def _whole(x: Any) -> Any:
    """A size, an integer, or one that a float is; None for another number."""
    if isinstance(x, float):
        return int(x) if x.is_integer() else None
    return None if patch.is_traced(x) and not patch.is_traced_size(x) else x


def _count(first: Any, last: Any, by: Any) -> Any:
    """How many numbers there are from ``first`` to before ``last``, negative if there are none."""
    first, last, by = (last, first, -by) if by < 0 else (first, last, by)
    distance = last if _is(first, 0) else last - first
    return distance if by == 1 else (distance + (by - 1)) // by


def _is(x: Any, number: int) -> bool:
    return not patch.is_traced(x) and x == number


def _number(x: Any) -> Any:
    return patch.as_value(x) if is_symbolic_dim(x) else x


@patch.opened(jnp, "repeat")
def _repeat(
    open_: Any, original: Any, a: Any, repeats: Any, axis: Any = None, **options: Any
) -> Any:
    """Its counts may be traced. Since numpy.lax_numpy, 0.1. Until sizes can be computed."""
    if options.get("total_repeat_length") is not None or not patch.is_traced(repeats):
        return original(a, repeats, axis, **options)
    array = jnp.ravel(a) if axis is None else jnp.moveaxis(jnp.asarray(a), axis, 0)
    counts = repeats.astype(np.int32) if repeats.dtype == bool else repeats
    counts = jnp.broadcast_to(jnp.ravel(counts), array.shape[:1])
    size = open_.size(jnp.sum(counts), "jnp.repeat", "counts")
    # A row ends where the next one begins: count the ends up to each position.
    ends = jnp.cumsum(counts)
    rows = jnp.cumsum(jnp.zeros((size,), np.int32).at[ends].add(1, mode="drop"))
    return jnp.moveaxis(patch.at_places(array, rows, 0), 0, 0 if axis is None else axis)


@patch.opened(jnp, "bincount")
def _bincount(
    open_: Any, original: Any, x: Any, weights: Any = None, minlength: Any = 0, **options: Any
) -> Any:
    """Its length may be computed. Since numpy.lax_numpy, 0.2. Until sizes can be computed."""
    if options.get("length") is not None or not patch.is_traced(x) or np.ndim(x) != 1:
        return original(x, weights, minlength, **options)
    values = x.astype(np.int32) if x.dtype == bool else x
    if not jnp.issubdtype(values.dtype, np.integer):
        return original(x, weights, minlength, **options)  # raises
    count = jnp.maximum(jnp.max(values, initial=0), 0).astype(np.int32) + 1
    if is_symbolic_dim(x.shape[0]) or x.shape[0] == 0:
        count = jnp.where(patch.as_value(x.shape[0]) > 0, count, 0)
    size = open_.size(jnp.maximum(count, _number(minlength)), "jnp.bincount", "x")
    return original(values, weights, **{**options, "length": size})


@patch.opened(jnp, "trim_zeros")
def _trim_zeros(open_: Any, original: Any, filt: Any, *more: Any, **named: Any) -> Any:
    """It is refused. Since numpy.lax_numpy, 0.1. Until sizes can be computed."""
    if not patch.is_traced(filt):
        return original(filt, *more, **named)
    open_.refuse("jnp.trim_zeros: its size is computed", "slice by positions of jnp.nonzero")


# Functions of whose arguments one is a size, or a tuple of sizes, with its position and its name.
_TAKE_A_SIZE = (
    (jnp, "tile", 1, "reps"),
    (lax, "top_k", 1, "k"),
    (jax.random, "split", 1, "num"),
    (jax.random, "permutation", 1, "x"),
)

SHAPES = (
    *(
        patch.opened(_core, name, everywhere=False)(_dimension)
        for name in ("_canonicalize_dimension", "concrete_dim_or_error")
    ),
    *(
        patch.opened(owner, name)(functools.partial(_with_sizes, position, keyword))
        for owner, name, position, keyword in _TAKE_A_SIZE
    ),
    _arange,
    _repeat,
    _bincount,
    _trim_zeros,
)
"""Functions that make arrays of a computed shape."""


# --- masks ---

_indexing = names.module("numpy.indexing")
_setops = names.module("numpy.setops")
_partial_eval = names.module("interpreters.partial_eval")


@patch.opened(jnp, "nonzero")
def _nonzero(open_: Any, original: Any, a: Any, **options: Any) -> Any:
    """Its mask need not be concrete. Since numpy.lax_numpy, 0.1. Until sizes can be computed."""
    is_computed = options.get("size") is None and patch.is_open(a)
    return open_.nonzero(a) if is_computed else original(a, **options)


_Indexer = _indexing.NDIndexer


@patch.opened(_Indexer, "expand_bool_indices", everywhere=False)
def _mask_indices(open_: Any, original: Any, self: Any) -> Any:
    """``x[mask]`` and ``x.at[mask]``. Since numpy.indexing, 0.8. Until sizes can be computed."""
    indices: list[Any] = []
    for place, index in enumerate(self.indices):
        is_mask = index.typ.name == "BOOLEAN"
        if is_mask and patch.is_traced(index.index) and not patch.is_open(index.index):
            indices.append(index)  # see `_flag_indices`
            continue
        if not is_mask or not patch.is_open(index.index):
            indices += original(_Indexer(shape=self.shape, indices=[index])).indices
            continue
        _check_mask(self.shape, index, place)
        positions = open_.nonzero(index.index)
        indices += [
            _as_array(index, array, (axis,))
            for array, axis in zip(positions, index.consumed_axes, strict=True)
        ]
    return _Indexer(shape=self.shape, indices=indices)


def _as_array(index: Any, array: Any, axes: tuple[int, ...]) -> Any:
    return index._replace(index=array, typ=type(index.typ).ARRAY, consumed_axes=axes)


@patch.opened(_Indexer, "expand_scalar_bool_indices", everywhere=False)
def _flag_indices(open_: Any, original: Any, self: Any, *more: Any) -> Any:
    """``x[flag]`` has a new axis of size 1 or 0. Since 0.8. Until sizes can be computed."""
    flags = {
        i: index.index
        for i, index in enumerate(self.indices)
        if index.typ.name == "BOOLEAN" and patch.is_traced(index.index)
    }
    plain = [
        index._replace(index=True, consumed_axes=()) if i in flags else index
        for i, index in enumerate(self.indices)
    ]
    indexer, spec = original(_Indexer(shape=self.shape, indices=plain), *more)
    indices = list(indexer.indices)
    for i, flag in flags.items():
        (places,) = open_.nonzero(jnp.reshape(flag, (1,)))
        indices[i] = _as_array(indices[i], places, indices[i].consumed_axes)
    return _Indexer(shape=indexer.shape, indices=indices), spec


def _check_mask(shape: Sequence[Any], index: Any, place: int) -> None:
    """Raise JAX's error for a mask of another shape than the axes that it is an index of."""
    of_mask = tuple(np.shape(index.index))
    wanted = tuple(shape[i] for i in index.consumed_axes)
    if not all(a == b for a, b in zip(of_mask, wanted, strict=True)):
        raise IndexError(
            "boolean index did not match shape of indexed array in index"
            f" {place}: got {of_mask}, expected {list(wanted)}"
        )


class _CoreOfSets(names.Forwarding):
    """The module that functions of sets ask for concrete arrays, which they need not be here.

    They call functions that are patched here. Since numpy.setops, 0.4. Until sizes can be computed.
    """

    @staticmethod
    def concrete_or_error(force: Any, value: Any, context: str = "") -> Any:
        if force is None and patch.selecting() is not None and isinstance(value, jax.core.Tracer):
            return jax.lax.stop_gradient(value)  # a concrete value has no tangent either
        return jex_core.concrete_or_error(force, value, context)


_SETS = patch.Patch(_setops, "core", _CoreOfSets)


@patch.opened(jnp, "compress")
def _compress(
    open_: Any, original: Any, condition: Any, a: Any, axis: Any = None, **options: Any
) -> Any:
    """And ``jnp.extract``. Since numpy.lax_numpy, 0.2. Until sizes can be computed."""
    if options.get("size") is not None or not patch.is_open(condition):
        return original(condition, a, axis, **options)
    array = jnp.ravel(a) if axis is None else jnp.moveaxis(jnp.asarray(a), axis, 0)
    mask = condition.astype(bool)
    if mask.ndim != 1 or options.get("out") is not None:
        return original(condition, a, axis, **options)  # raises
    rows, size = array.shape[0], mask.shape[0]
    is_open_size = is_symbolic_dim(rows) or is_symbolic_dim(size)
    if (rows != size) if is_open_size else size > rows:
        open_.refuse(
            f"compress: a condition of size {size} meets an axis of size {rows}",
            "give a condition of the size of the axis",
        )
    if not is_open_size:
        array = array[:size]
    return jnp.moveaxis(array[mask], 0, 0 if axis is None else axis)


@patch.opened(jnp, "delete")
def _delete(open_: Any, original: Any, arr: Any, obj: Any, axis: Any = None, **more: Any) -> Any:
    """It is refused, but for unique indices. Since 0.2. Until sizes can be computed."""
    is_computed = patch.is_traced(obj) and not more.get("assume_unique_indices")
    if is_computed or patch.has_traced_slice(obj):
        open_.refuse("jnp.delete: its size is computed", "select what is left, as in x[~mask]")
    return original(arr, obj, axis, **more)


def _ended(open_: Any, original: Any, self: Any) -> None:
    """What makes sizes knows values of a trace until it ends.

    There JAX looks for values that outlive it (jax_check_tracer_leaks). Since core.Trace, 0.4.36.
    Until sizes can be computed.
    """
    open_.ended(self)
    original(self)


_ENDS = tuple(
    patch.opened(owner, "invalidate", everywhere=False)(_ended)
    for owner in (jax.core.Trace, _partial_eval.DynamicJaxprTrace)
)

_MASKS = (_nonzero, _mask_indices, _flag_indices, _SETS, _compress, _delete)

SELECTIONS = (*_MASKS, *SLICES, *SHAPES, *_ENDS)
"""All patches for sizes that the program computes."""
