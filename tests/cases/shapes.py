"""Broadcasts, transposes, joins, splits, and what jax.numpy builds from them."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
EVEN = ({"b": 1, "s": 8}, {"b": 4, "s": 2}, {"b": 3, "s": 6})
moves = functools.partial(Case, sizes=SIZES, domains=("mixed",))

KEYS = Arg("b", "key")


def _alibi(x):
    s = x.shape[1]
    distance = jnp.arange(s)[:, None] - jnp.arange(s)[None, :]
    return x[:, :, None] - jnp.abs(distance)


def _pad_to_static(x):
    return jnp.concatenate([x, jnp.full((12 - x.shape[0],), 7.0)])


BROADCASTS = [
    moves("broadcast_keys", lambda k: jnp.broadcast_to(k, (2, *k.shape)), (KEYS,)),
    moves("transpose_keys", lambda k: k.T, (Arg("b, s", "key"),), ("transpose",)),
    moves("empty", lambda x: 0 * lax.empty(x.shape, jnp.int32), ("b, s",), ("empty",)),
    moves("alibi", _alibi, ("b, s",)),
]

IOTAS = [
    moves("linspace", lambda x: jnp.linspace(0, 1, x.shape[0]), ("s",)),
    moves(
        "toeplitz", lambda x: x[jnp.abs(jnp.arange(x.size)[:, None] - jnp.arange(x.size))], ("s",)
    ),
    moves("diagonal", jnp.diagonal, ("s, s",), grad=True),
]

JOINS = [
    moves("concat_append", lambda x, y: jnp.append(x, y), (Arg("s", "bool"), Arg("t", "bool"))),
    moves("concat_keys", lambda k, j: jnp.concatenate([k, j]), (KEYS, Arg("t", "key"))),
    moves("concat_to_static", _pad_to_static, ("s",), constraints=("s <= 11",)),
    moves("stack", lambda x, y: jnp.stack([x, y], 1), ("b, s", "b, s"), grad=True),
    moves("lax_stack", lambda x, y: jnp.stack([x, y, x], -1), (Arg("b", "bfloat16"),) * 2),
]


TILES = [
    moves("tile", lambda x: jnp.tile(x, (2, 3)), ("b, s",), ("tile",), grad=True),
    moves("tile_static_axis", lambda x: jnp.tile(x, (1, 2)), ("s, 3",), ("tile",)),
    moves("tile_by_size", lambda x, y: jnp.tile(x, (y.shape[0], 2)), ("3, s", "b"), ("tile",)),
    moves("tile_new_axis", lambda x: jnp.tile(x, (2, 1, 1)), (Arg("b, s", "uint8"),)),
    moves("repeat_outer", lambda x: jnp.repeat(x, 3, axis=0), (Arg("b, s", "bfloat16"),)),
    moves(
        "repeat_each",
        lambda x, n: jnp.repeat(x, n, axis=0, total_repeat_length=9),
        ("b, s", Arg("b", "int32", 0, 4)),
        grad=True,
    ),
]

CASES = [*BROADCASTS, *IOTAS, *JOINS, *TILES]
