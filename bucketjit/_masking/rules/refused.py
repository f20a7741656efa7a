"""Primitives that are never masked at symbolic sizes, each with its reason and a way out.

Such a call runs at its exact shape, or raises, as the fallback policy says. Keys are names, because
the modules of some primitives (Pallas) are imported only by programs that use them. Only equations
that mention a symbolic size are refused. A program may use these primitives on static sizes.
"""

from __future__ import annotations

from typing import Any, NoReturn

from jax import Array

from bucketjit._masking.rule_context import Rule, RuleContext

_LEAVE_STATIC = "leave the axis static (None or _)"
_DECLARE = (
    'declare the function that calls it, such as @bucketjit.kernel("n, d", out="n, d"), which '
    "then gets the logical sizes"
)
_OWN_RULE = f"add a masking rule with .with_rules({{primitive: rule}}), or {_LEAVE_STATIC}"

MOVED = (
    "it moves open axes between shards, and would put the padding of one shard where the data of "
    "another one belongs"
)
REDUCE_FIRST = "reduce open axes on each shard first, such as x.sum(0), and combine the results"

_MOVES = (
    *("all_gather", "all_gather_reduced", "all_to_all", "ragged_all_to_all", "reduce_scatter"),
    *("ppermute", "psend", "precv", "pbroadcast", "pbroadcast_dynamic", "preduced"),
    *("unreduced_psum", "unreduced_pmax", "unreduced_pmin", "unreduced_reduce_scatter"),
)
_REFERENCES = (
    *("ref", "new_ref", "empty_ref", "free_ref", "freeze", "get", "swap", "addupdate"),
    *("accum_grad_in_ref", "run_state", "run_scoped", "masked_load", "masked_swap"),
)

#: Names of primitives, the reason why they are not masked, and the remedy.
REFUSED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("core_map",),
        "each core sees its part of the padded array, and where the real data ends differs from "
        "part to part",
        _LEAVE_STATIC,
    ),
    (_MOVES, MOVED, REDUCE_FIRST),
    (
        _REFERENCES,
        "a mutable reference is read and written in place, padding included",
        f"carry the array through lax.fori_loop or lax.scan and use .at[].set, or {_LEAVE_STATIC}",
    ),
    (
        ("pallas_call", "mpmd_map"),
        "a Pallas kernel reads whole blocks of the padded array, and nothing says which of what "
        "it reads is padding",
        f"{_DECLARE}, use the jax.numpy form of the kernel, or {_LEAVE_STATIC}",
    ),
    (
        ("ffi_call",),
        "foreign code is handed the padded buffers and would take padding for data",
        f"{_DECLARE}, or {_LEAVE_STATIC}",
    ),
    (
        ("custom_partitioning",),
        "its own partitioning rules were written for the shape it was called with",
        _OWN_RULE,
    ),
    (
        ("call_exported",),
        "an exported program computes on the whole padded array",
        "call the function itself in place of its export, or " + _LEAVE_STATIC,
    ),
    (
        ("rng_bit_generator", "rng_uniform"),
        "its bits depend on the whole shape drawn, which is the padded one",
        f"use keys of JAX's default generator (threefry2x32), or {_LEAVE_STATIC}",
    ),
)


def _refusal(reason: str, remedy: str) -> Rule:

    def rule(ctx: RuleContext, *operands: Array) -> NoReturn:
        ctx.refuse(reason, remedy)

    return rule


TABLE: dict[Any, Rule] = {
    name: _refusal(reason, remedy) for names, reason, remedy in REFUSED for name in names
}
