"""Collectives over a mapped axis, which ``vmap`` turns into one of the array."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from tests.harness import cases, family

case, psum = family(), family("psum", grad=True)


def _over(fold, axis=0):
    return lambda x: jax.vmap(lambda row: row - fold(row, "i"), in_axes=axis, axis_name="i")(x)


def _normalised(x):
    def row(r):
        mean = lax.pmean(r, "i")
        spread = lax.pmean(jnp.square(r - mean), "i")
        return (r - mean) * lax.rsqrt(spread + 1e-3)

    return jax.vmap(row, axis_name="i")(x)


def _on_a_mesh(body, out=None):
    """A ``shard_map`` over one device; tests/masking/test_shard_map.py has several."""

    def mapped(x):
        given = {"axis_types": (AxisType.Auto,), "devices": jax.devices()[:1]}
        mesh = jax.make_mesh((1,), ("d",), **given)
        rows, whole = PartitionSpec("d"), PartitionSpec()
        return jax.shard_map(body, mesh=mesh, in_specs=rows, out_specs=out or whole)(x)

    return mapped


TABLE = {
    "psum": psum(_over(lax.psum), "b, 3"),
    "psum_inner": psum(_over(lax.psum, 1)),
    "psum_int": psum(_over(lax.psum), "int32[b, 3]", grad=False),
    "psum_of_two": case(lambda x: _over(lambda r, i: sum(lax.psum((r, r * r), i)))(x)),
    "pmean": psum(_over(lax.pmean)),
    "pmax": case(_over(lax.pmax), covers="pmax", domains=("mixed", "negative", "special")),
    "pmin": case(_over(lax.pmin), covers="pmin", domains=("mixed", "positive", "special")),
    "pmax_int": case(_over(lax.pmax), "int8[b, s]", covers="pmax"),
    "shard_map": case(
        _on_a_mesh(lambda x: jnp.cumsum(x, 0), PartitionSpec("d")), covers="shard_map", grad=True
    ),
    "psum_in_shard_map": case(
        _on_a_mesh(lambda x: lax.psum((x * x.shape[0]).sum(0), "d")),
        "b, 3",
        covers="shard_map psum_invariant pvary",
        grad=True,
    ),
    "batch_norm_by_name": psum(_normalised, "b, 3", rtol=1e-4, atol=1e-4),
}
CASES = cases(TABLE)
