"""`sized`: the first ``n`` rows of arrays, for an ``n`` that is computed in the program."""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._jax.patches.patch import selecting
from bucketjit.errors import ArgumentError

T = TypeVar("T")


def sized(tree: T, n: object, axis: int = 0) -> T:
    """Cut arrays to their first ``n`` positions, where ``n`` may be computed in the program.

    In a function that a bucketed function traces, the results have a size that is known at run time
    only, and all later operations are masked by it. Outside of a trace this is a slice.

    Args:
        tree: An array, or a pytree of arrays, all of one size along the axis.
        n: The number of positions: an integer scalar from 0 to that size.
        axis: The axis.

    Returns:
        The arrays, cut.

    Raises:
        ArgumentError: ``n`` is no integer scalar, or is out of bounds; ``tree`` holds no array; the
            arrays differ in size along the axis, or lack it. In a bucketed function, an ``n`` out
            of bounds is noticed when the program has run.
        TypeError: ``n`` is traced by ``jax.jit`` outside of a bucketed function.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> import bucketjit
        >>> @bucketjit.jit
        ... def before_the_first_zero(x):
        ...     return bucketjit.sized(x, jnp.argmax(x == 0)).sum()
        >>> float(before_the_first_zero(np.array([1, 2, 0, 4, 5], np.float32)))
        3.0
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if not leaves:
        raise ArgumentError("sized: expected arrays, got a tree without any")
    arrays = [x if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x) for x in leaves]
    for x in arrays:
        if not -x.ndim <= axis < x.ndim:
            raise ArgumentError(f"sized: there is no axis {axis} in an array of shape {x.shape}")
    rows = arrays[0].shape[axis]
    if others := [x.shape for x in arrays if x.shape[axis] != rows]:
        raise ArgumentError(
            f"sized: expected arrays of one size along axis {axis}, got shapes {arrays[0].shape} "
            f"and {others[0]}"
        )
    if not _is_whole_number(n):
        shown = jax.typeof(n).str_short() if isinstance(n, jax.Array | np.ndarray) else repr(n)
        raise ArgumentError(f"sized: expected an integer scalar n, got {shown}")
    if not isinstance(n, jax.core.Tracer):
        size = operator.index(n)  # type: ignore[arg-type]
        cut = [_slice(x, size, rows, axis) for x in arrays]
    else:
        opened = selecting()
        if opened is None:
            raise TypeError(
                "sized: n is traced, so its value is not known. Call the function by a "
                "bucketjit.BucketedExec, which computes sizes in the program; under jax.jit a "
                "size must be a Python int"
            )
        first = [jnp.moveaxis(jnp.asarray(x), axis, 0) for x in arrays]
        cut = [jnp.moveaxis(x, 0, axis) for x in opened.cut(first, n)]
    return jax.tree_util.tree_unflatten(structure, cut)


def _is_whole_number(n: object) -> bool:
    if isinstance(n, jax.Array | np.ndarray | np.generic):
        return n.ndim == 0 and bool(jnp.issubdtype(n.dtype, jnp.integer))
    return isinstance(n, int) and not isinstance(n, bool)


def _slice(array: Any, n: int, rows: Any, axis: int) -> Any:
    if n < 0 or n > rows:
        raise ArgumentError(
            f"sized: n is {n}, and the arrays have {rows} rows; give a number from 0 to {rows}"
        )
    return array[(slice(None),) * (axis % array.ndim) + (slice(n),)]
