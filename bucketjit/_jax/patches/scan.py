"""``lax.scan`` of a symbolic length, and ``lax.associative_scan`` as one equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax.patches.patch import Patch, patch


@patch(jax.lax, "scan", everywhere=True)
def open_scans(
    original: Any, f: Any, init: Any, xs: Any = None, length: Any = None, *more: Any, **kw: Any
) -> Any:
    """``lax.scan`` accepts a symbolic length, with or without arrays.

    JAX insists on an int. Since lax.control_flow.loops, 0.1. Until it takes a symbolic length.
    """
    if not is_symbolic_dim(length):
        return original(f, init, xs, length, *more, **kw)
    if jax.tree_util.tree_leaves(xs):  # their leading axis has the length
        return original(f, init, xs, None, *more, **kw)
    steps = jax.lax.broadcasted_iota(np.int32, (length,), 0)
    # ``xs`` has no leaves, but `f` expects its tree, such as None or ().
    return original(lambda carry, _: f(carry, xs), init, steps, *more, **kw)


def associative_scans(replaced: Callable[[Any], Any]) -> Patch:
    """``lax.associative_scan`` becomes one equation.

    JAX slices in halves as often as the size allows, which no symbolic size tells. The derivatives
    of cumprod, cummax and the like call it by its name. Since lax.control_flow.loops, 0.1. Until it
    is a primitive.
    """
    return Patch(jax.lax, "associative_scan", replaced, everywhere=True)
