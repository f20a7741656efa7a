"""Arrays whose shape is computed: ``jnp.ones((k,))``, ``jnp.arange(k)``, ``jnp.repeat(x, counts)``.

Their size needs a bound, since an executable has room for the largest one. It is that of another
array which is cut to as many rows, or it follows from the program: a number of chosen elements is
at most the number of elements. See `bucketjit._ir.value_bounds`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.traced_sizes import (
    as_value,
    at_places,
    is_traced,
    is_traced_size,
    opened,
)

_core = names.module("core")


def _dimension(open_: Any, original: Any, size: Any, *more: Any, **named: Any) -> Any:
    """``jnp.ones((k,))``, random numbers etc. Since core, 0.1. Until sizes can be computed."""
    if is_symbolic_dim(size):  # JAX raises and catches an error, which holds its own frame
        return size
    if not is_traced_size(size):
        return original(size, *more, **named)
    return open_.size(size, "an array of a computed shape")


def _with_sizes(
    position: int, keyword: str, open_: Any, original: Any, *args: Any, **kwargs: Any
) -> Any:
    """It takes a size for a traced integer. Since 0.1. Until sizes can be computed."""
    given = list(args)
    if keyword in kwargs:
        kwargs[keyword] = _sizes(open_, kwargs[keyword], original.__name__)
    elif len(given) > position:
        given[position] = _sizes(open_, given[position], original.__name__)
    return original(*given, **kwargs)


def _sizes(open_: Any, value: Any, of: str) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_sizes(open_, x, of) for x in value)
    return open_.size(value, of) if is_traced_size(value) else value


@opened(jnp, "arange")
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
    given = [x for x in (start, stop, step) if x is not None]
    is_computed = any(is_traced(x) and np.ndim(x) == 0 for x in given)
    is_open = any(map(is_symbolic_dim, given)) and any(isinstance(x, float) for x in given)
    if not (is_computed or is_open):
        return original(start, stop, step, dtype, **more)
    # A symbolic size is a Python int to the unpadded run.
    kind = dtype or jnp.result_type(*(0 if is_symbolic_dim(x) else x for x in given))
    ends = (0, start) if stop is None else (start, stop)
    first, last, by = map(_whole, (*ends, 1 if step is None else step))
    if None in (first, last, by) or is_traced(by):
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
    return None if is_traced(x) and not is_traced_size(x) else x


def _count(first: Any, last: Any, by: Any) -> Any:
    """How many numbers there are from ``first`` to before ``last``, negative if there are none."""
    first, last, by = (last, first, -by) if by < 0 else (first, last, by)
    distance = last if _is(first, 0) else last - first
    return distance if by == 1 else (distance + (by - 1)) // by


def _is(x: Any, number: int) -> bool:
    return not is_traced(x) and x == number


def _number(x: Any) -> Any:
    return as_value(x) if is_symbolic_dim(x) else x


@opened(jnp, "repeat")
def _repeat(
    open_: Any,
    original: Any,
    a: Any,
    repeats: Any,
    axis: Any = None,
    *,
    total_repeat_length: Any = None,
    **more: Any,
) -> Any:
    """Its counts may be traced. Since numpy.lax_numpy, 0.1. Until sizes can be computed."""
    if total_repeat_length is not None or not is_traced(repeats):
        return original(a, repeats, axis, total_repeat_length=total_repeat_length, **more)
    array = jnp.ravel(a) if axis is None else jnp.moveaxis(jnp.asarray(a), axis, 0)
    counts = repeats.astype(np.int32) if repeats.dtype == bool else repeats
    counts = jnp.broadcast_to(jnp.ravel(counts), array.shape[:1])
    size = open_.size(jnp.sum(counts), "jnp.repeat", "counts")
    # A row ends where the next one begins: count the ends up to each position.
    ends = jnp.cumsum(counts)
    rows = jnp.cumsum(jnp.zeros((size,), np.int32).at[ends].add(1, mode="drop"))
    return jnp.moveaxis(at_places(array, rows, 0), 0, 0 if axis is None else axis)


@opened(jnp, "bincount")
def _bincount(
    open_: Any,
    original: Any,
    x: Any,
    weights: Any = None,
    minlength: Any = 0,
    *,
    length: Any = None,
    **more: Any,
) -> Any:
    """Its length may be computed. Since numpy.lax_numpy, 0.2. Until sizes can be computed."""
    if length is not None or not is_traced(x) or np.ndim(x) != 1:
        return original(x, weights, minlength, length=length, **more)
    values = x.astype(np.int32) if x.dtype == bool else x
    if not jnp.issubdtype(values.dtype, np.integer):
        return original(x, weights, minlength, **more)  # raises
    found = jnp.maximum(jnp.max(values, initial=0), 0).astype(np.int32) + 1
    if is_symbolic_dim(x.shape[0]):
        found = jnp.where(as_value(x.shape[0]) > 0, found, 0)
    size = open_.size(jnp.maximum(found, _number(minlength)), "jnp.bincount", "x")
    return original(values, weights, length=size, **more)


@opened(jnp, "trim_zeros")
def _trim_zeros(open_: Any, original: Any, filt: Any, *more: Any, **named: Any) -> Any:
    """It is refused. Since numpy.lax_numpy, 0.1. Until sizes can be computed."""
    if not is_traced(filt):
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
        opened(_core, name, everywhere=False)(_dimension)
        for name in ("_canonicalize_dimension", "concrete_dim_or_error")
    ),
    *(
        opened(owner, name)(functools.partial(_with_sizes, position, keyword))
        for owner, name, position, keyword in _TAKE_A_SIZE
    ),
    _arange,
    _repeat,
    _bincount,
    _trim_zeros,
)
"""Functions that make arrays of a computed shape."""
