"""``jnp.searchsorted`` in an array of symbolic size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Patch

_core = names.module("core")
_lax = names.module("lax.lax")
_numpy_hijax = names.module("numpy.hijax")


def open_searches() -> list[Patch]:
    """``jnp.searchsorted`` in an array of symbolic size runs its steps in a loop.

    JAX unrolls them, which takes an int as the size (``numpy.hijax``, since 0.10).
    """

    def searching(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def search(array: Any, query: Any, /, **options: Any) -> Any:
            dimension, batch_dims = options.get("dimension", 0), options.get("batch_dims", 0)
            if (dimension, batch_dims) != (0, 0) or not is_symbolic_dim(array.shape[0]):
                return original(array, query, **options)
            return _search(array, query, options.get("side", "left"), options["dtype"])

        return search

    names = ("searchsorted", "searchsorted_via_expand")
    found = [(name, vars(_numpy_hijax).get(name)) for name in names]
    return [
        Patch(
            _numpy_hijax,
            name,
            searching(f),
            why="JAX unrolls the binary search into as many steps as the size has bits, a Python "
            "int. This one takes the same steps in a loop.",
            since="numpy.hijax, 0.10",
            delete_when="jax.numpy.searchsorted takes an array of symbolic size",
        )
        for name, f in found
        if f is not None
    ]


def _search(array: Any, query: Any, side: str, dtype: np.dtype[Any]) -> Any:
    compare = _lax._sort_le_comparator if side == "left" else _lax._sort_lt_comparator
    array, query = jax.lax.stop_gradient(array), jax.lax.stop_gradient(query)
    size = _core.dimension_as_value(array.shape[0]).astype(np.int32)

    def halve(_: Any, ends: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = ends
        middle = low + (high - low) // 2
        left = compare(query, array.at[middle].get(mode="clip"))
        return jax.numpy.where(left, low, middle), jax.numpy.where(left, middle, high)

    # As many steps as the size has bits, as JAX unrolls.
    ends = (jax.numpy.zeros(query.shape, np.int32), jax.numpy.full(query.shape, size))
    return jax.lax.fori_loop(0, 32 - jax.lax.clz(size), halve, ends)[1].astype(dtype)
