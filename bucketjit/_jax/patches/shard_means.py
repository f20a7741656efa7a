"""Collectives over shards whose sizes differ: means that weigh by rows, and sums of sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Patch

_core = names.module("core")

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
            if names_axis(axis_name):
                x = jax.tree_util.tree_map(_value_of_size, x)
            return original(x, axis_name, **options)

        return collective

    original_mean = jax.lax.pmean

    @functools.wraps(original_mean)
    def pmean(x: Any, axis_name: Any, *, axis_index_groups: Any = None) -> Any:
        if not names_axis(axis_name):
            return original_mean(x, axis_name, axis_index_groups=axis_index_groups)
        if axis_index_groups is not None:
            refuse_groups()
        if others := tuple(a for a in _as_tuple(axis_name) if a != axis()):
            x = original_mean(x, others)
        return jax.tree_util.tree_map(lambda leaf: mean(_value_of_size(leaf)), x)

    replaced = {name: with_sizes(name) for name in ("psum", "pmax", "pmin")}
    return [
        Patch(
            jax.lax,
            name,
            replacement,
            why=_WHY,
            since=f"lax.parallel.{name}, 0.1",
            delete_when="never: in JAX all shards have the same sizes",
            everywhere=True,
        )
        for name, replacement in {**replaced, "pmean": pmean}.items()
    ]


def _as_tuple(axis_name: Any) -> tuple[Any, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def _value_of_size(leaf: Any) -> Any:
    """A symbolic size as a value that is known at run time (``core.dimension_as_value``)."""
    return _core.dimension_as_value(leaf) if is_symbolic_dim(leaf) else leaf
