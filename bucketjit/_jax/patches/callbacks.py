"""``jax.debug.callback`` with operands of symbolic shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.export import is_symbolic_dim
from jax.interpreters import batching

from bucketjit._jax.primitives import primitives


def open_debug_callbacks() -> list[tuple[Any, Any, Any]]:
    """``(table, primitive, replacement)`` for debugging callbacks mapped over an open axis.

    JAX makes one equation for every row (``batching.fancy_primitive_batchers``,
    since 0.4.31); an open axis is scanned.
    """

    def rolled(prim: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def rule(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
            mapped = [i for i, d in enumerate(dims) if d is not None]
            if not (mapped and is_symbolic_dim(axis.size)):
                return original(axis, args, dims, **params)

            def step(carry: Any, rows: Any) -> Any:
                every = list(args)
                for i, row in zip(mapped, rows, strict=True):
                    every[i] = row
                prim.bind(*every, **params)
                return carry, None

            fronted = [jax.numpy.moveaxis(args[i], dims[i], 0) for i in mapped]
            jax.lax.scan(step, None, fronted)
            return [], ()

        return rule

    table = batching.fancy_primitive_batchers
    found = primitives("debug_callback", "debug_print")
    return [(table, p, rolled(p, table[p])) for p in found]
