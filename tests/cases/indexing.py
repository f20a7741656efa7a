"""Slices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

CASES = [
    Case("take_rows", lambda x, i: x[i], ("b, s", Arg("t", "int32", "-b", "b")), ("gather",), grad=True),
    Case("add_rows", lambda x, i: x.at[i].add(2 * x[i]), ("b, s", Arg("t", "int32", "-b", "b")), ("gather",), grad=True),
]
