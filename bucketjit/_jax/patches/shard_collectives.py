"""Collectives over shards whose sizes differ: means that weigh by rows, and sums of sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bucketjit._jax import names
from bucketjit._jax.jaxprs import value_of_size
from bucketjit._jax.patches.patch import Patch, patch

_parallel = names.module("lax.parallel")


def uneven_collectives(
    axis: Callable[[], Any],
    mean: Callable[[Any], Any],
    total: Callable[[Any], Any],
    refuse_groups: Callable[[], Any],
) -> tuple[Patch, ...]:
    """Collectives over an axis of shards whose sizes differ.

    User code may hold ``pmean`` under any name, as ``functools.partial`` does, so it stays: it
    divides what its own call of ``psum`` returns.
    """
    pmean = jax.lax.pmean

    def others_of(axis_name: Any) -> tuple[Any, ...] | None:
        """The other axes of a collective that names the axis of shards; None for any other."""
        current = axis()
        names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
        if current is None or current not in names:
            return None
        return tuple(name for name in names if name != current)

    def with_sizes(is_sum: bool, original: Any, x: Any, axis_name: Any, **options: Any) -> Any:
        """A collective that takes sizes for values that differ from shard to shard.

        JAX takes a size for a constant that all shards share, and every shard to have as many
        rows: psum of a size is the size times the number of shards, and pmean divides by it.
        """
        others = others_of(axis_name)
        if others is None:
            return original(x, axis_name, **options)

        def combined(leaf: Any) -> Any:
            leaf = value_of_size(leaf)
            is_plain = is_sum and not options.get("axis_index_groups")
            if not is_plain or not jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact):
                return original(leaf, axis_name, **options)
            return total(original(leaf, others, **options) if others else leaf)

        return jax.tree_util.tree_map(combined, x)

    def psum(original: Any, x: Any, axis_name: Any, **options: Any) -> Any:
        """The same, and the sum of ``pmean`` is a mean. Since lax.parallel, 0.1. Until: never."""
        others = others_of(axis_name)
        # Frame 1 is the function around this one.
        if others is None or sys._getframe(2).f_code is not pmean.__code__:
            return with_sizes(True, original, x, axis_name, **options)
        if options.get("axis_index_groups") is not None:
            refuse_groups()
        if others:
            x = pmean(x, others)
        return jax.tree_util.tree_map(lambda leaf: _Mean(mean(value_of_size(leaf))), x)

    def cast(original: Any, x: Any, axis_name: Any, **options: Any) -> Any:
        """A cast between types that say along which axes of a mesh values differ.

        JAX casts only inside of shard_map. A function of one shard is traced outside of it, and its
        masked program runs under shard_map(check_vma=False), where a cast does nothing. Since
        lax.parallel, 0.8. Until: never.
        """
        others = others_of(axis_name)
        if others is None:
            return original(x, axis_name, **options)
        return original(x, others, **options) if others else x

    def extreme(*args: Any, **options: Any) -> Any:
        """``pmax`` or ``pmin`` of sizes. Since lax.parallel, 0.1. Until: never."""
        return with_sizes(False, *args, **options)

    def any_psum(*args: Any, **options: Any) -> Any:
        """User code may hold psum under any name. Since lax.parallel, 0.10. Until: never."""
        return with_sizes(True, *args, **options)

    return (
        patch(_parallel, "_psum_is_async")(any_psum),
        patch(jax.lax, "pcast", everywhere=True)(cast),
        patch(jax.lax, "psum", everywhere=True)(psum),
        patch(jax.lax, "pmax", everywhere=True)(extreme),
        patch(jax.lax, "pmin", everywhere=True)(extreme),
    )


class _Mean:
    """A mean that is divided by the number of shards once more, and stays what it is."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __truediv__(self, count: Any) -> Any:
        return self._value
