"""Where the rows of a batch are: on one device, or sharded over the first axis of a mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bucketjit._jax.arrays import is_on_several_devices


def rows_sharding(leaves: Iterable[Any]) -> NamedSharding | None:
    """How the rows of batches are sharded: over the first axis of the mesh of an argument."""
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and is_on_several_devices(sharding):
            if AxisType.Explicit in sharding.mesh.axis_types:
                return None
            return NamedSharding(sharding.mesh, PartitionSpec(sharding.mesh.axis_names[0]))
    return None


def placement_of(sharding: NamedSharding | None, count: int) -> NamedSharding | None:
    """The sharding of a batch; None if the devices cannot have equal numbers of its rows."""
    if sharding is None or count % sharding.mesh.shape[sharding.mesh.axis_names[0]]:
        return None
    return sharding


def replicated_like(array: jax.Array) -> NamedSharding | None:
    """A sharding with a whole copy on each device of an array; None if it is on one device."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not is_on_several_devices(sharding):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec())
