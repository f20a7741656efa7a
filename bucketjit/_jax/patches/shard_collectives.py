"""Collectives over shards whose sizes differ: means that weigh by rows, and sums of sizes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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


_NEVER = "never: in JAX all shards have the same sizes"


def uneven_collectives(
    axis: Callable[[], Any],
    mean: Callable[[Any], Any],
    total: Callable[[Any], Any],
    refuse_groups: Callable[[], Any],
) -> list[Patch]:
    """Collectives over an axis of shards whose sizes differ.

    JAX multiplies and divides by the number of shards (``lax.parallel.psum`` and ``pmean``, since
    0.1).
    """
    uneven = _Uneven(axis, mean, total, refuse_groups)
    inner: list[Patch] = []
    if not lacking(Without.COUNTS):
        inner = [
            Patch(
                _parallel,
                "_psum_is_async",
                uneven.with_sizes(_parallel._psum_is_async, is_sum=True),
                why="User code may hold psum under any name; all of them call this function.",
                since="lax.parallel._psum_is_async, 0.10",
                delete_when=_NEVER,
            )
        ]
    casts = Patch(
        jax.lax,
        "pcast",
        uneven.cast(jax.lax.pcast),
        why="JAX casts only inside of shard_map. A function of one shard is traced outside of it, "
        "and its masked program runs under shard_map(check_vma=False), where a cast does nothing.",
        since="lax.parallel.pcast, 0.8",
        delete_when=_NEVER,
        everywhere=True,
    )
    return [*inner, casts] + [
        Patch(
            jax.lax,
            name,
            uneven.collective(getattr(jax.lax, name)),
            why=_WHY,
            since=f"lax.parallel.{name}, 0.1",
            delete_when=_NEVER,
            everywhere=True,
        )
        for name in ("psum", "pmax", "pmin")
    ]


class _Uneven:
    """Makes the replacements; see `uneven_collectives`.

    User code may hold ``pmean`` under any name, as ``functools.partial`` does, so it stays: it
    divides what its own call of ``psum`` returns.
    """

    def __init__(
        self,
        axis: Callable[[], Any],
        mean: Callable[[Any], Any],
        total: Callable[[Any], Any],
        refuse_groups: Callable[[], Any],
    ) -> None:
        self._axis = axis
        self._mean = mean
        self._total = total
        self._refuse_groups = refuse_groups
        self._pmean = jax.lax.pmean

    def _names_axis(self, given: Any) -> bool:
        current = self._axis()
        return current is not None and current in _as_tuple(given)

    def with_sizes(self, original: Callable[..., Any], is_sum: bool = False) -> Callable[..., Any]:
        """A collective that takes sizes for values that differ from shard to shard."""

        @functools.wraps(original)
        def collective(x: Any, axis_name: Any, **options: Any) -> Any:
            if not self._names_axis(axis_name):
                return original(x, axis_name, **options)
            others = tuple(a for a in _as_tuple(axis_name) if a != self._axis())

            def combined(leaf: Any) -> Any:
                leaf = _value_of_size(leaf)
                is_plain = is_sum and not options.get("axis_index_groups")
                if not is_plain or not jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact):
                    return original(leaf, axis_name, **options)
                return self._total(original(leaf, others, **options) if others else leaf)

            return jax.tree_util.tree_map(combined, x)

        return collective

    def collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same, and the sum of ``pmean`` is a mean."""
        is_sum = original is jax.lax.psum
        of_mean, of_others = self._pmean.__code__, self.with_sizes(original, is_sum)

        @functools.wraps(original)
        def collective(x: Any, axis_name: Any, **options: Any) -> Any:
            if self._names_axis(axis_name) and sys._getframe(1).f_code is of_mean:
                return self._means(x, axis_name, **options)
            return of_others(x, axis_name, **options)

        return collective

    def cast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A cast between types that say along which axes of a mesh values differ."""

        @functools.wraps(original)
        def cast(x: Any, axis_name: Any, **options: Any) -> Any:
            if not self._names_axis(axis_name):
                return original(x, axis_name, **options)
            others = tuple(a for a in _as_tuple(axis_name) if a != self._axis())
            return original(x, others, **options) if others else x

        return cast

    def _means(self, x: Any, axis_name: Any, axis_index_groups: Any = None) -> Any:
        if axis_index_groups is not None:
            self._refuse_groups()
        if others := tuple(a for a in _as_tuple(axis_name) if a != self._axis()):
            x = self._pmean(x, others)
        return jax.tree_util.tree_map(lambda leaf: _Mean(self._mean(_value_of_size(leaf))), x)


class _Mean:
    """A mean that is divided by the number of shards once more, and stays what it is."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __truediv__(self, count: Any) -> Any:
        return self._value


def _as_tuple(axis_name: Any) -> tuple[Any, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def _value_of_size(leaf: Any) -> Any:
    """A symbolic size as a value that is known at run time (``core.dimension_as_value``)."""
    return _core.dimension_as_value(leaf) if is_symbolic_dim(leaf) else leaf
