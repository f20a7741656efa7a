"""Collectives over shards whose sizes differ: means that weigh by rows, and sums of sizes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.names import Without, lacking
from bucketjit._jax.patches.patch import Patch

_core = names.module("core")
_parallel = names.module("lax.parallel")

_WHY = (
    "JAX takes a size for a constant that all shards share, and every shard to have as many rows. "
    "So psum of a size was the size times the number of shards, and pmean divided by that number."
)


def uneven_collectives(
    axis: Callable[[], Any], mean: Callable[[Any], Any], refuse_groups: Callable[[], Any]
) -> list[Patch]:
    """Collectives over an axis of shards whose sizes differ.

    JAX multiplies and divides by the number of shards (``lax.parallel.psum`` and ``pmean``, since
    0.1).

    Args:
        axis: Returns the name of the axis, or None where no function of shards is traced.
        mean: The mean of an array over these shards, by their rows.
        refuse_groups: Raises for a mean over groups of shards.

    Returns:
        The patches.
    """

    def names_axis(given: Any) -> bool:
        current = axis()
        return current is not None and current in _as_tuple(given)

    def with_sizes(name: str) -> Any:
        original = getattr(jax.lax, name)

        @functools.wraps(original)
        def collective(x: Any, axis_name: Any, **options: Any) -> Any:
            if not names_axis(axis_name):
                return original(x, axis_name, **options)
            if sys._getframe(1).f_code is of_mean:
                return means(x, axis_name, **options)
            return original(jax.tree_util.tree_map(_value_of_size, x), axis_name, **options)

        return collective

    # User code may hold ``pmean`` under any name, as ``functools.partial`` does, so it stays:
    # it divides what its own call of ``psum`` returns.
    original_mean = jax.lax.pmean
    of_mean = original_mean.__code__

    def means(x: Any, axis_name: Any, axis_index_groups: Any = None) -> Any:
        if axis_index_groups is not None:
            refuse_groups()
        if others := tuple(a for a in _as_tuple(axis_name) if a != axis()):
            x = original_mean(x, others)
        return jax.tree_util.tree_map(lambda leaf: _Mean(mean(_value_of_size(leaf))), x)

    def summed(x: Any, axis_name: Any, **options: Any) -> Any:
        if names_axis(axis_name):
            x = jax.tree_util.tree_map(_value_of_size, x)
        return original_sum(x, axis_name, **options)

    replaced = {name: with_sizes(name) for name in ("psum", "pmax", "pmin")}
    inner: list[Patch] = []
    if not lacking(Without.COUNTS):
        original_sum = _parallel._psum_is_async
        inner = [
            Patch(
                _parallel,
                "_psum_is_async",
                summed,
                why="User code may hold psum under any name; all of them call this function.",
                since="lax.parallel._psum_is_async, 0.10",
                delete_when="never: in JAX all shards have the same sizes",
            )
        ]
    return inner + [
        Patch(
            jax.lax,
            name,
            replacement,
            why=_WHY,
            since=f"lax.parallel.{name}, 0.1",
            delete_when="never: in JAX all shards have the same sizes",
            everywhere=True,
        )
        for name, replacement in replaced.items()
    ]


class _Mean:
    """A mean that is divided by the number of shards once more, and stays what it is.

    Args:
        value: The mean.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __truediv__(self, count: Any) -> Any:
        return self._value


def _as_tuple(axis_name: Any) -> tuple[Any, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def _value_of_size(leaf: Any) -> Any:
    """A symbolic size as a value that is known at run time (``core.dimension_as_value``)."""
    return _core.dimension_as_value(leaf) if is_symbolic_dim(leaf) else leaf
