"""``lax.scan`` of a symbolic length, and ``lax.associative_scan`` as one equation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax.patches.patch import Patch
from bucketjit._jax.primitives import modules_of_jax


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
            module,
            name,
            scan,
            why="lax.scan(f, c, None, length=n) insists on an int. It scans over an array of as "
            "many steps, whose elements nobody looks at.",
            since="lax.control_flow.loops.scan, 0.1",
            delete_when="lax.scan takes a symbolic length",
        )
        for module, name in holders("scan", original)
    ]


def holders(name: str, value: object) -> list[tuple[Any, str]]:
    """The imported modules that hold ``value`` under ``name``, each with the name.

    User code may have imported a function of JAX (``from jax.lax import scan``), so it must be
    replaced in every module, private ones included.

    Args:
        name: The name of the function.
        value: The function.

    Returns:
        Pairs of a module and the name.
    """
    modules = modules_of_jax().values()
    return [(m, name) for m in modules if getattr(m, "__dict__", {}).get(name) is value]


def associative_scans(
    replaced: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> list[Patch]:
    """``lax.associative_scan`` becomes one equation.

    JAX unrolls it in Python (``lax.control_flow.loops.associative_scan``, since 0.1).

    Args:
        replaced: Makes the replacement from the original.

    Returns:
        A patch for each module that holds the function.
    """
    original = jax.lax.associative_scan
    replacement = replaced(original)
    return [
        Patch(
            module,
            name,
            replacement,
            why="It slices in halves as often as the size allows, which no symbolic size tells. "
            "The derivatives of cumprod, cummax and the like call it by its name.",
            since="lax.control_flow.loops.associative_scan, 0.1",
            delete_when="associative_scan is a primitive",
        )
        for module, name in holders("associative_scan", original)
    ]
