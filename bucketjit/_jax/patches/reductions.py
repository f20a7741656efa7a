"""The derivative of ``lax.reduce`` for arrays with an axis of symbolic size."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.patch import patch


@patch(names.module("lax.lax"), "_reduce_jvp")
def open_reductions(
    original: Any, reducer: Any, init: Any, primals: Any, tangents: Any, axes: Any
) -> Any:
    """Closed axes are halved, as JAX does; of an open one the last running product is taken.

    JAX halves only where no size at all is symbolic. Since lax.lax, 0.2. Until the derivative of
    jnp.prod takes an axis of symbolic size.
    """
    shape = primals[0].shape
    opened = [a for a in axes if is_symbolic_dim(shape[a])]
    is_of_jax = getattr(reducer, "__module__", "") == "jax._src.lax.lax"
    # JAX pads odd halves with the start value, so how often that counts depends on the size. Only
    # for JAX's own product, which starts with 1, this does not matter.
    if not any(map(is_symbolic_dim, shape)) or (opened and not is_of_jax):
        return original(reducer, init, primals, tangents, axes)
    kept = [a for a in range(len(shape)) if a not in axes]

    def flat(x: Any) -> Any:
        for a in opened:
            running = jax.lax.cumprod(x, axis=a)
            x = jax.lax.dynamic_slice_in_dim(running, x.shape[a] - 1, 1, axis=a)
        x = jax.lax.transpose(x, (*axes, *kept))
        return jax.lax.reshape(x, (math.prod(x.shape[: len(axes)]), *x.shape[len(axes) :]))

    # The reducer takes scalars: map it over the halved axis and each kept one.
    rows = reducer
    for _ in range(len(kept) + 1):
        rows = jax.vmap(rows)

    def halved(*xs: Any) -> Any:
        xs = tuple(map(flat, xs))
        while (n := xs[0].shape[0]) > 1:
            half = (n + 1) // 2
            first = [x[:half] for x in xs]
            second = [x[half:] for x in xs]
            if n % 2:
                config = [(0, 1, 0), *[(0, 0, 0)] * len(kept)]
                pairs = zip(second, init, strict=True)
                second = [jax.lax.pad(x, i, config) for x, i in pairs]
            xs = rows(*first, *second)
        return tuple(jax.lax.squeeze(x, (0,)) for x in xs)

    return jax.jvp(halved, tuple(primals), tuple(tangents))
