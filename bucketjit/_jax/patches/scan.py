"""``lax.scan`` of a symbolic length, and ``lax.associative_scan`` as one equation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax.patches.patch import Patch


def open_scans() -> list[Patch]:
    """``lax.scan`` accepts a symbolic length, with or without arrays.

    JAX insists on an int (``lax.control_flow.loops.scan``, since 0.1).
    """
    original = jax.lax.scan

    @functools.wraps(original)
    def scan(f: Any, init: Any, xs: Any = None, length: Any = None, *more: Any, **kw: Any) -> Any:
        if not is_symbolic_dim(length):
            return original(f, init, xs, length, *more, **kw)
        if jax.tree_util.tree_leaves(xs):  # their leading axis has the length
            return original(f, init, xs, None, *more, **kw)
        steps = jax.lax.broadcasted_iota(np.int32, (length,), 0)
        # ``xs`` has no leaves, but `f` expects its tree, such as None or ().
        return original(lambda carry, _: f(carry, xs), init, steps, *more, **kw)

    return [
        Patch(
            jax.lax,
            "scan",
            scan,
            why="lax.scan(f, c, None, length=n) insists on an int. It scans over an array of as "
            "many steps, whose elements nobody looks at.",
            since="lax.control_flow.loops.scan, 0.1",
            delete_when="lax.scan takes a symbolic length",
            everywhere=True,
        )
    ]


def associative_scans(
    replaced: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> list[Patch]:
    """``lax.associative_scan`` becomes one equation.

    JAX unrolls it in Python (``lax.control_flow.loops.associative_scan``, since 0.1).
    """
    return [
        Patch(
            jax.lax,
            "associative_scan",
            replaced(jax.lax.associative_scan),
            why="It slices in halves as often as the size allows, which no symbolic size tells. "
            "The derivatives of cumprod, cummax and the like call it by its name.",
            since="lax.control_flow.loops.associative_scan, 0.1",
            delete_when="associative_scan is a primitive",
            everywhere=True,
        )
    ]
