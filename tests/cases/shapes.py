"""Broadcasts, transposes, joins, splits, and what jax.numpy builds from them."""

import functools

import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
EVEN = ({"b": 1, "s": 8}, {"b": 4, "s": 2}, {"b": 3, "s": 6})
moves = functools.partial(Case, sizes=SIZES, domains=("mixed",))

KEYS = Arg("b", "key")


def _split_three(x):
    first, middle, last = jnp.split(x, [1, x.shape[1] // 2], axis=1)
    return first, middle * 2, last + 1


def _lax_split(x):
    s = x.shape[1]
    return lax.split(x, (s - s // 3 - 1, s // 3, 1), axis=1)


def _shift_right(tokens):
    return jnp.concatenate([jnp.zeros_like(tokens[:, :1]), tokens[:, :-1]], axis=1)


def _alibi(x):
    s = x.shape[1]
    distance = jnp.arange(s)[:, None] - jnp.arange(s)[None, :]
    return x[:, :, None] - jnp.abs(distance)


def _pad_to_static(x):
    return jnp.concatenate([x, jnp.full((12 - x.shape[0],), 7.0)])


BROADCASTS = [
    moves("broadcast_ones", lambda x: x * jnp.ones(x.shape), ("b, s",), ("broadcast_in_dim",)),
    moves("broadcast_row", lambda x, y: x + y, ("b, s", "s"), ("broadcast_in_dim",), grad=True),
    moves(
        "broadcast_middle",
        lambda x: lax.broadcast_in_dim(x, (3, x.shape[0], 2, x.shape[1]), (1, 3)),
        (Arg("b, s", "bool"),),
        ("broadcast_in_dim",),
    ),
    moves("broadcast_keys", lambda k: jnp.broadcast_to(k, (2, *k.shape)), (KEYS,)),
    moves("expand_dims", lambda x: x[:, None, :, None], ("b, s",), ("broadcast_in_dim",)),
    moves("squeeze", lambda x: jnp.squeeze(x, (0, 2)), ("1, s, 1",), ("squeeze",), grad=True),
    moves("transpose", lambda x: x.transpose(2, 0, 1), ("b, 3, s",), ("transpose",), grad=True),
    moves("transpose_keys", lambda k: k.T, (Arg("b, s", "key"),), ("transpose",)),
    moves("swap_axes", lambda x: jnp.moveaxis(x, 0, -1), (Arg("b, s, 2", "complex64"),)),
    moves("full", lambda x: jnp.full(x.shape[::-1], 3, jnp.uint8), ("b, s",)),
    moves("empty", lambda x: 0 * lax.empty(x.shape, jnp.int32), ("b, s",), ("empty",)),
    moves("outer", jnp.outer, ("b", "s"), grad=True),
    moves("causal_mask", lambda x: jnp.where(jnp.tri(x.shape[0], dtype=bool), x, -1.0), ("s, s",)),
    moves("meshgrid", lambda x, y: jnp.meshgrid(x, y, indexing="ij"), ("b", "s")),
    moves("alibi", _alibi, ("b, s",)),
]

IOTAS = [
    moves("arange", lambda x: x + jnp.arange(x.shape[1]), ("b, s",), ("iota",)),
    moves("arange_from", lambda x: jnp.arange(2, x.shape[0] + 2), ("s",), ("iota",)),
    moves("arange_step", lambda x: jnp.arange(0, x.shape[0], 3), ("s",), ("iota",)),
    moves(
        "iota_outer",
        lambda x: x + lax.broadcasted_iota(jnp.int32, x.shape, 0),
        ("b, s",),
        ("iota",),
    ),
    moves(
        "iota_dtypes",
        lambda x: [lax.iota(t, x.shape[0]) for t in (jnp.bfloat16, jnp.uint8, jnp.complex64)],
        ("s",),
        ("iota",),
    ),
    moves("eye", lambda x: x @ jnp.eye(x.shape[1]), ("b, s",), ("iota",)),
    moves("eye_offset", lambda x: jnp.eye(*x.shape, k=1), ("b, s",)),
    moves("tril", lambda x: jnp.tril(x, -1), ("b, s",), grad=True),
    moves("triu", lambda x: jnp.triu(x, 1), (Arg("2, s, s", "int32"),)),
    moves("linspace", lambda x: jnp.linspace(0, 1, x.shape[0]), ("s",)),
    moves("vander", lambda x: jnp.vander(x, 3), ("s",)),
    moves(
        "toeplitz", lambda x: x[jnp.abs(jnp.arange(x.size)[:, None] - jnp.arange(x.size))], ("s",)
    ),
    moves("diag_of_vector", jnp.diag, ("s",)),
    moves("diagonal", jnp.diagonal, ("s, s",), grad=True),
]

JOINS = [
    moves(
        "concat_two",
        lambda x, y: jnp.concatenate([x, y], 1),
        ("b, s", "b, t"),
        ("concatenate",),
        grad=True,
    ),
    moves(
        "concat_mixed",
        lambda x, y: jnp.concatenate([y[:2], x, y, x, y[:1]], 0),
        (Arg("s, 2", "int32"), Arg("3, 2", "int32")),
        ("concatenate",),
    ),
    moves("concat_three", lambda x, y: jnp.concatenate([x, y, x]), ("b, 2", "t, 2"), grad=True),
    moves("concat_self", lambda x: jnp.concatenate([x, -x], -1), ("b, s",), grad=True),
    moves("concat_class_token", lambda c, x: jnp.concatenate([c, x], 1), ("b, 1, 2", "b, s, 2")),
    moves("concat_append", lambda x, y: jnp.append(x, y), (Arg("s", "bool"), Arg("t", "bool"))),
    moves("concat_shift_right", _shift_right, (Arg("b, s", "int32"),), sizes=EVEN),
    moves("concat_keys", lambda k, j: jnp.concatenate([k, j]), (KEYS, Arg("t", "key"))),
    moves("concat_to_static", _pad_to_static, ("s",), constraints=("s <= 11",)),
    moves("stack", lambda x, y: jnp.stack([x, y], 1), ("b, s", "b, s"), grad=True),
    moves("lax_stack", lambda x, y: jnp.stack([x, y, x], -1), (Arg("b", "bfloat16"),) * 2),
    moves("hstack", lambda x, y: jnp.hstack([x, y]), ("b, s", "b, t")),
    moves("vstack", lambda x, y: jnp.vstack([x, y, x]), ("b, 2", "t, 2")),
    moves("column_stack", lambda x: jnp.column_stack([x, x]), ("s",)),
    moves("block", lambda x: jnp.block([[x, x], [x, x]]), ("b, s",)),
]

SPLITS = [
    moves("split_three", _split_three, ("b, s",), ("split",), grad=True, sizes=EVEN),
    moves("split_symbolic", _lax_split, ("b, s",), ("split",), grad=True, sizes=EVEN),
    moves(
        "split_half",
        lambda x: jnp.split(x, 2),
        ("s",),
        ("split",),
        sizes=EVEN,
        constraints=("mod(s, 2) == 0",),
    ),
    moves("split_static", lambda x: jnp.split(x, 3, axis=1), ("b, 6, s",), ("split",)),
    moves("unstack", lambda x: jnp.unstack(x, axis=1), ("b, 3, s",), grad=True),
    moves("unstack_leading", lambda x: tuple(x), ("3, s",)),
]

TILES = [
    moves("tile", lambda x: jnp.tile(x, (2, 3)), ("b, s",), ("tile",), grad=True),
    moves("tile_static_axis", lambda x: jnp.tile(x, (1, 2)), ("s, 3",), ("tile",)),
    moves("tile_by_size", lambda x, y: jnp.tile(x, (y.shape[0], 2)), ("3, s", "b"), ("tile",)),
    moves("tile_new_axis", lambda x: jnp.tile(x, (2, 1, 1)), (Arg("b, s", "uint8"),)),
    moves("repeat", lambda x: jnp.repeat(x, 2, axis=1), ("b, s",), grad=True),
    moves("repeat_outer", lambda x: jnp.repeat(x, 3, axis=0), (Arg("b, s", "bfloat16"),)),
    moves("repeat_heads", lambda x: jnp.repeat(x, 2, axis=2), ("b, s, 2, 3",), grad=True),
    moves("repeat_by_size", lambda x: jnp.repeat(x, x.shape[1], axis=0), ("b, s",)),
    moves(
        "repeat_each",
        lambda x, n: jnp.repeat(x, n, axis=0, total_repeat_length=9),
        ("b, s", Arg("b", "int32", 0, 4)),
        grad=True,
    ),
    moves("kron", jnp.kron, ("b, s", "2, 2")),
]

CASES = [*BROADCASTS, *IOTAS, *JOINS, *SPLITS, *TILES]
