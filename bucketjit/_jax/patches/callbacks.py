"""``jax.debug.callback`` under ``jax.vmap`` over an axis of symbolic size."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.export import is_symbolic_dim
from jax.interpreters import batching

from bucketjit._jax.jaxprs import primitives
from bucketjit._jax.patches.patch import patch


def _rolled(prim: Any, original: Any, axis: Any, args: Any, dims: Any, **params: Any) -> Any:
    """Callbacks that are mapped over an open axis run once per row of it, in a scan.

    JAX makes one equation for every row, for which the size must be an int. Rules in the public
    ``primitive_batchers`` do not get the size. Since batching.fancy_primitive_batchers, 0.4.31.
    Until jax.vmap of jax.debug.callback takes an axis of symbolic size.
    """
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

    jax.lax.scan(step, None, [jax.numpy.moveaxis(args[i], dims[i], 0) for i in mapped])
    return [], ()


DEBUG_CALLBACKS = tuple(
    patch(batching.fancy_primitive_batchers, p)(functools.partial(_rolled, p))
    for p in primitives("debug_callback", "debug_print")
)
