"""Names, placement and metadata, which change no value."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.scheduling_groups import scheduling_group
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.harness import cases, family

case = family(domains=("mixed",), grad=True)

_SHARDING = NamedSharding(Mesh(jax.devices()[:1], ("i",)), PartitionSpec("i"))
_ON_EACH = NamedSharding(_SHARDING.mesh, PartitionSpec())


def _on_scope(x):
    with set_xla_metadata(key="value"), jax.named_scope("scope"):
        return x - x.mean()


TABLE = {
    "checkpoint_name": case(lambda x: checkpoint_name(x, "x").sum(0), covers="name", grad=False),
    "device_put": case(lambda x: jax.device_put(x, jax.devices()[0]).mean(0), covers="device_put"),
    "sharding_constraint": case(
        lambda x: lax.with_sharding_constraint(x, _SHARDING).mean(0), covers="sharding_constraint"
    ),
    "reshard": case(lambda x: jax.sharding.reshard(x, _ON_EACH).mean(0), covers="reshard"),
    "metadata_of_a_value": case(
        lambda x: set_xla_metadata(jnp.cumsum(x, 0), key="value").sum(),
        covers="xla_metadata_value",
        grad=False,
    ),
    "metadata_of_a_call": case(
        lambda x: scheduling_group(name="group")(lambda y: y - y.mean())(x),
        covers="xla_metadata_call",
    ),
    "metadata_of_a_scope": case(_on_scope),
}
CASES = cases(TABLE)
