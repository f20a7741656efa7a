"""Reads from an argument with open axes what a handler depends on: shapes, types, sharding.

What is read is part of the key in a `DispatchTable`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._arrays.padded import Padded
from bucketjit._jax.arrays import CONCRETE_ARRAY, KEY_ARRAY

Reader = Callable[[Any], Hashable]  # returns a part of the key; None: take the slow path

ARRAY = np.ndarray

DEVICE_ARRAY = CONCRETE_ARRAY

NAMED = jax.sharding.NamedSharding

_KEY_ARRAY = KEY_ARRAY


def reading_static(value: object) -> Hashable:
    """The part of the key for a static argument: its type and value."""
    return type(value), value


def reading(value: Any) -> Hashable:
    """The part of the key for a leaf: shape and type; None if the slow path must handle it.

    Types are compared by identity, so an instance of a subclass, such as a masked array, takes the
    slow path.
    """
    kind = type(value)
    if kind is DEVICE_ARRAY:
        aval, placed = value.aval, value.sharding
        if type(placed) is NAMED:  # a mesh may split the array: its sharding is part of its type
            return aval.shape, aval.dtype, aval.weak_type, placed
        return aval.shape, aval.dtype, aval.weak_type
    if kind is ARRAY:
        return value.shape, value.dtype
    if kind is Padded:
        array = value.array
        return value.sizes, array.shape, array.dtype, value.weak_type, type(array)
    if kind is _KEY_ARRAY:
        return value.shape, value.dtype
    return value if kind is int else None


def container_reader(tree: PyTreeDef, places: Sequence[int]) -> Reader:
    """A function that reads some leaves of a container."""
    flatten = jax.tree_util.tree_flatten

    def read(value: object) -> Hashable:
        leaves, given = flatten(value)
        if given != tree:
            return None
        parts = [reading(leaves[i]) for i in places]
        return None if None in parts else tuple(parts)

    return read
