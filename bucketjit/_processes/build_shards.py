"""The kernel of all shards: the masked program of one, under ``shard_map`` with its own sizes.

    one shard      program(n, w:f32[d], x:f32[n, d])                masked for the bucket n <= 8
    all shards     shard_map(masked)(n:i32[shards], w, x:f32[shards * 8, d])

Arrays without open axes are whole on each device. All others, and the sizes, are cut along their
first axis, each shard's padded part after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import PartitionSpec

from bucketjit._compile.transform import Body, Transform
from bucketjit._config import Sharded
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.interface import Interface
from bucketjit._jax.serialization import Placement
from bucketjit._processes.shard_axis import LocalShards, local_shards
from bucketjit._tracing.call import Call
from bucketjit.errors import SpecError

_SHARED_SEARCH = "xla_gpu_shard_autotuning"


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

    def given(self, call: Call) -> list[int]:
        """The leaves of a call that are arrays, not sizes."""
        return array_leaves(call)

    def types(
        self, call: Call, pads: Mapping[int, tuple[int, ...]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The types of the global arrays."""
        shards, found = self._shards, []
        for i in array_leaves(call):
            kind, padded = call.signature.types[i], pads.get(i)
            if padded is None:
                of = {"sharding": shards.whole, "weak_type": kind.weak_type}
                found.append(jax.ShapeDtypeStruct(call.shapes[i], kind.dtype, **of))
            else:
                whole = (shards.count * padded[0], *padded[1:])
                found.append(jax.ShapeDtypeStruct(whole, kind.dtype, sharding=shards.rows))
        return tuple(found), {}

    def sizes(
        self, call: Call, constants: Sequence[tuple[int, ...]], poison: int | None
    ) -> jax.ShapeDtypeStruct:
        """The type of the sizes, a row for each shard."""
        shards, variables = self._shards, len(call.variables)
        return jax.ShapeDtypeStruct((shards.count, variables), np.int32, sharding=shards.rows)

    def donated(
        self, call: Call, pads: Mapping[int, tuple[int, ...]], program: Interface, at: BucketSizes
    ) -> tuple[frozenset[int], frozenset[int]]:
        """The places, among the arrays, of donated ones without open axes.

        Of the others, the padded parts are made for the call and freed after it.
        """
        if not call.donate:
            return frozenset(), frozenset()
        args, _ = call.tree.unflatten(range(len(call.leaves)))
        given = {i for place in call.donate for i in jax.tree_util.tree_leaves(args[place])}
        arrays = enumerate(array_leaves(call))
        return frozenset(k for k, i in arrays if i in given and i not in pads), frozenset()

    def details(self) -> Sequence[Any]:
        """The mesh: its axes and devices, and the axis of the shards."""
        mesh = self._shards.rows.mesh
        devices = [(d.id, d.process_index, d.device_kind) for d in mesh.devices.flat]
        return [*mesh.shape.items()], devices, self._shards.axis

    def placed(self, leaves: Sequence[Any], program: Interface) -> Placement:
        """The devices of the mesh, and where on it arguments and results are."""
        shards, opened = self._shards, program.open_outs
        return Placement(
            tuple(shards.rows.mesh.devices.flat),
            tuple(x.sharding for x in leaves),
            tuple(
                shards.rows if i in opened else shards.whole for i in range(len(program.out_shapes))
            ),
        )

    def results(self, program: Interface, at: BucketSizes) -> list[jax.ShapeDtypeStruct]:
        """The types of the global results."""
        opened, count = program.open_outs, self._shards.count
        return [
            x.update(shape=(x.shape[0] * count, *x.shape[1:])) if i in opened else x
            for i, x in enumerate(super().results(program, at))
        ]

    def of_host(self, consts: Sequence[Any]) -> list[Any]:
        """The constants in host memory, as their own device may be none of the mesh."""
        return [_of_host(c) for c in consts]

    def run(
        self, body: Body, program: Interface, leaves: Sequence[int], opened: Collection[int]
    ) -> Callable[..., Any]:
        """The body on each shard, which takes its row of the sizes."""
        axis, mesh = self._chosen.axis, self._shards.whole.mesh

        def spec(is_cut: bool) -> PartitionSpec:
            return PartitionSpec(axis) if is_cut else PartitionSpec()

        def one(sizes: Any, *own: Any) -> list[Any]:
            return body(sizes[0], (), own)

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


def _of_host(constant: Any) -> Any:
    """A constant of the program in host memory, as its own device may be none of the mesh."""
    if isinstance(constant, jax.Array) and not jax.dtypes.issubdtype(
        constant.dtype, jax.dtypes.prng_key
    ):
        return np.asarray(constant)
    return constant
