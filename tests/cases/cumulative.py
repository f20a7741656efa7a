"""Cumulative operations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import cases, family

case, cumsum = family(grad=True), family("cumsum")

ALL = ("mixed", "negative", "positive", "special")


def both_ways(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Along each axis, forward and in reverse."""
    return lambda x: [fn(x, axis=a, reverse=r) for a in (0, 1) for r in (False, True)]


TABLE = {
    **{
        name: case(
            both_ways(getattr(lax, name)),
            covers=name,
            domains=ALL,
            rtol=1e-4,
            grad=name == "cumsum",
        )
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    },
    **{
        f"{name}_{dtype}": case(
            both_ways(getattr(lax, name)),
            f"{dtype}[b, s] {low}:{high}",
            covers=name,
            rtol=rtol,
            atol=rtol,
            grad=False,
        )
        for name, dtype, low, high, rtol in [
            *(("cumsum", "int32", -5, 6, 0), ("cumsum", "uint8", 0, 256, 0)),
            *(("cumsum", "bfloat16", 0, 0, 5e-2), ("cumsum", "complex64", 0, 0, 1e-4)),
            *(("cumprod", "int32", -3, 4, 0), ("cumprod", "bfloat16", 0, 0, 1e-1)),
            *(("cumprod", "complex64", 0, 0, 1e-4), ("cummax", "int32", -5, 6, 0)),
            *(("cummax", "uint8", 0, 256, 0), ("cummax", "bfloat16", 0, 0, 0)),
            *(("cummin", "int8", 120, 128, 0), ("cummin", "uint32", 5, 90, 0)),
            *(("cummin", "float16", 0, 0, 0), ("cumlogsumexp", "bfloat16", 0, 0, 1e-1)),
            ("cumlogsumexp", "complex64", 0, 0, 1e-4),
        ]
    },
    "cumsum_static_axis": cumsum(lambda x: lax.cumsum(x, axis=1, reverse=True), "b, 5", grad=True),
    "cummax_complex_static_axis": case(
        lambda x: lax.cummax(x, axis=1, reverse=True),
        "complex64[b, 5]",
        covers="cummax",
        grad=False,
    ),
    "cumsum_size_expression": cumsum(
        lambda x: lax.cumsum(jnp.concatenate([x, x]), reverse=True), "s, 2", grad=True
    ),
    **{
        f"{fn.__name__}_gradient": case(
            lambda x, fn=fn: [fn(x, axis=1), fn(x, axis=1, reverse=True)],
            "b, 4",
            rtol=1e-3,
            atol=1e-4,
        )
        for fn in (lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
    },
    "jnp_cumulative": case(
        lambda x: [
            jnp.cumsum(x),
            jnp.cumsum(x, axis=1, dtype=jnp.int32),
            jnp.cumprod(x, axis=0),
            jnp.nancumsum(x, axis=1),
            jnp.nancumprod(x, axis=0),
            jnp.cumulative_sum(x, axis=1),
            jnp.cumulative_sum(x, axis=1, include_initial=True),
        ],
        grad=False,
    ),
    "cumsum_of_mask": cumsum(lambda m: jnp.cumsum(m, axis=1) - 1, "bool[b, s]"),
    "diff_of_cumsum": case(lambda x: jnp.diff(jnp.cumsum(x, 1), axis=1, prepend=0)),
    "discounted_sum": case(
        lambda r: lax.cumsum(r * 0.9 ** jnp.arange(r.shape[1]), axis=1, reverse=True)
    ),
    "positions_in_segments": case(
        lambda m: jnp.arange(m.shape[0]) - lax.cummax(jnp.where(m, jnp.arange(m.shape[0]), 0)),
        "bool[s]",
        grad=False,
    ),
    "vmapped_cumsum": cumsum(jax.vmap(jnp.cumsum)),
}
CASES = cases(TABLE)
