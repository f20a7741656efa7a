"""Functions that compute a shape: ``len``, ``-1`` in a reshape, ``jnp.repeat``."""

from __future__ import annotations

import dis
import traceback
from collections.abc import Sequence
from typing import Any

import jax
from jax.errors import InconclusiveDimensionOperation
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Patch, patch
from bucketjit._jax.size_reports import Size
from bucketjit._jax.user_code import raised_by_user


def _length_of(x: Any) -> Any:
    shape = getattr(x, "shape", ())
    return shape[0] if shape and is_symbolic_dim(shape[0]) else len(x)


def _lengths(builtin: Any) -> Any:
    """``len(x)`` in jnp.convolve, correlate and digitize may be a symbolic size.

    Python insists on an int, and looks a name up in the globals of a module before the builtins.
    Since numpy.lax_numpy, 0.1. Until jnp.convolve takes arrays of symbolic size.
    """
    return _length_of


lengths = Patch(names.module("numpy.lax_numpy"), "len", _lengths)


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
