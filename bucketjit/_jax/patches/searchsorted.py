"""``jnp.searchsorted`` in an array of symbolic size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.jaxprs import value_of_size
from bucketjit._jax.patches.patch import patch

_numpy_hijax = names.module("numpy.hijax")


def _search(original: Any, array: Any, query: Any, /, **options: Any) -> Any:
    """The steps of the binary search are taken in a loop.

    JAX unrolls as many as the size has bits, a Python int. Since numpy.hijax, 0.10. Until
    jnp.searchsorted takes an array of symbolic size.
    """
    is_plain = (options.get("dimension", 0), options.get("batch_dims", 0)) == (0, 0)
    is_complex = jnp.iscomplexobj(array) or jnp.iscomplexobj(query)
    if not is_plain or is_complex or not is_symbolic_dim(array.shape[0]):
        return original(array, query, **options)
    is_left = options.get("side", "left") == "left"
    array, query = jax.lax.stop_gradient(array), jax.lax.stop_gradient(query)
    size = value_of_size(array.shape[0]).astype(np.int32)

    def halve(_: Any, ends: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = ends
        middle = low + (high - low) // 2
        found = array.at[middle].get(mode="clip")
        left = _at_most(query, found) if is_left else ~_at_most(found, query)
        return jnp.where(left, low, middle), jnp.where(left, middle, high)

    # As many steps as the size has bits, as JAX unrolls.
    ends = (jnp.zeros(query.shape, np.int32), jnp.full(query.shape, size))
    steps = 32 - jax.lax.clz(size)
    return jax.lax.fori_loop(0, steps, halve, ends)[1].astype(options["dtype"])


def _at_most(one: Any, other: Any) -> Any:
    """``one <= other`` in the order of ``jnp.sort``, where NaN is the largest."""
    return (one <= other) | jnp.isnan(other)


# The second name is there in 0.10 only.
SEARCHES = tuple(
    patch(_numpy_hijax, name)(_search)
    for name in ("searchsorted", "searchsorted_via_expand")
    if hasattr(_numpy_hijax, name)
)
