"""Calls, branches and loops: the programs inside are masked; loops run their logical steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Jaxpr

from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax import jaxprs
from bucketjit._jax.arrays import with_type
from bucketjit._masking.array_ops import of_all_rows, select
from bucketjit._masking.loops import has_loop, holds_loop, loops_only_while, where_running
from bucketjit._masking.padding_facts import NOTHING, Fact
from bucketjit._masking.padding_plan import facts_of_loop
from bucketjit._masking.rule_context import Rule, RuleContext, zeros
from bucketjit._raised import in_one_line, is_of_machine


def strong(x: Array) -> Any:
    """``x`` as an array without a weak type: loops and branches compare types exactly."""
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    return with_type(x, x.dtype, False)


def evaluate_strong(
    ctx: RuleContext, jaxpr: Jaxpr, *operands: Array, at: Any = None
) -> tuple[Any, ...]:
    """The masked outputs of a sub-program, with the dtypes of its avals and no weak types."""
    outs = ctx.evaluate(jaxpr, *operands, at=at)
    dtypes = map(jaxprs.dtype_of, jaxprs.open_jaxpr(jaxpr)[0].outvars)
    return tuple(with_type(x, dtype, False) for x, dtype in zip(outs, dtypes, strict=True))


# --- calls --------------------------------------------------------------------------------


def call(ctx: RuleContext, *operands: Array) -> list[Any]:
    """Evaluate the called program in place: what calls it does not change what it computes."""
    return ctx.evaluate(jaxprs.called_jaxpr(ctx.params), *operands)


def remat(ctx: RuleContext, *operands: Array) -> Any:
    """Bind the rematerialisation again around the masked program, so memory use stays as asked."""
    jaxpr = ctx.params["jaxpr"]
    inner, consts = jaxprs.stage(lambda *xs: evaluate_strong(ctx, jaxpr, *xs), operands)
    cse = ctx.params["prevent_cse"]
    if isinstance(cse, tuple):  # one flag per operand; the constants come first
        cse = (False,) * len(consts) + cse
    return ctx.bind(*consts, *operands, jaxpr=inner, prevent_cse=cse)


def custom_linear_solve(ctx: RuleContext, *operands: Array) -> list[Any]:
    """Evaluate the user's own ``solve``; the other three programs serve derivatives only."""
    lengths, jaxprs = ctx.params["const_lengths"], ctx.params["jaxprs"]
    start = lengths.matvec + lengths.vecmat
    consts = operands[start : start + lengths.solve]
    rhs = operands[sum(lengths) :]
    return ctx.evaluate(jaxprs.solve, *consts, *rhs)


def call_hi_primitive(ctx: RuleContext, *operands: Array) -> list[Any]:
    """Evaluate what the primitive expands to, traced with the symbolic shapes it was bound at."""
    try:
        expanded = jaxprs.expand_hi_primitive(ctx.symbolic_params["_prim"], ctx.in_avals)
    except Exception as error:
        if is_of_machine(error):
            raise
        name = type(ctx.symbolic_params["_prim"]).__name__
        ctx.refuse(f"{name} does not expand at symbolic sizes ({in_one_line(error)})")
    return ctx.evaluate(expanded, *operands)


# --- branches -----------------------------------------------------------------------------


def cond(ctx: RuleContext, index: Array, *operands: Array) -> Any:
    """Switch over the masked branches; the index is a scalar, so it has no padding."""
    jaxprs, platforms = ctx.params["branches"], ctx.params.get("branches_platforms")
    operands = tuple(map(strong, operands))
    if platforms is None:

        def taken(i: int) -> Any:
            return jnp.clip(index, 0, len(jaxprs) - 1) == i

        branches = [
            _branch(ctx, jaxpr, functools.partial(taken, i)) for i, jaxpr in enumerate(jaxprs)
        ]
        return lax.switch(index, branches, *operands)
    branches = [_branch(ctx, jaxpr) for jaxpr in jaxprs]
    named = {p: f for names, f in zip(platforms, branches, strict=True) for p in names or ()}
    default = branches[-1] if platforms[-1] is None else None
    return lax.platform_dependent(*operands, default=default, **named)


def _branch(
    ctx: RuleContext, jaxpr: Jaxpr, taken: Callable[[], Any] | None = None
) -> Callable[..., tuple[Any, ...]]:
    """One branch; ``taken`` says at run time whether it runs, where that is not known before.

    The condition stops loops in a branch that does not run; see `bucketjit._masking.loops`.
    """
    if taken is None or not has_loop(jaxprs.open_jaxpr(jaxpr)[0]):
        return lambda *xs: evaluate_strong(ctx, jaxpr, *xs)

    def branch(*xs: Any) -> tuple[Any, ...]:
        with loops_only_while(taken()):
            return evaluate_strong(ctx, jaxpr, *xs)

    return branch


# --- while --------------------------------------------------------------------------------


def while_loop(ctx: RuleContext, *operands: Array) -> Sequence[Any]:
    """Loop while a real row's predicate holds.

    The predicate of a vmapped loop has the batch axes. Rows that are done keep their carry. Padded
    rows are never begun, so their contents cannot keep the loop running. A loop with loops inside
    carries its predicate along, so that they run only while it holds.
    """
    split = ctx.params["cond_nconsts"]
    cond_consts = operands[:split]
    body_consts = operands[split : (split := split + ctx.params["body_nconsts"])]
    init = tuple(map(strong, operands[split:]))
    cond_jaxpr, body_jaxpr = ctx.params["cond_jaxpr"], ctx.params["body_jaxpr"]
    rows = tuple(jaxprs.shape_of(jaxprs.open_jaxpr(cond_jaxpr)[0].outvars[0]))

    def holds(carry: Sequence[Any]) -> Any:
        (predicate,) = ctx.evaluate(cond_jaxpr, *cond_consts, *carry)
        return ctx.fill(jnp.asarray(predicate), value=False, shape=rows)

    def step(carry: Sequence[Any]) -> tuple[Any, ...]:
        return evaluate_strong(ctx, body_jaxpr, *body_consts, *carry)

    has_loops = holds_loop(ctx.eqn)
    if not rows and not has_loops:
        return lax.while_loop(lambda carry: where_running(holds(carry)), step, init)

    # The predicate is evaluated in the body, once per step, and carried to the next step.
    def step_running(state: tuple[Any, tuple[Any, ...]]) -> tuple[Any, tuple[Any, ...]]:
        running, carry = state
        with loops_only_while(jnp.any(running)) if has_loops else nullcontext():
            new = step(carry)
            if rows:  # the leading axes
                wide = [lax.expand_dims(running, range(running.ndim, x.ndim)) for x in new]
                new = tuple(map(select, wide, new, carry))
            again = holds(new)
        return where_running(again), new

    begin = where_running(holds(init)), init
    return lax.while_loop(lambda state: jnp.any(state[0]), step_running, begin)[1]


# --- scan ---------------------------------------------------------------------------------------

# Scans: a static length keeps JAX's scan; a symbolic length runs the logical number of steps.


def scan(ctx: RuleContext, *operands: Array) -> Sequence[Any]:
    """Run exactly the logical steps: padding along the scanned axis does not count."""
    num_consts, num_carry = jaxprs.scan_arity(ctx.params)
    split = num_consts + num_carry
    consts = operands[:num_consts]
    init = tuple(map(strong, operands[num_consts:split]))
    xs = tuple(map(strong, operands[split:]))
    jaxpr = ctx.params["jaxpr"]
    length = ctx.symbolic_params["length"]
    if is_symbolic(length) and ctx.padded(length) == 0:  # no call in this bucket has a step
        return [*init, *(zeros(ctx, aval) for aval in ctx.out_avals[num_carry:])]
    body, padding = jaxprs.open_jaxpr(jaxpr)[0], ctx.padding
    facts = padding.facts(operands, ctx.eqn.invars)
    of_rows = [fact.moved(-1) for fact in facts[split:]]
    of_carry = facts_of_loop(ctx.eqn, facts, padding.plan, padding.results)
    of_ys: list[Fact] = []

    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[Any, Any]:
        padding.note_facts([*carry, *x], body.invars[num_consts:], [*of_carry, *of_rows])
        outs = evaluate_strong(ctx, jaxpr, *consts, *carry, *x)
        facts = padding.facts(outs, body.outvars)
        if not all(map(Fact.includes, facts, of_carry)):
            # What was expected of the carry does not last, so nothing is.
            of_carry[:] = [NOTHING] * num_carry
            return step(list(map(lax.optimization_barrier, carry)), x)
        of_ys[:] = [fact.moved(1) for fact in facts[num_carry:]]
        return outs[:num_carry], outs[num_carry:]

    if is_symbolic(length):
        outs = _steps(ctx, step, init, xs, length)
    else:
        options = {name: ctx.params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(step, init, xs, **options)
        outs = [*carry, *ys]
    padding.note_facts(outs, ctx.eqn.outvars, [*of_carry, *of_ys])
    return outs


def _steps(ctx: RuleContext, step: Any, init: Any, xs: Any, length: Any) -> list[Any]:
    """A scan over a run-time number of steps: what JAX lowers its own scan to, with that bound.

    A reversed scan starts at the logical end, since the real data is at the front.
    """
    logical = ctx.logical(length)
    ys = tuple(zeros(ctx, aval) for aval in ctx.out_avals[len(init) :])
    reverse = ctx.params["reverse"]

    def body(state: Any) -> Any:
        i, carry, ys = state
        running = i < logical
        place = logical - 1 - i if reverse else i
        # Under `vmap`, a row that is done goes on with `i` beyond its logical length, and what it
        # computes from its padding is dropped. One position for all rows is a slice, not a gather.
        read = jnp.clip(place, 0, jnp.maximum(logical - 1, 0)) if reverse else i
        with loops_only_while(running):
            new, y = step(carry, [lax.dynamic_index_in_dim(x, read, keepdims=False) for x in xs])
        # A row that is done must not write at a clamped negative position, so it writes its own
        # padding.
        write = jnp.where(running, place, i) if reverse else i
        rows = zip(ys, y, strict=True)
        ys = tuple(lax.dynamic_update_index_in_dim(all_, row, write, 0) for all_, row in rows)
        carry = tuple(_while_running(running, a, b) for a, b in zip(new, carry, strict=True))
        return i + 1, carry, ys

    steps = _most_steps(logical)
    _, carry, ys = lax.while_loop(lambda s: s[0] < steps, body, (jnp.int32(0), init, ys))
    return [*carry, *ys]


# Under `vmap`, a batched number of steps would make JAX select every stacked output in every step,
# which takes quadratic time. `_most_steps` keeps one number of steps for all rows, the most that a
# row needs. `_while_running` keeps the carry of rows that are done. Without `vmap` both are free.


_most_steps = of_all_rows(jnp.max)


@custom_vmap
def _while_running(running: Array, new: Array, old: Array) -> Any:
    return new


@_while_running.def_vmap
def _(axis_size: int, batched: Sequence[bool], running: Array, new: Array, old: Array) -> Any:
    if not batched[0]:
        return _while_running(running, new, old), batched[1]
    in_axes = [0 if b else None for b in batched]
    return jax.vmap(lax.select, in_axes=in_axes, axis_size=axis_size)(running, new, old), True


TABLE: dict[Any, Rule] = {
    **dict.fromkeys(("jit", "pjit", "call", "closed_call", "core_call", "eval_jaxpr"), call),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), call),
    **dict.fromkeys(("custom_vmap_call", "linear_call", "remat_opt", "composite"), call),
    "xla_metadata_call": call,
    **dict.fromkeys(("remat2", "checkpoint"), remat),
    "custom_linear_solve": custom_linear_solve,
    "call_hi_primitive": call_hi_primitive,
    "cond": cond,
    "while": while_loop,
    "scan": scan,
}
