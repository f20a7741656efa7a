"""Sizes that the program computes; see `bucketjit._ir.sized`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from bucketjit._ir.sized import sized_p, unsized_p
from bucketjit._masking.array_ops import crop
from bucketjit._masking.rule_context import Rule, RuleContext


def sized(ctx: RuleContext, n: Array, *arrays: Array) -> list[Any]:
    """The rows from the computed size on become padding, and later equations mask them."""
    params = ctx.symbolic_params
    if not params["defines"]:
        return [crop(array, 0, ctx.padded(params["dim"])) for array in arrays]
    rows = jnp.clip(n, 0, ctx.logical(params["bound"])) if params["is_checked"] else n
    ctx.define(params["variable"], rows + 1)
    return [crop(array, 0, ctx.padded(params["dim"])) for array in arrays]


def unsized(ctx: RuleContext, n: Array, *arrays: Array) -> list[Any]:
    """The rows from the computed size on are zeros, up to the size that it was chosen from."""
    rows = ctx.padded(ctx.symbolic_params["bound"])
    shapes = ctx.in_shapes[1:]
    return [
        crop(ctx.fill(array, axes=(0,), value=0, shape=shape), 0, rows)
        for array, shape in zip(arrays, shapes, strict=True)
    ]


TABLE: dict[Any, Rule] = {sized_p: sized, unsized_p: unsized}
