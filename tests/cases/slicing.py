"""Slices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

CASES = [
    Case("rev", lambda x: lax.rev(x, (0, 1)), ("b, s",), ("rev",), grad=True),
    Case("pad", lambda x: lax.pad(x, x[0, 0], ((1, 2, 0), (-1, 3, 2))), ("b, s",), ("pad",), grad=True),
    Case("tail", lambda x: x[:, 1:], ("b, s",), ("gather",), grad=True, constraints=("s>=2",)),
]
