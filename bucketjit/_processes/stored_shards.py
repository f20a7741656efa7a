"""The place of an executable of all shards among files.

All processes of a job read the same bytes, which name the devices of all of them. So a file is for
a mesh with the same devices in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from bucketjit._compile.files.executable_files import ExecutableFiles
from bucketjit._compile.files.store import Store
from bucketjit._compile.files.stored import StoredMasked
from bucketjit._compile.kernel import Kernel
from bucketjit._jax.serialization import Placement
from bucketjit._processes.shard_axis import LocalShards
from bucketjit._tracing.signer import SignedCall


class StoredShards(StoredMasked):
    """The place of a bucket's executable of all shards."""

    def __init__(
        self,
        shards: LocalShards,
        files: ExecutableFiles,
        store: Store,
        signed: SignedCall,
        sizes: Mapping[str, int],
        made: Callable[[], Kernel],
    ) -> None:
        super().__init__(files, store, signed, sizes, made)
        self._shards = shards

    def _device(self) -> Any:
        return self._shards.own[0]

    def _details(self) -> Sequence[Any]:
        mesh = self._shards.rows.mesh
        devices = [(d.id, d.process_index, d.device_kind) for d in mesh.devices.flat]
        of_mesh = [*mesh.shape.items()], devices, self._shards.axis
        return (*super()._details(), *of_mesh)

    def _placement(self) -> Placement:
        return Placement(
            tuple(self._shards.rows.mesh.devices.flat),
            tuple(x.sharding for x in self._leaves()),
            tuple(map(self._sharding_of, range(len(self._program.out_shapes)))),
        )

    def _sharding_of(self, result: int) -> NamedSharding:
        """The sharding of a result."""
        shards = self._shards
        return shards.rows if result in self._program.open_outs else shards.whole

    def _results(self) -> list[jax.ShapeDtypeStruct]:
        opened, count = self._program.open_outs, self._shards.count
        return [
            x.update(shape=(x.shape[0] * count, *x.shape[1:])) if i in opened else x
            for i, x in enumerate(super()._results())
        ]
