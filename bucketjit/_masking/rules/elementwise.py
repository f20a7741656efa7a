"""Elementwise primitives: a real position depends on real positions only, so just run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array, lax

from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._jax.primitives import primitives
from bucketjit._masking.array_ops import crop
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._sizes.expressions import Shape, is_symbolic


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
    fitted = [
        fit(x, shape, target) if len(shape) == len(target) else x
        for x, shape in zip(operands, ctx.in_shapes, strict=True)
    ]
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


_UNCHANGED = ("bitcast_convert_type", "optimization_barrier")

TABLE: dict[Any, Rule] = {
    **dict.fromkeys(primitives(*ELEMENTWISE), elementwise),
    **dict.fromkeys(primitives(*_UNCHANGED), unchanged),
    **dict.fromkeys(primitives("dim_as_value"), size_as_value),
}
