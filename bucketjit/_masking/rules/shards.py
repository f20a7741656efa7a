"""Collectives and ``shard_map``: what shards give to each other, by their logical sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bucketjit._ir.expressions import Shape, is_symbolic
from bucketjit._ir.primitives import makes_size, shard_mean_p, shard_psum_p
from bucketjit._jax.jaxprs import all_equations, open_jaxpr, primitive, shape_of
from bucketjit._masking.loops import CASTS, WITHOUT_TYPES
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules.control import evaluate_strong
from bucketjit._masking.rules.reductions import Identity, highest, lowest, zero
from bucketjit._masking.rules.refused import MOVED, REDUCE_FIRST

# --- collectives --------------------------------------------------------------------------------

# Collectives, over axes that ``vmap`` has turned into axes of an array and over axes of a mesh.
#
# Under ``vmap(axis_name=...)``, a ``psum`` over the mapped axis becomes a sum over an axis given by
# its position. Its transpose becomes a sum over no axis at all. These are reductions like any
# other.
#
# Over an axis of a mesh, a collective of closed axes runs as it stands, and no rule is asked. One
# of open axes combines positions of different shards. If the sizes are the same on all shards, as
# in a ``shard_map``, so are the positions of the padding, and a sum by element is right. If they
# differ (`BucketSizes.uneven`), the exact program would combine arrays of different shapes.


def fold(identity: Identity, name: str = "") -> Rule:
    """The rule of a fold over axes given by position, or of a mesh."""

    def rule(ctx: RuleContext, *operands: Array) -> Any:
        """Padding holds the neutral element, so it cannot change the result."""
        axes = ctx.params["axes"]
        placed = tuple(a for a in axes if isinstance(a, int))
        _refuse_uneven(ctx, axes)
        if not axes:
            return operands if ctx.primitive.multiple_results else operands[0]
        filled = (ctx.fill(x, axes=placed, value=identity(x.dtype)) for x in operands)
        return _bind(ctx, name, *filled)

    return rule


def _refuse_uneven(ctx: RuleContext, axes: Iterable[Any]) -> None:
    named = any(a in ctx.sizes.uneven for a in axes)
    if named and any(any(map(is_symbolic, shape)) for shape in ctx.in_shapes):
        ctx.refuse("it combines an open axis whose size differs from shard to shard", REDUCE_FIRST)


def _bind(ctx: RuleContext, name: str, *operands: Array) -> Any:
    """Run the primitive of the equation, or another one that takes groups of shards besides."""
    plain = primitive(name) if name else None
    if plain is None:
        return ctx.bind(*operands)
    return plain.bind(*operands, **ctx.params, axis_index_groups=None)


def gather(ctx: RuleContext, operand: Array) -> Any:
    """Closed axes are gathered as they are."""
    if any(map(is_symbolic, ctx.in_shapes[0])):
        ctx.refuse(MOVED, REDUCE_FIRST)
    return _bind(ctx, WITHOUT_TYPES[ctx.primitive.name], operand)


def mean(ctx: RuleContext, operand: Array) -> Any:
    """The rows of each shard weigh its value; half floats are summed in float32."""
    axis, rows = ctx.symbolic_params["axis"], ctx.logical(ctx.symbolic_params["rows"])
    _refuse_uneven(ctx, (axis,))
    kind = jnp.promote_types(operand.dtype, jnp.float32)
    weight = jnp.asarray(rows, jnp.finfo(kind).dtype)
    total = jax.lax.psum(operand.astype(kind) * weight, axis)
    return (total / jax.lax.psum(weight, axis)).astype(operand.dtype)


def total(ctx: RuleContext, operand: Array) -> Any:
    """The values of all shards are added as they are."""
    axis = ctx.symbolic_params["axis"]
    _refuse_uneven(ctx, (axis,))
    return jax.lax.psum(operand, axis)


def cast(ctx: RuleContext, operand: Array) -> Any:
    """The value stays as it is: types of masked programs do not say over which axes it varies."""
    return operand


# --- shard map ----------------------------------------------------------------------------------

# ``shard_map``: each shard has its part of the rows, not its part of the padded array.
#
#     x:f32[n, 3], n = 6, padded to 8, over two devices
#
#     rows                0 1 2 3 4 5 . .
#     the padded halves   0 1 2 3 | 4 5 . .       not the shards of the exact run
#     laid out anew       0 1 2 . | 3 4 5 .       shard i begins with its n / 2 rows
#
# So sharded open axes are gathered into the second layout before the ``shard_map``, its body is
# evaluated with the sizes of a shard (``n // 2`` rows, padded to 4), and the results are gathered
# back. All shards have the same sizes, as the mesh cuts the exact array into equal parts.


def shard_map(ctx: RuleContext, *operands: Array) -> Any:
    """Each shard begins with its own rows: sharded open axes are laid out anew, and back."""
    params = ctx.symbolic_params
    inner, _ = open_jaxpr(params["jaxpr"])
    mesh, specs, out_specs = params["mesh"], params["in_specs"], params["out_specs"]
    if ctx.sizes.uneven:
        ctx.refuse("inside of a function of one shard there is no array of all shards to map over")
    if any(map(makes_size, all_equations(inner))):
        ctx.refuse("a size that is computed in it differs from shard to shard")
    laid_out = [
        _moved(ctx, mesh, x, spec, shape, shape_of(var), to_shards=True)
        for x, spec, shape, var in zip(operands, specs, ctx.in_shapes, inner.invars, strict=True)
    ]

    def body(sizes: Any, *shards: Array) -> tuple[Any, ...]:
        return evaluate_strong(ctx, params["jaxpr"], *shards, at=ctx.sizes.at(*sizes))

    outs = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(PartitionSpec(), *specs),
        out_specs=tuple(out_specs),
        axis_names=params["newly_manual_axes"],
        check_vma=False,
    )((dict(ctx.sizes.values), ctx.sizes.size_constants), *laid_out)
    return [
        _moved(ctx, mesh, x, spec, shape, shape_of(var), to_shards=False)
        for x, spec, shape, var in zip(outs, out_specs, ctx.out_shapes, inner.outvars, strict=True)
    ]


def _counts(mesh: Any, spec: Any) -> Iterator[tuple[int, int]]:
    """The axes that a spec names, each with the number of its shards."""
    for axis, names in enumerate(spec):
        names = () if names is None else names if isinstance(names, tuple) else (names,)
        yield axis, math.prod(mesh.shape[name] for name in names)


def _moved(
    ctx: RuleContext, mesh: Any, x: Array, spec: Any, shape: Shape, local: Shape, to_shards: bool
) -> Array:
    """An operand whose shards begin with their own rows; or a result, its padding at the end.

    The ``shard_map`` of a gradient takes results of another one, which are laid out already.
    """
    axes = [(a, n) for a, n in _counts(mesh, spec) if n > 1 and is_symbolic(shape[a])]
    if not axes:
        return x
    layout = "shards", mesh, spec, str(local)

    def moved() -> Array:
        # Where types say how arrays are sharded, each device has a whole copy.
        whole = _placed(mesh, x, PartitionSpec()) if AxisType.Explicit in mesh.axis_types else x
        for axis, count in axes:
            logical, padded = ctx.logical(local[axis]), ctx.padded(local[axis])
            before, after = (logical, padded) if to_shards else (padded, logical)
            length = count * padded if to_shards else ctx.padded(shape[axis])
            positions = jnp.arange(length, dtype=jnp.int32)
            shard = positions // jnp.maximum(after, 1)
            index = shard * before + positions - shard * after
            whole = jnp.take(whole, index, axis=axis, mode="clip")
        return _placed(mesh, whole, spec)

    if to_shards:
        return ctx.padding.once((id(x), *layout), x, moved)
    result = moved()
    ctx.padding.once((id(result), *layout), result, lambda: x)
    return result


def _placed(mesh: Any, x: Any, spec: Any) -> Any:
    """``x``, sharded as a result of the ``shard_map`` is, if equal parts of it can be."""
    if any(x.shape[axis] % count for axis, count in _counts(mesh, spec)):
        return x
    sharding = NamedSharding(mesh, spec)
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding) if isinstance(mesh, Mesh) else x


TABLE: dict[Any, Rule] = {
    "psum": fold(zero),
    "pmax": fold(lowest),
    "pmin": fold(highest),
    "psum_invariant": fold(zero, WITHOUT_TYPES["psum_invariant"]),
    "all_gather_invariant": gather,
    shard_mean_p: mean,
    shard_psum_p: total,
    **dict.fromkeys(CASTS, cast),
    "shard_map": shard_map,
}
