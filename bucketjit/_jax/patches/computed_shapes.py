"""Arrays whose shape is computed: ``jnp.ones((k,))``, ``jnp.arange(k)``, ``jnp.repeat(x, counts)``.

Their size needs a bound, since an executable has room for the largest one. It is that of another
array which is cut to as many rows, or it follows from the program: a number of chosen elements is
at most the number of elements. See `bucketjit._ir.value_bounds`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
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

_MOST = 2**31 - 1  # the largest int32


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
    if not is_computed and not _are_sizes_and_floats(given):
        return original(start, stop, step, dtype, **more)
    # A symbolic size is a Python int to the unpadded run.
    kind = dtype or jnp.result_type(*(0 if is_symbolic_dim(x) else x for x in given))
    if stop is None:
        start, stop = 0, start
    first, last = _number(start), _number(stop)
    by = None if step is None else _number(step)
    if is_computed:
        size = open_.size(_count(first, last, by), "jnp.arange", is_clamped=True)
    else:
        size = _exact_count(start, stop, 1 if step is None else step)
    is_short = jnp.issubdtype(kind, np.floating) and jnp.finfo(kind).bits < 32
    working = np.float32 if is_short else kind
    places = lax.broadcasted_iota(working, (size,), 0)
    if by is not None:
        places = lax.convert_element_type(by, working) * places
    if not _is(first, 0):
        places = lax.convert_element_type(first, working) + places
    return lax.convert_element_type(places, kind)


def _are_sizes_and_floats(given: Sequence[Any]) -> bool:
    """Whether some are sizes, and the others numbers of which few binary digits are a fraction."""
    others = [x for x in given if not is_symbolic_dim(x)]
    return (
        len(others) < len(given)
        and any(isinstance(x, float) for x in others)
        and all(isinstance(x, int | float) and math.isfinite(x) for x in others)
        and all((x * _PARTS).is_integer() and abs(x) < _PARTS for x in map(float, others))
    )


_PARTS = 1 << 16  # of 1: with these, 64 bits hold a size, and quotients are as exact as Python's


def _exact_count(start: Any, stop: Any, step: Any) -> Any:
    """The number of elements of ``arange``, of sizes and floats, as Python computes it."""
    parts = math.lcm(*(Fraction(x).denominator for x in (start, stop, step) if _is_float(x)))
    first, last, by = (int(x * parts) if _is_float(x) else x * parts for x in (start, stop, step))
    first, last, by = (first, last, by) if by > 0 else (last, first, -by)
    return jax.core.max_dim(0, (last - first + (by - 1)) // by)


def _is_float(x: Any) -> bool:
    return isinstance(x, float)


def _count(first: Any, last: Any, by: Any) -> Any:
    """How many numbers there are from ``first`` to before ``last``, negative if there are none."""
    is_down = by is not None and not is_traced(by) and by < 0
    first, last, by = (last, first, -by) if is_down else (first, last, by)
    distance = last if _is(first, 0) else last - first
    if by is None or _is(by, 1):
        count = distance
    elif all(jnp.issubdtype(jnp.result_type(x), np.integer) for x in (distance, by)):
        count = -((-distance) // by) if is_traced(by) else (distance + (by - 1)) // by
    else:
        count = distance / by
    if jnp.issubdtype(jnp.result_type(count), np.integer):
        return count
    return jnp.ceil(count).astype(np.int32)


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
def _trim_zeros(
    open_: Any, original: Any, filt: Any, trim: str = "fb", axis: Any = None, **more: Any
) -> Any:
    """Its length may be computed. Since numpy.lax_numpy, 0.1. Until sizes can be computed."""
    sides = trim.lower()
    if not is_traced(filt) or more or not ("f" in sides or "b" in sides):
        return original(filt, trim, *(() if axis is None else (axis,)), **more)
    axes = range(filt.ndim) if axis is None else np.atleast_1d(axis)
    chosen = {int(i) % filt.ndim for i in axes}
    index = []
    for i in range(filt.ndim):
        if i not in chosen:
            index.append(slice(None))
            continue
        mask = (filt != 0).any(axis=tuple(j for j in range(filt.ndim) if j != i))
        size = as_value(filt.shape[i])
        places = lax.broadcasted_iota(np.int32, mask.shape, 0)
        first = jnp.min(jnp.where(mask, places, size), initial=_MOST)
        after = jnp.max(jnp.where(mask, places + 1, 0), initial=0)
        # With zeros alone, nothing is left: what is first is at the end then, and beyond it.
        stop = after if "b" in sides else jnp.where(after > 0, size, 0)
        index.append(slice(jnp.minimum(first, size) if "f" in sides else None, stop))
    return filt[tuple(index)]


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
