"""What runs the calls of a bucketed function, where several processes or shards do so together."""

from __future__ import annotations

from bucketjit._config import Agreed, Config
from bucketjit._processes.agreement import Agreement
from bucketjit._processes.build_shards import ShardRequests
from bucketjit._processes.on_shards import OnShards
from bucketjit._runtime.engine_parts import TRACED, Parts
from bucketjit._runtime.observers import Together
from bucketjit.errors import SpecError


def together(config: Config) -> Together | None:
    """What runs the calls of one configuration; None if this process runs them alone.

    Args:
        config: The configuration.
    """
    if config.sharded is not None:
        return Agreement(config.agreed or Agreed(), OnShards(config.sharded))
    return None if config.agreed is None else Agreement(config.agreed)


def parts(config: Config) -> Parts:
    """The parts of the engine of one configuration.

    Args:
        config: The configuration.
    """
    return TRACED if config.sharded is None else Parts(requests=ShardRequests)


def refuse_inside(config: Config) -> None:
    """Refuse a call inside a transformation of JAX, or without ``jit``, that names shards.

    Args:
        config: The configuration.

    Raises:
        SpecError: The function is one of a shard.
    """
    if config.sharded is not None:
        raise SpecError(
            "with_processes: the function of a shard runs on the devices of the mesh only, so it "
            "cannot be called inside jax.jit, grad or vmap, nor without jit; take derivatives "
            "inside the function"
        )
