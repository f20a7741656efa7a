"""Types of values inside ``shard_map`` that say over which axes of the mesh a value varies.

    before   c:f32[]{V:d} = pvary[axes=('d',)] b          the type of c: it varies over d
    after    c:f32[] = b                                  a masked program has no such types

A masked program has none, as masks and sizes are the same on all shards, and JAX would refuse to
combine them with values that vary. So collectives that exist for these types are replaced by their
rules, and programs with such types in them are traced anew.
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from bucketjit._jax.jaxprs import bodies, varies
from bucketjit._jax.primitives import name_of

#: Changes only the type of a value: over which axes it varies.
CASTS = frozenset(("pvary",))

#: Collectives whose results vary over fewer axes, and the ones for values without such types.
WITHOUT_TYPES = {"psum_invariant": "psum", "all_gather_invariant": "all_gather"}


def needs_retyping(eqn: JaxprEqn) -> bool:
    """Whether an equation cannot run as traced, because types in it say what varies."""
    name = name_of(eqn)
    if name in CASTS or name in WITHOUT_TYPES:
        return True
    typed = (atom for body in bodies(eqn) for atom in (*body.invars, *body.outvars))
    return name != "shard_map" and any(map(varies, typed))
