"""Broadcasts, transposes, reshapes, joins and splits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

CASES = [
    Case("broadcast_scalar", lambda x: x * jnp.ones(x.shape), ("b, s",), ("broadcast_in_dim",)),
    Case("broadcast_row", lambda x, y: x + y, ("b, s", "s"), ("broadcast_in_dim",), grad=True),
    Case("transpose", lambda x: x.transpose(2, 0, 1), ("b, 3, s",), ("transpose",), grad=True),
    Case("squeeze", lambda x: jnp.squeeze(x, (0, 2)), ("1, s, 1",), ("squeeze",), grad=True),
    Case("expand_dims", lambda x: x[:, None, :, None], ("b, s",), ("broadcast_in_dim",)),
    Case("iota", lambda x: x + jnp.arange(x.shape[1]), ("b, s",), ("iota",)),
    Case("iota_inner", lambda x: x + lax.broadcasted_iota(jnp.int32, x.shape, 0), ("b, s",), ("iota",)),
    Case("merge_static", lambda x: x.reshape(x.shape[0], 6), ("b, 2, 3",), ("reshape",), grad=True),
    Case("merge_batch", lambda x: x.reshape(-1, 3), ("b, s, 3",), ("reshape",), grad=True),
    Case("split_batch", lambda x, y: x.reshape(*y.shape, 3), ("b*s, 3", "b, s"), ("reshape",)),
    Case("concat", lambda x, y: jnp.concatenate([x, y, x], 1), ("b, s", "b, t"), ("concatenate",), grad=True),
]
