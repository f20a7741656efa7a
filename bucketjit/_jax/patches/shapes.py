"""Shapes and indices that depend on a symbolic size: ``len``, ``-1`` in a reshape, ``x[i]``."""

from __future__ import annotations

import dis
import math
import threading
import traceback
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.errors import InconclusiveDimensionOperation
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.arrays import explicit_sharding
from bucketjit._jax.jaxprs import value_of_size
from bucketjit._jax.number_hooks import Size
from bucketjit._jax.patches.patch import patch
from bucketjit._jax.user_code import raised_by_user


@patch(names.module("numpy.lax_numpy"), "len")
def lengths(builtin: Any, x: Any) -> Any:
    """``len(x)`` in jnp.convolve, correlate and digitize may be a symbolic size.

    Python insists on an int, and looks a name up in the globals of a module before the builtins.
    Since numpy.lax_numpy, 0.1. Until jnp.convolve takes arrays of symbolic size.
    """
    shape = getattr(x, "shape", ())
    return shape[0] if shape and is_symbolic_dim(shape[0]) else len(x)


@patch(names.module("numpy.lax_numpy"), "_squeeze")
def squeezes(original: Any, array: Any, axis: Sequence[int] | None) -> Any:
    """``jnp.squeeze(x)`` compares sizes with 1. Since numpy.lax_numpy, 0.4. Until JAX does so."""
    if axis is None:
        axis = tuple(i for i, size in enumerate(array.shape) if size == 1)
    return original(array, axis)


@patch(names.module("core"), "divide_shape_sizes")
def inferred_sizes(original: Any, before: Sequence[Any], after: Sequence[Any]) -> Any:
    """The size that JAX infers for -1 in a reshape to ``(2, -1)`` equals the user's ``n // 2``.

    JAX divides by -2 and negates the result. Since core, 0.2. Until JAX finds -floordiv(n, -2) and
    n // 2 equal.
    """
    sizes = (*before, *after)
    closed = [d for d in sizes if not is_symbolic_dim(d)]
    if len(closed) == len(sizes) or 0 in closed or -1 not in closed:
        return original(before, after)
    # The caller negates the result, as the product of ``after`` has the factor -1.
    return -original(before, [d for d in after if is_symbolic_dim(d) or d != -1])


def fresh_dimension(like: Any, name: str) -> Any:
    """A new dimension variable in the scope of a symbolic size.

    The public ``jax.export.symbolic_shape`` takes the scope, but only the private type of sizes has
    it (its attribute ``scope``, since 0.4.24).
    """
    return jax.export.symbolic_shape(name, scope=like.scope)[0]


def repeats_by_size(error: BaseException) -> bool:
    """Whether an error comes from a loop over an open axis, or from ``[x] * n`` with an open size.

    The errors of JAX do not name it (``shape_poly._DimExpr.__rmul__``, in 0.10 and 0.12), so the
    instruction that raised in user code, and the frames of the traceback, are looked at.
    """
    kinds = TypeError | AttributeError | InconclusiveDimensionOperation
    if not isinstance(error, kinds):
        return False
    step = raised_by_user(error)
    if step is not None:
        # The instruction of the user that raised: a loop is one of these two.
        operation = dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]]
        if operation in ("GET_ITER", "FOR_ITER"):
            return True
    by_size = Size.__rmul__.__code__
    return any(frame.f_code is by_size for frame, _ in traceback.walk_tb(error.__traceback__))


# --- indexing ---

# Indexing where the index or its type depends on a symbolic size.


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


# --- size decisions ---

# A bound of the steps that JAX takes to decide a comparison of symbolic sizes.


class _TooLong(Exception):
    """A comparison of sizes takes too many steps."""


# Most steps of one comparison; nearly all take fewer than 100. After `_PATIENCE` comparisons of a
# scope have been given up, later ones in it get `_FEWER_STEPS`.
_MOST_STEPS, _FEWER_STEPS, _PATIENCE = 2000, 100, 3

_deciding = threading.local()  # `left`: the steps left to the comparison of this thread, or None

_given_up: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # in each scope

_MOST_CONSTRAINTS = 300  # known to a decision; beyond, combining them derives no more

_owner = names.module("export.shape_poly_decision")._DecisionByElimination


@patch(_owner, "combine_constraint_with_existing")
def _combined(original: Any, self: Any, *constraint: Any) -> set[Any]:
    """No more is derived where much is known. Since export, 0.4.27. Until `_bounds`."""
    count = sum(map(len, self._expr_constraints.values()))
    return set() if count > _MOST_CONSTRAINTS else original(self, *constraint)


@patch(_owner, "_bounds_for_sorted_terms")
def _bounds(original: Any, self: object, scope: object, *rest: object) -> tuple[Any, Any]:
    """A comparison that takes too long counts as unknown: it becomes a guard of the program.

    JAX tries all ways to combine an expression with what is known of its terms, which takes minutes
    for sizes that are halved five times over, each half compared with 1. Since
    export.shape_poly_decision, 0.4.27. Until JAX bounds the steps.
    """
    left = getattr(_deciding, "left", None)
    if left is None:  # the outermost call of a comparison; the function calls itself
        is_late = _given_up.get(scope, 0) >= _PATIENCE
        _deciding.left = _FEWER_STEPS if is_late else _MOST_STEPS
        try:
            return original(self, scope, *rest)
        except _TooLong:
            _given_up[scope] = _given_up.get(scope, 0) + 1
            return -math.inf, math.inf
        finally:
            _deciding.left = None
    if left == 0:
        raise _TooLong
    _deciding.left = left - 1
    return original(self, scope, *rest)


BRIEF_DECISIONS = (_bounds, _combined)
"""The procedure that compares symbolic sizes gives up after a number of steps."""
