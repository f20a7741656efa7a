"""Reshapes that carry, merge and split symbolic axes."""

import jax.numpy as jnp
from jax import lax

from tests.harness import cases, family

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


PLAIN = {
    "reshape_static_tail": smooth(lambda x: x.reshape(x.shape[0], 6), "b, 2, 3"),
    "reshape_split_tail": case(lambda x: x.reshape(*x.shape[:2], 2, 3), "b, s, 6"),
    "reshape_ones": case(lambda x: x.reshape(x.shape[0], x.shape[2]), "b, 1, s, 1"),
    "reshape_add_ones": case(lambda x: x.reshape(1, x.shape[0], 1, -1)),
    "reshape_into_leading": case(lambda x: x.reshape(-1), "int32[b, 3]"),
    "reshape_from_leading": case(lambda x: x.reshape(-1, 3), "bool[3*b]"),
    "reshape_leading_swap": smooth(lambda x: x.reshape(-1, 6), "2*s, 3"),
    "reshape_floordiv": smooth(lambda x: x.reshape(-1, 2), "s", sizes=EVEN),
    "reshape_by_floordiv": case(lambda x: x.reshape(x.shape[0] // 2, 2, 3), "s, 3", sizes=EVEN),
    "reshape_two_groups": other(lambda x: x.reshape(x.shape[0] * 2, -1, 4), "b, 2, s, 2, 2"),
}

MERGES = {
    "merge": smooth(lambda x: x.reshape(-1, 3), "b, s, 3"),
    "merge_all": case(jnp.ravel, "bfloat16[b, s, 2]", rtol=1e-2),
    "merge_three": case(lambda x: x.reshape(-1), "uint8[b, t, s]"),
    "merge_nothing": other(lambda x: x[: x.shape[0] % 2].reshape(-1), sizes=EVEN[1:2]),
    "merge_static_outer": case(lambda x: x.reshape(-1), "complex64[4, b]"),
    "merge_inner": smooth(lambda x: x.reshape(x.shape[0], -1), "b, 3, s"),
    "merge_keys": case(lambda k: k.reshape(-1), "key[b, s]"),
    "merge_empty": case(lambda x: x[:, 1:].reshape(-1)),
    "merge_doubled": case(lambda x: x.reshape(-1), "2*b, s + 1"),
}

SPLITS = {
    "split_merged": smooth(lambda x, y: x.reshape(*y.shape, 2), "b*s, 2; b, s"),
    "split_static_outer": smooth(lambda x: x.reshape(4, -1), "4*b"),
    "swap_sizes": smooth(lambda x: x.reshape(x.shape[::-1])),
    "swap_sizes_static": case(lambda x: x.reshape(x.shape[::-1]), "3, s"),
    "reshape_middle": case(lambda x: x.reshape(x.shape[0], 2, -1, 3), "b, s, 6"),
    "reshape_permuted": case(lambda x: lax.reshape(x, (x.size,), (1, 0))),
    "reshape_halves": case(lambda x: x.reshape(2, -1), "int32[s]", sizes=EVEN),
}

WHOLE = {
    "heads": smooth(_heads, "b, s, 6"),
    "patches": smooth(
        _patches,
        "b, h, w, 3",
        buckets={"h": 4, "w": 6},
        sizes=({"b": 1, "h": 2, "w": 2}, {"b": 4, "h": 4, "w": 6}, {"b": 3, "h": 2, "w": 4}),
    ),
    "through_rows": smooth(_through_rows, "b, s, 3; 3, 2"),
    "pixel_shuffle": other(lambda x: lax.reshape(x, (x.shape[0], 2, 2, x.shape[1])), "b, s, 4"),
}

CASES = cases(PLAIN | MERGES | SPLITS | WHOLE)
