"""``lax.scan`` over a symbolic length, and the functions that call ``lax.associative_scan``."""

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
    """``lax.scan`` takes a symbolic length and no arrays."""
    original = jax.lax.scan

    @functools.wraps(original)
    def scan(f: Any, init: Any, xs: Any = None, length: Any = None, *more: Any, **kw: Any) -> Any:
        if not is_symbolic_dim(length):
            return original(f, init, xs, length, *more, **kw)
        if jax.tree_util.tree_leaves(xs):
            return original(f, init, xs, None, *more, **kw)
        steps = jax.lax.broadcasted_iota(np.int32, (length,), 0)
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
    """The modules that have a function under its name: user code may have imported it."""
    modules = modules_of_jax().values()
    return [(m, name) for m in modules if getattr(m, "__dict__", {}).get(name) is value]


def associative_scans(
    replaced: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> list[Patch]:
    """``lax.associative_scan`` is one equation.

    Args:
        replaced: Makes the replacement of the original.
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
