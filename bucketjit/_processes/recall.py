"""Calls of shapes that were seen before: what this process offers for them, and how they run.

The fast path of one process goes from the shapes of the arguments to a handler. Here the meeting of
the processes is between the two: from the shapes to the offer, and from the bucket to the handler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bucketjit._compile.argument_types import without_values
from bucketjit._jax.arrays import CONCRETE_ARRAY
from bucketjit._jax.config import trace_context
from bucketjit._processes.split_rows import ShardedCall
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.fast_path.dispatch import CallArguments
from bucketjit._runtime.fast_path.handler import Handler
from bucketjit._runtime.fast_path.memory import RememberedCalls, ServedCall
from bucketjit._runtime.fast_path.readers import NAMED
from bucketjit._signature.leaf_types import leaf_type
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit.errors import ArgumentError

_MOST = 4096  # kinds of calls whose offers are remembered

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class Offer(NamedTuple):
    """What this process would run in a call.

    Attributes:
        signed: The call.
        call: The same call, resolved; on shards, that of the largest one of this process.
        digest: Equal on processes that make the same call, of whatever sizes.
        bucket: The padded size of each variable; empty if no axis is open.
        error: Why it has no bucket, or None.
        sharded: The calls of the shards of this process; None without shards.
    """

    signed: SignedCall
    call: ResolvedCall
    digest: str
    bucket: Mapping[str, int]
    error: Exception | None = None
    sharded: ShardedCall | None = None


class Recall:
    """Remembers the calls of one engine. It is emptied when the engine is."""

    def __init__(self) -> None:
        self._state: tuple[object, ...] = ()
        # By types and shapes, then by the sizes that are arguments themselves, at these positions.
        self._offers: dict[Hashable, tuple[Sequence[int], dict[Hashable, Offer]]] = {}
        self._of_buckets: dict[Hashable, RememberedCalls] = {}

    def find(
        self, engine: Engine, arguments: Arguments
    ) -> tuple[list[Any], Hashable, Offer | None]:
        """The leaves of a call, the key of its shapes and types, and what was offered for these.

        The key is None for arguments that have none: signing them says why.
        """
        state = engine.provider.epoch, engine.refusals.version
        if state != self._state:
            self._state = state
            self._offers.clear()
            self._of_buckets.clear()
        try:
            leaves, tree, statics = engine.signer.flattened(*arguments)
            key = tree, statics, trace_context(), *map(_kind, leaves)
        except ArgumentError:
            return [], None, None
        positions, offers = self._offers.get(key, ((), {}))
        return leaves, key, offers.get(tuple(leaves[i] for i in positions))

    def remember(self, key: Hashable, offer: Offer) -> None:
        """Remember what is offered for calls of these shapes and types, without their arrays."""
        signed, sharded = without_values(offer.signed), offer.sharded
        if sharded is not None:
            sharded = dataclasses.replace(sharded, given=signed)
        if len(self._offers) >= _MOST:
            self._offers.clear()
        sizes = [i for i, kind in enumerate(signed.signature.types) if kind.dtype is None]
        _, offers = self._offers.setdefault(key, (sizes, {}))
        if len(offers) >= _MOST:
            offers.clear()
        at = tuple(offer.signed.leaves[i] for i in sizes)
        offers[at] = offer._replace(signed=signed, sharded=sharded)

    def handler(self, bucket: Hashable, arguments: Arguments) -> Handler | None:
        """The handler of a call in a bucket; None if the slow path has to serve it."""
        memory = self._of_buckets.get(bucket)
        return None if memory is None else memory.fast_path.find(*arguments)

    def serve_by_handler(
        self, engine: Engine, offer: Offer, arguments: Arguments, served: ServedCall
    ) -> None:
        """Let the next call of the same shapes in the same bucket be served by a handler."""
        memory = self._of_buckets.get(served.key)
        if memory is None:
            memory = RememberedCalls(engine.cache, engine.counters, engine.lock)
            self._of_buckets[served.key] = memory
            with engine.lock:
                engine.memories_apart.add(memory)
        memory.add_masked(offer.signed, CallArguments(*arguments), offer.call, served)


def _kind(leaf: Any) -> Hashable:
    """The type and the shape of a leaf; a Python number has its type only."""
    if type(leaf) is np.ndarray:
        return leaf.shape, leaf.dtype
    if type(leaf) is CONCRETE_ARRAY and type(leaf.sharding) is not NAMED:
        aval = leaf.aval
        return aval.shape, aval.dtype, aval.weak_type
    return leaf_type(leaf, "")
