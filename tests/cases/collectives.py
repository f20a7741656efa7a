"""Collectives over a mapped axis, which ``vmap`` turns into one of the array."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from tests.harness import Arg, Case

BATCH, BOTH = "b, 3", "b, s"


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


CASES = [
    Case("psum", _over(lax.psum), (BATCH,), ("psum",), grad=True),
    Case("psum_inner", _over(lax.psum, 1), (BOTH,), ("psum",), grad=True),
    Case("psum_int", _over(lax.psum), (Arg(BATCH, "int32"),), ("psum",)),
    Case("psum_of_two", lambda x: _over(lambda r, i: sum(lax.psum((r, r * r), i)))(x), (BOTH,)),
    Case("pmean", _over(lax.pmean), (BOTH,), ("psum",), grad=True),
    Case("pmax", _over(lax.pmax), (BOTH,), ("pmax",), domains=("mixed", "negative", "special")),
    Case("pmin", _over(lax.pmin), (BOTH,), ("pmin",), domains=("mixed", "positive", "special")),
    Case("pmax_int", _over(lax.pmax), (Arg(BOTH, "int8"),), ("pmax",)),
    Case(
        "shard_map",
        _on_a_mesh(lambda x: jnp.cumsum(x, 0), PartitionSpec("d")),
        (BOTH,),
        ("shard_map",),
        grad=True,
    ),
    Case(
        "psum_in_shard_map",
        _on_a_mesh(lambda x: lax.psum((x * x.shape[0]).sum(0), "d")),
        (BATCH,),
        ("shard_map", "psum_invariant", "pvary"),
        grad=True,
    ),
    Case("batch_norm_by_name", _normalised, (BATCH,), ("psum",), grad=True, rtol=1e-4, atol=1e-4),
]
