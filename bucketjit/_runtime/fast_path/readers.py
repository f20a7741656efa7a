"""Read one open argument out of nested containers without flattening them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._arrays.padded import Padded
from bucketjit._jax.arrays import CONCRETE_ARRAY, KEY_ARRAY

Reader = Callable[[Any], Hashable]  # what a plan depends on of an argument; None: look closer

ARRAY = np.ndarray

DEVICE_ARRAY = CONCRETE_ARRAY

NAMED = jax.sharding.NamedSharding

_KEY_ARRAY = KEY_ARRAY


def reading_static(value: object) -> Hashable:
    """What tells values of a static argument apart."""
    return type(value), value


def reading(value: Any) -> Hashable:
    """What tells arguments apart that differ in shape or type; None if it takes the long way."""
    kind = type(value)
    if kind is DEVICE_ARRAY:
        aval, placed = value.aval, value.sharding
        if type(placed) is NAMED:  # it may be cut, and be of another type therefore
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
    """A function that reads some leaves of a container of known structure."""
    flatten = jax.tree_util.tree_flatten

    def read(value: object) -> Hashable:
        leaves, given = flatten(value)
        if given != tree:
            return None
        parts = [reading(leaves[i]) for i in places]
        return None if None in parts else tuple(parts)

    return read
