"""Primitives that run as they stand, and sizes: an input, a computed one, a size as a value.

A real position of an elementwise result depends on real positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from bucketjit._ir.dataflow import ELEMENTWISE
from bucketjit._ir.expressions import Shape, is_symbolic
from bucketjit._ir.primitives import size_constant_p, sized_p, unsized_p
from bucketjit._jax.arrays import with_type
from bucketjit._masking.array_ops import crop
from bucketjit._masking.rule_context import Rule, RuleContext


def fit(array: Array, shape: Shape, target: Sequence[int]) -> Any:
    """Give the symbolic axes of an operand the padded sizes of the output.

    Sizes that are equal as expressions almost always have equal padded sizes, so this rarely does
    anything. Axes of size 1 that broadcast are left alone.
    """
    for axis, (dim, size) in enumerate(zip(shape, target, strict=True)):
        if is_symbolic(dim) and array.shape[axis] != size:
            array = crop(array, axis, size)
    return array


def elementwise(ctx: RuleContext, *operands: Array) -> Any:
    """Padding in, padding out."""
    target = ctx.padded_shape(ctx.out_shapes[0])
    pairs = zip(operands, ctx.in_shapes, strict=True)
    fitted = (fit(x, shape, target) if len(shape) == len(target) else x for x, shape in pairs)
    return ctx.bind(*fitted)


def unchanged(ctx: RuleContext, *operands: Array) -> Any:
    """Every output has the sizes of its operand: run it as it stands.

    ``bitcast_convert_type`` between widths adds or removes a trailing axis. That axis is static:
    its size is the ratio of the widths.
    """
    return ctx.bind(*operands)


def size_as_value(ctx: RuleContext) -> Any:
    """The program reads a size: it gets the logical one."""
    dim = ctx.symbolic_params["dim"]
    return lax.convert_element_type(ctx.logical(dim), ctx.out_avals[0].dtype)


# --- annotations --------------------------------------------------------------------------------

# Primitives that say something about an array without changing it: names, placement, metadata.


def annotation(ctx: RuleContext, *operands: Array) -> Any:
    """The padded array is named, placed or kept like the logical one."""
    return ctx.bind(*operands)


# --- paired -------------------------------------------------------------------------------------

# What a program of concrete traces takes from the trace at the logical sizes.
#
# Such a program comes from traces at several concrete sizes. A constant that differs between the
# traces is a size constant: an input of the executable, taken from a trace at the logical sizes of
# the call. See `bucketjit._tracing.concrete`.


def size_constant(ctx: RuleContext) -> Any:
    """An input of the executable, padded like any other."""
    aval = ctx.out_avals[0]
    value = ctx.sizes.size_constants[ctx.params["index"]]
    return with_type(value, aval.dtype, bool(getattr(aval, "weak_type", False)))


# --- sized --------------------------------------------------------------------------------------

# Sizes that the program computes; see `bucketjit._ir.primitives`.


def sized(ctx: RuleContext, n: Array, *arrays: Array) -> list[Any]:
    """The rows from the computed size on become padding, and later equations mask them."""
    params = ctx.symbolic_params
    if params["defines"]:
        rows = jnp.clip(n, 0, ctx.logical(params["bound"])) if params["is_checked"] else n
        ctx.sizes.define(params["variable"], rows + 1)
    return [crop(array, 0, ctx.padded(params["dim"])) for array in arrays]


def unsized(ctx: RuleContext, n: Array, *arrays: Array) -> list[Any]:
    """The rows from the computed size on are zeros, up to the size that it was chosen from."""
    rows = ctx.padded(ctx.symbolic_params["bound"])
    pairs = zip(arrays, ctx.in_shapes[1:], strict=True)
    return [crop(ctx.fill(x, axes=(0,), value=0, shape=shape), 0, rows) for x, shape in pairs]


TABLE: dict[Any, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(("bitcast_convert_type", "optimization_barrier"), unchanged),
    "dim_as_value": size_as_value,
    **dict.fromkeys(("name", "tie", "dce_sink", "device_put", "reshard"), annotation),
    **dict.fromkeys(("with_memory_space_constraint", "sharding_constraint"), annotation),
    **dict.fromkeys(("layout_constraint", "inspect_sharding", "xla_metadata_value"), annotation),
    size_constant_p: size_constant,
    sized_p: sized,
    unsized_p: unsized,
}
