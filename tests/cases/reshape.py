"""Reshapes that carry, merge and split symbolic axes."""

import jax.numpy as jnp
from jax import lax

from tests.harness import family

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
EVEN = ({"b": 1, "s": 8}, {"b": 4, "s": 2}, {"b": 3, "s": 6})

case, smooth = (family("reshape", sizes=SIZES, domains=("mixed",), grad=g) for g in (False, True))
other = family(sizes=SIZES, domains=("mixed",))


def _heads(x):
    b, s, _ = x.shape
    return x.reshape(b, s, 2, 3).transpose(0, 2, 1, 3).reshape(b * 2, s, 3)


def _patches(x):
    b, h, w, c = x.shape
    x = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, -1, 4 * c)


def _through_rows(x, w):
    return jnp.tanh(x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[1])


PLAIN = [
    smooth("reshape_static_tail", lambda x: x.reshape(x.shape[0], 6), "b, 2, 3"),
    case("reshape_split_tail", lambda x: x.reshape(*x.shape[:2], 2, 3), "b, s, 6"),
    case("reshape_ones", lambda x: x.reshape(x.shape[0], x.shape[2]), "b, 1, s, 1"),
    case("reshape_add_ones", lambda x: x.reshape(1, x.shape[0], 1, -1)),
    case("reshape_into_leading", lambda x: x.reshape(-1), "int32[b, 3]"),
    case("reshape_from_leading", lambda x: x.reshape(-1, 3), "bool[3*b]"),
    smooth("reshape_leading_swap", lambda x: x.reshape(-1, 6), "2*s, 3"),
    smooth("reshape_floordiv", lambda x: x.reshape(-1, 2), "s", sizes=EVEN),
    case(
        "reshape_floordiv_spelled", lambda x: x.reshape(x.shape[0] // 2, 2, 3), "s, 3", sizes=EVEN
    ),
    other("reshape_two_groups", lambda x: x.reshape(x.shape[0] * 2, -1, 4), "b, 2, s, 2, 2"),
]

MERGES = [
    smooth("merge", lambda x: x.reshape(-1, 3), "b, s, 3"),
    case("merge_all", jnp.ravel, "bfloat16[b, s, 2]", rtol=1e-2),
    case("merge_three", lambda x: x.reshape(-1), "uint8[b, t, s]"),
    other("merge_nothing", lambda x: x[: x.shape[0] % 2].reshape(-1), sizes=EVEN[1:2]),
    case("merge_static_outer", lambda x: x.reshape(-1), "complex64[4, b]"),
    smooth("merge_inner", lambda x: x.reshape(x.shape[0], -1), "b, 3, s"),
    case("merge_keys", lambda k: k.reshape(-1), "key[b, s]"),
    case("merge_empty", lambda x: x[:, 1:].reshape(-1)),
    case("merge_doubled", lambda x: x.reshape(-1), "2*b, s + 1"),
]

SPLITS = [
    smooth("split_merged", lambda x, y: x.reshape(*y.shape, 2), "b*s, 2; b, s"),
    smooth("split_static_outer", lambda x: x.reshape(4, -1), "4*b"),
    smooth("swap_sizes", lambda x: x.reshape(x.shape[::-1])),
    case("swap_sizes_static", lambda x: x.reshape(x.shape[::-1]), "3, s"),
    case("reshape_middle", lambda x: x.reshape(x.shape[0], 2, -1, 3), "b, s, 6"),
    case("reshape_permuted", lambda x: lax.reshape(x, (x.size,), (1, 0))),
    case("reshape_halves", lambda x: x.reshape(2, -1), "int32[s]", sizes=EVEN),
]

WHOLE = [
    smooth("heads", _heads, "b, s, 6"),
    smooth(
        "patches",
        _patches,
        "b, h, w, 3",
        buckets={"h": 4, "w": 6},
        sizes=({"b": 1, "h": 2, "w": 2}, {"b": 4, "h": 4, "w": 6}, {"b": 3, "h": 2, "w": 4}),
    ),
    smooth("through_rows", _through_rows, "b, s, 3; 3, 2"),
    other("pixel_shuffle", lambda x: lax.reshape(x, (x.shape[0], 2, 2, x.shape[1])), "b, s, 4"),
]

CASES = [*PLAIN, *MERGES, *SPLITS, *WHOLE]
