"""``jax.debug.callback`` under ``jax.vmap`` over an axis of symbolic size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive
from jax.interpreters import batching

from bucketjit._jax.patches.patch import Patch
from bucketjit._jax.primitives import primitives


def open_debug_callbacks() -> list[Patch]:
    """Debugging callbacks that are mapped over an open axis run once per row of it, in a scan.

    JAX makes one equation for every row, for which the size must be an int. The rules are replaced
    in ``batching.fancy_primitive_batchers`` (since 0.4.31): rules in the public
    ``primitive_batchers`` do not get the size of the axis.
    """

    def rolled(prim: Primitive, original: Callable[..., Any]) -> Callable[..., Any]:
        def rule(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
            mapped = [i for i, d in enumerate(dims) if d is not None]
            if not (mapped and is_symbolic_dim(axis.size)):
                return original(axis, args, dims, **params)

            # A scan runs the rows in order, as JAX's equations do.
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
    return [
        Patch(
            table,
            p,
            rolled(p, table[p]),
            why="JAX makes one equation for every row.",
            since="batching.fancy_primitive_batchers, 0.4.31",
            delete_when="jax.vmap of jax.debug.callback takes an axis of symbolic size",
        )
        for p in found
    ]
