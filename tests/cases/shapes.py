"""Broadcasts, transposes, joins, splits, and what jax.numpy builds from them."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, cases, family

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


BROADCASTS = {
    "broadcast_ones": broadcast(lambda x: x * jnp.ones(x.shape)),
    "broadcast_row": broadcast(lambda x, y: x + y, "b, s; s", grad=True),
    "broadcast_middle": broadcast(
        lambda x: lax.broadcast_in_dim(x, (3, x.shape[0], 2, x.shape[1]), (1, 3)), "bool[b, s]"
    ),
    "broadcast_keys": case(lambda k: jnp.broadcast_to(k, (2, *k.shape)), "key[b]"),
    "expand_dims": broadcast(lambda x: x[:, None, :, None]),
    "squeeze": smooth(lambda x: jnp.squeeze(x, (0, 2)), "1, s, 1", covers="squeeze"),
    "transpose": smooth(lambda x: x.transpose(2, 0, 1), "b, 3, s", covers="transpose"),
    "transpose_keys": case(lambda k: k.T, "key[b, s]", covers="transpose"),
    "swap_axes": case(lambda x: jnp.moveaxis(x, 0, -1), "complex64[b, s, 2]"),
    "full": case(lambda x: jnp.full(x.shape[::-1], 3, jnp.uint8)),
    "empty": case(lambda x: 0 * lax.empty(x.shape, jnp.int32), covers="empty"),
    "outer": smooth(jnp.outer, "b; s"),
    "causal_mask": case(lambda x: jnp.where(jnp.tri(x.shape[0], dtype=bool), x, -1.0), "s, s"),
    "meshgrid": case(lambda x, y: jnp.meshgrid(x, y, indexing="ij"), "b; s"),
    "alibi": case(_alibi),
}

IOTAS = {
    "arange": iota(lambda x: x + jnp.arange(x.shape[1])),
    "arange_from": iota(lambda x: jnp.arange(2, x.shape[0] + 2), "s"),
    "arange_step": iota(lambda x: jnp.arange(0, x.shape[0], 3), "s"),
    "iota_outer": iota(lambda x: x + lax.broadcasted_iota(jnp.int32, x.shape, 0)),
    "iota_dtypes": iota(
        lambda x: [lax.iota(t, x.shape[0]) for t in (jnp.bfloat16, jnp.uint8, jnp.complex64)], "s"
    ),
    "eye": iota(lambda x: x @ jnp.eye(x.shape[1])),
    "eye_offset": case(lambda x: jnp.eye(*x.shape, k=1)),
    "tril": smooth(lambda x: jnp.tril(x, -1)),
    "triu": case(lambda x: jnp.triu(x, 1), "int32[2, s, s]"),
    "linspace": case(lambda x: jnp.linspace(0, 1, x.shape[0]), "s"),
    "vander": case(lambda x: jnp.vander(x, 3), "s"),
    "toeplitz": case(lambda x: x[jnp.abs(jnp.arange(x.size)[:, None] - jnp.arange(x.size))], "s"),
    "diag_of_vector": case(jnp.diag, "s"),
    "diagonal": smooth(jnp.diagonal, "s, s"),
}

JOINS = {
    "concat_two": smooth(
        lambda x, y: jnp.concatenate([x, y], 1), "b, s; b, t", covers="concatenate"
    ),
    "concat_mixed": case(
        lambda x, y: jnp.concatenate([y[:2], x, y, x, y[:1]], 0),
        "int32[s, 2]; int32[3, 2]",
        covers="concatenate",
    ),
    "concat_three": smooth(lambda x, y: jnp.concatenate([x, y, x]), "b, 2; t, 2"),
    "concat_self": smooth(lambda x: jnp.concatenate([x, -x], -1)),
    "concat_class_token": case(lambda c, x: jnp.concatenate([c, x], 1), "b, 1, 2; b, s, 2"),
    "concat_append": case(lambda x, y: jnp.append(x, y), "bool[s]; bool[t]"),
    "concat_shift_right": case(_shift_right, "int32[b, s]", sizes=EVEN),
    "concat_keys": case(lambda k, j: jnp.concatenate([k, j]), "key[b]; key[t]"),
    "concat_to_static": case(_pad_to_static, "s", constraints=("s <= 11",)),
    "stack": smooth(lambda x, y: jnp.stack([x, y], 1), "b, s; b, s"),
    "lax_stack": case(lambda x, y: jnp.stack([x, y, x], -1), *((Arg("b", "bfloat16"),) * 2)),
    "hstack": case(lambda x, y: jnp.hstack([x, y]), "b, s; b, t"),
    "vstack": case(lambda x, y: jnp.vstack([x, y, x]), "b, 2; t, 2"),
    "column_stack": case(lambda x: jnp.column_stack([x, x]), "s"),
    "block": case(lambda x: jnp.block([[x, x], [x, x]])),
}

SPLITS = {
    "split_three": split(_split_three, grad=True, sizes=EVEN),
    "split_symbolic": split(_lax_split, grad=True, sizes=EVEN),
    "split_half": split(
        lambda x: jnp.split(x, 2), "s", sizes=EVEN, constraints=("mod(s, 2) == 0",)
    ),
    "split_static": split(lambda x: jnp.split(x, 3, axis=1), "b, 6, s"),
    "unstack": smooth(lambda x: jnp.unstack(x, axis=1), "b, 3, s"),
    "unstack_leading": case(lambda x: tuple(x), "3, s"),
}

TILES = {
    "tile": tile(lambda x: jnp.tile(x, (2, 3)), grad=True),
    "tile_static_axis": tile(lambda x: jnp.tile(x, (1, 2)), "s, 3"),
    "tile_by_size": tile(lambda x, y: jnp.tile(x, (y.shape[0], 2)), "3, s; b"),
    "tile_new_axis": case(lambda x: jnp.tile(x, (2, 1, 1)), "uint8[b, s]"),
    "repeat": smooth(lambda x: jnp.repeat(x, 2, axis=1)),
    "repeat_outer": case(lambda x: jnp.repeat(x, 3, axis=0), "bfloat16[b, s]"),
    "repeat_heads": smooth(lambda x: jnp.repeat(x, 2, axis=2), "b, s, 2, 3"),
    "repeat_by_size": case(lambda x: jnp.repeat(x, x.shape[1], axis=0)),
    "repeat_each": smooth(
        lambda x, n: jnp.repeat(x, n, axis=0, total_repeat_length=9), "b, s; int32[b] 0:4"
    ),
    "kron": case(jnp.kron, "b, s; 2, 2"),
}

CASES = cases(BROADCASTS | IOTAS | JOINS | SPLITS | TILES)
