"""The shards of a mesh along one axis, and the devices of this process among them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bucketjit._config import Sharded
from bucketjit._jax.arrays import array_of_parts, with_weak_type
from bucketjit.errors import ArgumentError, SpecError


@dataclass(frozen=True)
class LocalShards:
    """The shards that this process computes.

    Attributes:
        axis: The name of the axis.
        count: How many shards there are on all processes.
        devices: The devices of each shard of this process, in their order along the axis. A shard
            has several if the mesh has other axes, along which its rows are repeated.
        rows: The sharding of an array whose first axis is cut along the axis.
        whole: The sharding of an array of which each device has a copy.
    """

    axis: str
    count: int
    devices: tuple[tuple[Any, ...], ...]
    rows: NamedSharding
    whole: NamedSharding

    @functools.cached_property
    def own(self) -> tuple[Any, ...]:
        """All devices of this process."""
        return tuple(device for row in self.devices for device in row)


def checked_axis(mesh: Any, axis: Any) -> Sharded:
    """Check what the user chose."""
    if not isinstance(mesh, Mesh):
        raise SpecError(
            "with_processes: mesh must be a jax.sharding.Mesh, such as jax.make_mesh("
            f"(jax.device_count(),), ('d',)); got {mesh!r}"
        )
    if axis not in mesh.axis_names:
        names = ", ".join(map(repr, mesh.axis_names))
        raise SpecError(f"with_processes: axis must be an axis of the mesh ({names}), got {axis!r}")
    for i, devices in enumerate(_by_shard(mesh, axis)):
        owners = sorted({device.process_index for device in devices})
        if len(owners) > 1:
            raise SpecError(
                f"with_processes: shard {i} along {axis!r} is on the devices of processes "
                f"{owners}, and its rows would have to be the same on them; choose an axis of the "
                "mesh that goes over processes first"
            )
    return Sharded(mesh, axis)


def _by_shard(mesh: Mesh, axis: str) -> list[tuple[Any, ...]]:
    """The devices of each shard along an axis."""
    place = mesh.axis_names.index(axis)
    rows = np.moveaxis(mesh.devices, place, 0)
    return [tuple(row) for row in rows.reshape(len(rows), -1)]


@functools.lru_cache(maxsize=64)
def local_shards(chosen: Sharded) -> LocalShards:
    """The shards of this process."""
    mesh, axis = chosen.mesh, chosen.axis
    here = jax.process_index()
    own = [row for row in _by_shard(mesh, axis) if row[0].process_index == here]
    if not own:
        raise ArgumentError(
            f"with_processes: process {here} calls, and the mesh has none of its devices"
        )
    # Masked programs name no shardings in the types of arrays.
    plain = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    return LocalShards(
        axis,
        chosen.count,
        tuple(own),
        NamedSharding(plain, PartitionSpec(axis)),
        NamedSharding(plain, PartitionSpec()),
    )


def global_rows(shards: LocalShards, parts: Sequence[Any]) -> jax.Array:
    """An array of all shards, from the parts of this process; it is strongly typed."""
    first = parts[0]
    shape = (first.shape[0] * shards.count, *first.shape[1:])
    every = [x for x, devices in zip(parts, shards.devices, strict=True) for _ in devices]
    return _placed(shape, shards.rows, every, shards.own, False)


def global_whole(shards: LocalShards, value: Any) -> jax.Array:
    """An array of which each device has a copy.

    Its types are those of ``value``: the executable checks them.
    """
    weak = isinstance(value, int | float | complex) and not isinstance(value, bool | np.generic)
    if isinstance(value, jax.Array):
        if _is_placed(value.sharding, value.ndim, shards.whole):
            return value
        weak = bool(getattr(value, "weak_type", False))
        if not value.is_fully_addressable:  # it is replicated, over another mesh
            value = value.addressable_data(0)
    else:
        value = np.asarray(value)
    return _placed(value.shape, shards.whole, [value] * len(shards.own), shards.own, weak)


# Both are asked for each argument of each call, and the arguments have few shardings.
@functools.lru_cache(maxsize=1024)
def _is_placed(sharding: Any, ndim: int, whole: NamedSharding) -> bool:
    """Whether an array with a sharding is one of which each device has a copy."""
    return not is_foreign(sharding) and bool(sharding.is_equivalent_to(whole, ndim))


@functools.lru_cache(maxsize=1024)
def is_foreign(sharding: Any) -> bool:
    """Whether arrays with a sharding are cut over devices, or have types that name a mesh."""
    explicit = AxisType.Explicit in getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return explicit or not sharding.is_fully_replicated


def _placed(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    parts: Sequence[Any],
    devices: Sequence[Any],
    weak_type: bool,
) -> jax.Array:
    """An array from the part of each device of this process."""
    if not any(isinstance(part, jax.Array) for part in parts):
        return array_of_parts(shape, sharding, parts, devices, weak_type)
    pieces = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    array = jax.make_array_from_single_device_arrays(shape, sharding, pieces)
    return with_weak_type(array, weak_type)
