"""Scans: a static length keeps JAX's scan; a symbolic length runs the logical number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from bucketjit._jax.jaxprs import scan_arity
from bucketjit._jax.primitives import primitives
from bucketjit._masking.loops import loops_only_while
from bucketjit._masking.rule_context import Rule, RuleContext, zeros
from bucketjit._masking.rules.control import evaluate_strong, strong
from bucketjit._sizes.expressions import is_symbolic


def scan(ctx: RuleContext, *operands: Array) -> Sequence[Any]:
    """Run exactly the logical steps: padding along the scanned axis does not count."""
    num_consts, num_carry = scan_arity(ctx.params)
    split = num_consts + num_carry
    consts = operands[:num_consts]
    init = tuple(map(strong, operands[num_consts:split]))
    xs = tuple(map(strong, operands[split:]))
    jaxpr = ctx.params["jaxpr"]

    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[Any, Any]:
        outs = evaluate_strong(ctx, jaxpr, *consts, *carry, *x)
        return outs[:num_carry], outs[num_carry:]

    length = ctx.symbolic_params["length"]
    if is_symbolic(length):
        return _steps(ctx, step, init, xs, length)
    carry, ys = lax.scan(
        step,
        init,
        xs,
        length=length,
        reverse=ctx.params["reverse"],
        unroll=ctx.params["unroll"],
    )
    return [*carry, *ys]


def _steps(ctx: RuleContext, step: Any, init: Any, xs: Any, length: Any) -> list[Any]:
    """A scan over a run-time number of steps: what JAX lowers its own scan to, with that bound.

    A reversed scan starts at the logical end, since the real data is at the front.
    """
    logical, size = ctx.logical(length), ctx.padded(length)
    y_avals = ctx.out_avals[len(init) :]
    ys = tuple(zeros(ctx, a) for a in y_avals)
    if size == 0:
        return [*init, *ys]
    reverse = ctx.params["reverse"]

    def body(state: Any) -> Any:
        i, carry, ys = state
        running = i < logical
        at = logical - 1 - i if reverse else i
        # Under `vmap`, a row that is done goes on with `i` beyond its logical length, and what it
        # computes from its padding is dropped. One position for all rows is a slice, not a gather.
        read = jnp.clip(at, 0, jnp.maximum(logical - 1, 0)) if reverse else i
        with loops_only_while(running):
            new, y = step(carry, [lax.dynamic_index_in_dim(x, read, keepdims=False) for x in xs])
        # A row that is done must not write at a clamped negative position, so it writes its own
        # padding.
        write = jnp.where(running, at, i) if reverse else i
        ys = tuple(
            lax.dynamic_update_index_in_dim(all_, one, write, 0)
            for all_, one in zip(ys, y, strict=True)
        )
        carry = tuple(_while_running(running, a, b) for a, b in zip(new, carry, strict=True))
        return i + 1, carry, ys

    steps = _most_steps(logical)
    _, carry, ys = lax.while_loop(lambda s: s[0] < steps, body, (jnp.int32(0), init, ys))
    return [*carry, *ys]


# Under `vmap`, a batched number of steps would make JAX select every stacked output in every step,
# which takes quadratic time. `_most_steps` keeps one number of steps for all rows, the most that a
# row needs. `_while_running` keeps the carry of rows that are done. Without `vmap` both are free.


@custom_vmap
def _most_steps(steps: Array) -> Any:
    return steps


@_most_steps.def_vmap
def _(axis_size: int, batched: Sequence[bool], steps: Array) -> tuple[Any, bool]:
    return _most_steps(jnp.max(steps) if batched[0] else steps), False


@custom_vmap
def _while_running(running: Array, new: Array, old: Array) -> Any:
    return new


@_while_running.def_vmap
def _(axis_size: int, batched: Sequence[bool], running: Array, new: Array, old: Array) -> Any:
    if not batched[0]:
        return _while_running(running, new, old), batched[1]
    in_axes = [0 if b else None for b in batched]
    return jax.vmap(lax.select, in_axes=in_axes, axis_size=axis_size)(running, new, old), True


TABLE: dict[Any, Rule] = dict.fromkeys(primitives("scan"), scan)
