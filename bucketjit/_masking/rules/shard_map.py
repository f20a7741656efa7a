"""``shard_map``: each shard has its part of the rows, not its part of the padded array.

    x:f32[n, 3], n = 6, padded to 8, over two devices

    rows                0 1 2 3 4 5 . .
    the padded halves   0 1 2 3 | 4 5 . .       not the shards of the exact run
    laid out anew       0 1 2 . | 3 4 5 .       shard i begins with its n / 2 rows

So sharded open axes are gathered into the second layout before the ``shard_map``, its body is
evaluated with the sizes of a shard (``n // 2`` rows, padded to 4), and the results are gathered
back. All shards have the same sizes, as the mesh cuts the exact array into equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bucketjit._ir.sized import makes_size
from bucketjit._jax.jaxprs import all_equations, open_jaxpr, shape_of
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules.control import evaluate_strong_at
from bucketjit._sizes.expressions import Dim, Shape, is_symbolic


def shard_map(ctx: RuleContext, *operands: Array) -> Any:
    """Each shard begins with its own rows: sharded open axes are laid out anew, and back."""
    given = ctx.symbolic_params
    inner, _ = open_jaxpr(given["jaxpr"])
    mesh, specs, out_specs = given["mesh"], given["in_specs"], given["out_specs"]
    if ctx.uneven:
        ctx.refuse("inside of a function of one shard there is no array of all shards to map over")
    if any(map(makes_size, all_equations(inner))):
        ctx.refuse("a size that is computed in it differs from shard to shard")
    laid_out = [
        _to_shards(ctx, mesh, x, spec, shape, shape_of(var))
        for x, spec, shape, var in zip(operands, specs, ctx.in_shapes, inner.invars, strict=True)
    ]

    def body(sizes: Any, *shards: Array) -> tuple[Any, ...]:
        return evaluate_strong_at(ctx, sizes, given["jaxpr"], *shards)

    outs = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(PartitionSpec(), *specs),
        out_specs=tuple(out_specs),
        axis_names=given["newly_manual_axes"],
        check_vma=False,
    )(ctx.run_time_sizes, *laid_out)
    return [
        _from_shards(ctx, mesh, x, spec, shape, shape_of(var))
        for x, spec, shape, var in zip(outs, out_specs, ctx.out_shapes, inner.outvars, strict=True)
    ]


def _sharded(mesh: Any, spec: Any, shape: Shape) -> list[tuple[int, int]]:
    """The open axes that are sharded, each with the number of its shards."""
    return [(a, n) for a, n in _counts(mesh, spec) if n > 1 and is_symbolic(shape[a])]


def _counts(mesh: Any, spec: Any) -> Iterator[tuple[int, int]]:
    """The axes that a spec names, each with the number of its shards."""
    for axis, names in enumerate(spec):
        names = () if names is None else names if isinstance(names, tuple) else (names,)
        yield axis, math.prod(mesh.shape[name] for name in names)


def _to_shards(
    ctx: RuleContext, mesh: Any, x: Array, spec: Any, shape: Shape, local: Shape
) -> Array:
    """An operand whose shards begin with their own rows."""
    whole: Any = None
    for axis, count in _sharded(mesh, spec, shape):
        whole = _replicated(mesh, x) if whole is None else whole
        part, padded = ctx.logical(local[axis]), ctx.padded(local[axis])
        shard, row = _places(count * padded, padded)
        whole = jnp.take(whole, shard * part + row, axis=axis, mode="clip")
    return x if whole is None else _placed(mesh, whole, spec)


def _from_shards(
    ctx: RuleContext, mesh: Any, x: Array, spec: Any, shape: Shape, local: Shape
) -> Array:
    """A result whose rows are one after the other, with the padding at the end."""
    whole: Any = None
    for axis, count in _sharded(mesh, spec, shape):
        whole = _replicated(mesh, x) if whole is None else whole
        padded = x.shape[axis] // count
        shard, row = _places(ctx.padded(shape[axis]), ctx.logical(local[axis]))
        whole = jnp.take(whole, shard * padded + row, axis=axis, mode="clip")
    return x if whole is None else _placed(mesh, whole, spec)


def _places(length: int, part: Dim | Array) -> tuple[Any, Any]:
    """The part and the place in it of each position, where all parts are equally long."""
    positions = jnp.arange(length, dtype=jnp.int32)
    shard = positions // jnp.maximum(part, 1)
    return shard, positions - shard * part


def _replicated(mesh: Any, x: Array) -> Any:
    """``x``; where types say how arrays are sharded, a whole copy of it on each device."""
    return _placed(mesh, x, PartitionSpec()) if AxisType.Explicit in mesh.axis_types else x


def _placed(mesh: Any, x: Any, spec: Any) -> Any:
    """``x``, sharded as a result of the ``shard_map`` is, if equal parts of it can be."""
    if any(x.shape[axis] % count for axis, count in _counts(mesh, spec)):
        return x
    sharding = NamedSharding(mesh, spec)
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding) if isinstance(mesh, Mesh) else x


TABLE: dict[Any, Rule] = {"shard_map": shard_map}
