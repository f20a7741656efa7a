"""What runs the calls of a bucketed function, where several processes or shards do so together."""

from __future__ import annotations

import functools

from bucketjit._compile.requests import Requests
from bucketjit._config import Agreed, Config
from bucketjit._processes.agreement import Agreement
from bucketjit._processes.build_shards import AllShards
from bucketjit._processes.on_shards import OnShards
from bucketjit._processes.shard_axis import local_shards
from bucketjit._processes.split_rows import sharded_call
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.engine_parts import TRACED, Parts
from bucketjit._runtime.observers import Together
from bucketjit._tracing.signer import SignedCall
from bucketjit.errors import SpecError


def together(config: Config) -> Together | None:
    """What runs the calls of one configuration; None if this process runs them alone."""
    if config.sharded is not None:
        return Agreement(config.agreed or Agreed(), OnShards(config.sharded))
    return None if config.agreed is None else Agreement(config.agreed)


def parts(config: Config) -> Parts:
    """The parts of the engine of one configuration."""
    if config.sharded is None:
        return TRACED
    return Parts(requests=functools.partial(Requests, transform=AllShards(config.sharded)))


def call_of_shard(engine: Engine, signed: SignedCall) -> SignedCall:
    """The call of the largest shard of this process, for functions of one; else the call itself."""
    if engine.config.sharded is None:
        return signed
    count = len(local_shards(engine.config.sharded).devices)
    with engine.lock, signed.signature.restoring_axes():
        return sharded_call(engine, signed, count).signed


def refuse_apart(config: Config, what: str) -> None:
    """Refuse to write a function of one shard to a module or a file."""
    if config.sharded is not None:
        raise SpecError(
            f"{what}: a function of one shard runs on the devices of its mesh only; write one "
            "without collectives, or without with_processes"
        )


def refuse_inside(config: Config) -> None:
    """Refuse a call inside a transformation of JAX, or without ``jit``, that names shards."""
    if config.sharded is not None:
        raise SpecError(
            "with_processes: the function of a shard runs on the devices of the mesh only, so it "
            "cannot be called inside jax.jit, grad or vmap, nor without jit; take derivatives "
            "inside the function"
        )
