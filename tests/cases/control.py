"""Calls, branches, loops and scans."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case


@jax.custom_jvp
def _double(x):
    return x + x


_double.defjvp(lambda p, t: (_double(*p), t[0] + t[0]))


@jax.custom_vjp
def _triple(x):
    return x + x + x


_triple.defvjp(lambda x: (_triple(x), None), lambda _, t: (t + t + t,))

CASES = [
    Case("jit", lambda x: jax.jit(jnp.sin)(x), ("b, s",), ("jit",), grad=True),
    Case("custom_jvp_call", _double, ("b, s",), ("custom_jvp_call",)),
    Case("custom_vjp_call", _triple, ("b, s",), ("custom_vjp_call",)),
    Case(
        "remat",
        lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x),
        ("b, s",),
        ("remat2",),
    ),
    Case(
        "cond",
        lambda x, p: lax.cond(p > 0, lambda y: y, lambda y: y + 1, x),
        ("b, s", Arg("", "int32")),
        ("cond",),
    ),
    Case(
        "scan",
        lambda x: lax.scan(lambda c, y: (c + y, c * y), jnp.float32(0.5), x),
        ("s",),
        ("scan",),
    ),
    Case(
        "scan_rows",
        lambda c, x: lax.scan(lambda c, y: (c + y, c * y), c, x),
        ("s", "b, s",),
        ("scan",),
    ),
    Case(
        "scan_reverse",
        lambda c, x: lax.scan(lambda c, y: (c + y, c * y), c, x, reverse=True),
        ("s", "b, s",),
        ("scan",),
    ),
]
