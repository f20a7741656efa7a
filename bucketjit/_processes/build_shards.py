"""The shards of a mesh along one axis, and the kernel of all of them.

The kernel is the masked program of one shard, under ``shard_map`` with its own sizes.

    one shard      program(n, w:f32[d], x:f32[n, d])                masked for the bucket n <= 8
    all shards     shard_map(masked)(n:i32[shards], w, x:f32[shards * 8, d])

Arrays without open axes are whole on each device. All others, and the sizes, are cut along their
first axis, each shard's padded part after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bucketjit._compile.argument_types import Body, Transform
from bucketjit._config import Sharded
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import array_of_parts, is_key, with_weak_type
from bucketjit._tracing.call import Call
from bucketjit.errors import ArgumentError, SpecError

_SHARED_SEARCH = "xla_gpu_shard_autotuning"


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
    mesh, axis = chosen.mesh, chosen.axis
    here = jax.process_index()
    rows = [row for row in _by_shard(mesh, axis) if row[0].process_index == here]
    if not rows:
        raise ArgumentError(
            f"with_processes: process {here} calls, and the mesh has none of its devices"
        )
    # Masked programs name no shardings in the types of arrays.
    plain = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    cut, whole = NamedSharding(plain, PartitionSpec(axis)), NamedSharding(plain, PartitionSpec())
    return LocalShards(axis, chosen.count, tuple(rows), cut, whole)


def global_rows(shards: LocalShards, parts: Sequence[Any]) -> jax.Array:
    """An array of all shards, from the parts of this process; it is strongly typed."""
    first = parts[0]
    shape = (first.shape[0] * shards.count, *first.shape[1:])
    every = [x for x, devices in zip(parts, shards.devices, strict=True) for _ in devices]
    return _placed(shape, shards.rows, every, shards.own, False)


def global_whole(shards: LocalShards, value: Any) -> jax.Array:
    """An array of which each device has a copy, of the types that the executable checks."""
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


# --- the kernel ---


class AllShards(Transform):
    """All shards of a mesh. A call is that of one shard."""

    def __init__(self, chosen: Sharded) -> None:
        self._chosen = chosen
        self.uneven = (chosen.axis,)

    @property
    def _shards(self) -> LocalShards:
        return local_shards(self._chosen)

    def refuse(self, what: str) -> NoReturn:
        """Refuse what has no form for shards: batches, stages, modules and exact shapes."""
        raise SpecError(
            f"with_processes: {what} is not there for a function of one shard, which runs on the "
            "devices of its mesh only; call it, and take derivatives inside of it, or use a "
            "bucketed function without with_processes"
        )

    def options(self, is_kept: bool) -> Mapping[str, Any]:
        """XLA's search for the fastest kernels, which the processes share, is off with files.

        A process that reads a file takes no part in the search, and the others would wait for it.
        """
        return {_SHARED_SEARCH: False} if is_kept and jax.process_count() > 1 else {}

    def leaves(self, call: Call) -> list[int]:
        return array_leaves(call)

    def types(
        self, call: Call, pads: Mapping[int, tuple[int, ...]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shards, types = self._shards, []
        for i in array_leaves(call):
            kind, padded = call.signature.types[i], pads.get(i)
            if padded is None:
                of = {"sharding": shards.whole, "weak_type": kind.weak_type}
                types.append(jax.ShapeDtypeStruct(call.shapes[i], kind.dtype, **of))
            else:
                whole = (shards.count * padded[0], *padded[1:])
                types.append(jax.ShapeDtypeStruct(whole, kind.dtype, sharding=shards.rows))
        return tuple(types), {}

    def sizes(
        self, call: Call, constants: Sequence[tuple[int, ...]], poison: int | None
    ) -> jax.ShapeDtypeStruct:
        shards, variables = self._shards, len(call.variables)
        return jax.ShapeDtypeStruct((shards.count, variables), np.int32, sharding=shards.rows)

    def donated(self, call: Call, pads: Mapping[int, tuple[int, ...]]) -> Iterable[int]:
        """The places of donated arrays without open axes; padded parts are freed anyway."""
        leaves = call.donated_leaves
        return (k for k, i in enumerate(array_leaves(call)) if i in leaves and i not in pads)

    def details(self) -> Sequence[Any]:
        return (self._shards.axis,)

    def results(self, program: Interface, sizes: BucketSizes) -> list[jax.ShapeDtypeStruct]:
        opened, count = program.open_outs, self._shards.count
        return [
            x.update(shape=(x.shape[0] * count, *x.shape[1:])) if i in opened else x
            for i, x in enumerate(super().results(program, sizes))
        ]

    def of_host(self, consts: Sequence[Any]) -> list[Any]:
        """The constants in host memory, as their own device may be none of the mesh."""
        return [np.asarray(c) if isinstance(c, jax.Array) and not is_key(c) else c for c in consts]

    def run(
        self, body: Body, program: Interface, leaves: Sequence[int], opened: Collection[int]
    ) -> Callable[..., Any]:
        """The body on each shard, which takes its row of the sizes."""
        axis, mesh = self._chosen.axis, self._shards.whole.mesh

        def spec(is_cut: bool) -> PartitionSpec:
            return PartitionSpec(axis) if is_cut else PartitionSpec()

        def one(sizes: Any, *arrays: Any) -> list[Any]:
            return body(sizes[0], (), arrays)

        def every(sizes: Any, arrays: Sequence[Any], is_poisoned: bool) -> Any:
            mapped = jax.shard_map(
                one,
                mesh=mesh,
                in_specs=(spec(True), *(spec(i in opened) for i in leaves)),
                out_specs=[spec(i in program.open_outs) for i in range(len(program.out_shapes))],
                check_vma=False,
            )
            return mapped(sizes, *arrays)

        return every


def array_leaves(call: Call) -> list[int]:
    """The leaves of a call that are arrays, not sizes."""
    return [i for i, kind in enumerate(call.signature.types) if kind.dtype is not None]
