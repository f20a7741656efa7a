"""Broadcasts, transposes, joins, splits, and what jax.numpy builds from them."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, family

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
EVEN = ({"b": 1, "s": 8}, {"b": 4, "s": 2}, {"b": 3, "s": 6})

MOVED: dict[str, Any] = {"sizes": SIZES, "domains": ("mixed",)}
case, smooth = family(**MOVED), family(**MOVED, grad=True)
broadcast = family("broadcast_in_dim", **MOVED)
iota, split, tile = (family(name, **MOVED) for name in ("iota", "split", "tile"))


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
    broadcast("broadcast_ones", lambda x: x * jnp.ones(x.shape)),
    broadcast("broadcast_row", lambda x, y: x + y, "b, s; s", grad=True),
    broadcast(
        "broadcast_middle",
        lambda x: lax.broadcast_in_dim(x, (3, x.shape[0], 2, x.shape[1]), (1, 3)),
        "bool[b, s]",
    ),
    case("broadcast_keys", lambda k: jnp.broadcast_to(k, (2, *k.shape)), "key[b]"),
    broadcast("expand_dims", lambda x: x[:, None, :, None]),
    smooth("squeeze", lambda x: jnp.squeeze(x, (0, 2)), "1, s, 1", covers="squeeze"),
    smooth("transpose", lambda x: x.transpose(2, 0, 1), "b, 3, s", covers="transpose"),
    case("transpose_keys", lambda k: k.T, "key[b, s]", covers="transpose"),
    case("swap_axes", lambda x: jnp.moveaxis(x, 0, -1), "complex64[b, s, 2]"),
    case("full", lambda x: jnp.full(x.shape[::-1], 3, jnp.uint8)),
    case("empty", lambda x: 0 * lax.empty(x.shape, jnp.int32), covers="empty"),
    smooth("outer", jnp.outer, "b; s"),
    case("causal_mask", lambda x: jnp.where(jnp.tri(x.shape[0], dtype=bool), x, -1.0), "s, s"),
    case("meshgrid", lambda x, y: jnp.meshgrid(x, y, indexing="ij"), "b; s"),
    case("alibi", _alibi),
]

IOTAS = [
    iota("arange", lambda x: x + jnp.arange(x.shape[1])),
    iota("arange_from", lambda x: jnp.arange(2, x.shape[0] + 2), "s"),
    iota("arange_step", lambda x: jnp.arange(0, x.shape[0], 3), "s"),
    iota("iota_outer", lambda x: x + lax.broadcasted_iota(jnp.int32, x.shape, 0)),
    iota(
        "iota_dtypes",
        lambda x: [lax.iota(t, x.shape[0]) for t in (jnp.bfloat16, jnp.uint8, jnp.complex64)],
        "s",
    ),
    iota("eye", lambda x: x @ jnp.eye(x.shape[1])),
    case("eye_offset", lambda x: jnp.eye(*x.shape, k=1)),
    smooth("tril", lambda x: jnp.tril(x, -1)),
    case("triu", lambda x: jnp.triu(x, 1), "int32[2, s, s]"),
    case("linspace", lambda x: jnp.linspace(0, 1, x.shape[0]), "s"),
    case("vander", lambda x: jnp.vander(x, 3), "s"),
    case("toeplitz", lambda x: x[jnp.abs(jnp.arange(x.size)[:, None] - jnp.arange(x.size))], "s"),
    case("diag_of_vector", jnp.diag, "s"),
    smooth("diagonal", jnp.diagonal, "s, s"),
]

JOINS = [
    smooth(
        "concat_two", lambda x, y: jnp.concatenate([x, y], 1), "b, s; b, t", covers="concatenate"
    ),
    case(
        "concat_mixed",
        lambda x, y: jnp.concatenate([y[:2], x, y, x, y[:1]], 0),
        "int32[s, 2]; int32[3, 2]",
        covers="concatenate",
    ),
    smooth("concat_three", lambda x, y: jnp.concatenate([x, y, x]), "b, 2; t, 2"),
    smooth("concat_self", lambda x: jnp.concatenate([x, -x], -1)),
    case("concat_class_token", lambda c, x: jnp.concatenate([c, x], 1), "b, 1, 2; b, s, 2"),
    case("concat_append", lambda x, y: jnp.append(x, y), "bool[s]; bool[t]"),
    case("concat_shift_right", _shift_right, "int32[b, s]", sizes=EVEN),
    case("concat_keys", lambda k, j: jnp.concatenate([k, j]), "key[b]; key[t]"),
    case("concat_to_static", _pad_to_static, "s", constraints=("s <= 11",)),
    smooth("stack", lambda x, y: jnp.stack([x, y], 1), "b, s; b, s"),
    case("lax_stack", lambda x, y: jnp.stack([x, y, x], -1), *((Arg("b", "bfloat16"),) * 2)),
    case("hstack", lambda x, y: jnp.hstack([x, y]), "b, s; b, t"),
    case("vstack", lambda x, y: jnp.vstack([x, y, x]), "b, 2; t, 2"),
    case("column_stack", lambda x: jnp.column_stack([x, x]), "s"),
    case("block", lambda x: jnp.block([[x, x], [x, x]])),
]

SPLITS = [
    split("split_three", _split_three, grad=True, sizes=EVEN),
    split("split_symbolic", _lax_split, grad=True, sizes=EVEN),
    split(
        "split_half", lambda x: jnp.split(x, 2), "s", sizes=EVEN, constraints=("mod(s, 2) == 0",)
    ),
    split("split_static", lambda x: jnp.split(x, 3, axis=1), "b, 6, s"),
    smooth("unstack", lambda x: jnp.unstack(x, axis=1), "b, 3, s"),
    case("unstack_leading", lambda x: tuple(x), "3, s"),
]

TILES = [
    tile("tile", lambda x: jnp.tile(x, (2, 3)), grad=True),
    tile("tile_static_axis", lambda x: jnp.tile(x, (1, 2)), "s, 3"),
    tile("tile_by_size", lambda x, y: jnp.tile(x, (y.shape[0], 2)), "3, s; b"),
    case("tile_new_axis", lambda x: jnp.tile(x, (2, 1, 1)), "uint8[b, s]"),
    smooth("repeat", lambda x: jnp.repeat(x, 2, axis=1)),
    case("repeat_outer", lambda x: jnp.repeat(x, 3, axis=0), "bfloat16[b, s]"),
    smooth("repeat_heads", lambda x: jnp.repeat(x, 2, axis=2), "b, s, 2, 3"),
    case("repeat_by_size", lambda x: jnp.repeat(x, x.shape[1], axis=0)),
    smooth(
        "repeat_each",
        lambda x, n: jnp.repeat(x, n, axis=0, total_repeat_length=9),
        "b, s; int32[b] 0:4",
    ),
    case("kron", jnp.kron, "b, s; 2, 2"),
]

CASES = [*BROADCASTS, *IOTAS, *JOINS, *SPLITS, *TILES]
