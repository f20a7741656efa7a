"""Elementwise primitives."""

from __future__ import annotations

import jax.numpy as jnp

from tests.harness import Arg, Case

CASES = [
    Case("add", lambda x, y: x + y, ("b, 3", "b, 3"), ("add",), grad=True),
    Case("sin", jnp.sin, ("b, s",), ("sin",), domains=("mixed", "special")),
    Case("max_int", jnp.maximum, (Arg("b", "int32"), Arg("b", "int32")), ("max",)),
]
