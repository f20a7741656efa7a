"""``lax.scan`` over a symbolic length, and the functions that call ``lax.associative_scan``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax.primitives import modules_of_jax


def open_scans() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` for scans of a symbolic length over nothing else.

    ``lax.scan(f, c, None, length=n)`` insists on an int (``loops.scan``, since 0.1), but scans
    over an array of as many steps, whose elements nobody looks at.
    """
    original = jax.lax.scan

    @functools.wraps(original)
    def scan(f: Any, init: Any, xs: Any = None, length: Any = None, *more: Any, **kw: Any) -> Any:
        if not is_symbolic_dim(length):
            return original(f, init, xs, length, *more, **kw)
        if jax.tree_util.tree_leaves(xs):
            return original(f, init, xs, None, *more, **kw)
        steps = jax.lax.broadcasted_iota(np.int32, (length,), 0)
        return original(lambda carry, _: f(carry, xs), init, steps, *more, **kw)

    return [(module, name, scan) for module, name in holders("scan", original)]


def holders(name: str, value: Any) -> list[tuple[Any, str]]:
    """The modules that have a function under its name: user code may have imported it."""
    modules = modules_of_jax().values()
    return [(m, name) for m in modules if getattr(m, "__dict__", {}).get(name) is value]


def associative_scans() -> tuple[Callable[..., Any], list[Any]]:
    """``lax.associative_scan`` and the modules that hold it under its name.

    JAX calls it by its name in ``control_flow.loops`` for the derivatives of ``cumprod``,
    ``cummax`` and the like.
    """
    original = jax.lax.associative_scan
    return original, [module for module, _ in holders("associative_scan", original)]
