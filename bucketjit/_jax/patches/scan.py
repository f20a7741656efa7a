"""``lax.scan`` of a symbolic length, and ``lax.associative_scan`` as one equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax.patches.patch import Patch, Reasons, patch

_LENGTH = Reasons(
    why="lax.scan(f, c, None, length=n) insists on an int. It scans over an array of as many "
    "steps, whose elements nobody looks at.",
    since="lax.control_flow.loops.scan, 0.1",
    delete_when="lax.scan takes a symbolic length",
)

_HALVES = Reasons(
    why="It slices in halves as often as the size allows, which no symbolic size tells. The "
    "derivatives of cumprod, cummax and the like call it by its name.",
    since="lax.control_flow.loops.associative_scan, 0.1",
    delete_when="associative_scan is a primitive",
)


@patch(jax.lax, "scan", _LENGTH, everywhere=True)
def open_scans(
    original: Any, f: Any, init: Any, xs: Any = None, length: Any = None, *more: Any, **kw: Any
) -> Any:
    """``lax.scan`` accepts a symbolic length, with or without arrays."""
    if not is_symbolic_dim(length):
        return original(f, init, xs, length, *more, **kw)
    if jax.tree_util.tree_leaves(xs):  # their leading axis has the length
        return original(f, init, xs, None, *more, **kw)
    steps = jax.lax.broadcasted_iota(np.int32, (length,), 0)
    # ``xs`` has no leaves, but `f` expects its tree, such as None or ().
    return original(lambda carry, _: f(carry, xs), init, steps, *more, **kw)


def associative_scans(replaced: Callable[[Any], Any]) -> Patch:
    """``lax.associative_scan`` becomes one equation, in JAX unrolled in Python."""
    return Patch(jax.lax, "associative_scan", replaced, _HALVES, everywhere=True)
