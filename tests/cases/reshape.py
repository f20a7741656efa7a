"""Reshapes that carry, merge and split symbolic axes."""

import functools

import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
EVEN = ({"b": 1, "s": 8}, {"b": 4, "s": 2}, {"b": 3, "s": 6})
moves = functools.partial(Case, sizes=SIZES, domains=("mixed",))

RESHAPE = ("reshape",)


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
    moves(
        "reshape_static_tail", lambda x: x.reshape(x.shape[0], 6), ("b, 2, 3",), RESHAPE, grad=True
    ),
    moves("reshape_split_tail", lambda x: x.reshape(*x.shape[:2], 2, 3), ("b, s, 6",), RESHAPE),
    moves("reshape_ones", lambda x: x.reshape(x.shape[0], x.shape[2]), ("b, 1, s, 1",), RESHAPE),
    moves("reshape_add_ones", lambda x: x.reshape(1, x.shape[0], 1, -1), ("b, s",), RESHAPE),
    moves("reshape_into_leading", lambda x: x.reshape(-1), (Arg("b, 3", "int32"),), RESHAPE),
    moves("reshape_from_leading", lambda x: x.reshape(-1, 3), (Arg("3*b", "bool"),), RESHAPE),
    moves("reshape_leading_swap", lambda x: x.reshape(-1, 6), ("2*s, 3",), RESHAPE, grad=True),
    moves("reshape_floordiv", lambda x: x.reshape(-1, 2), ("s",), RESHAPE, sizes=EVEN, grad=True),
    moves(
        "reshape_floordiv_spelled",
        lambda x: x.reshape(x.shape[0] // 2, 2, 3),
        ("s, 3",),
        RESHAPE,
        sizes=EVEN,
    ),
    moves("reshape_two_groups", lambda x: x.reshape(x.shape[0] * 2, -1, 4), ("b, 2, s, 2, 2",)),
]

MERGES = [
    moves("merge", lambda x: x.reshape(-1, 3), ("b, s, 3",), RESHAPE, grad=True),
    moves("merge_all", jnp.ravel, (Arg("b, s, 2", "bfloat16"),), RESHAPE, rtol=1e-2),
    moves("merge_three", lambda x: x.reshape(-1), (Arg("b, t, s", "uint8"),), RESHAPE),
    moves("merge_nothing", lambda x: x[: x.shape[0] % 2].reshape(-1), ("b, s",), sizes=EVEN[1:2]),
    moves("merge_static_outer", lambda x: x.reshape(-1), (Arg("4, b", "complex64"),), RESHAPE),
    moves("merge_inner", lambda x: x.reshape(x.shape[0], -1), ("b, 3, s",), RESHAPE, grad=True),
    moves("merge_keys", lambda k: k.reshape(-1), (Arg("b, s", "key"),), RESHAPE),
    moves("merge_empty", lambda x: x[:, 1:].reshape(-1), ("b, s",), RESHAPE),
    moves("merge_doubled", lambda x: x.reshape(-1), ("2*b, s + 1",), RESHAPE),
]

SPLITS = [
    moves(
        "split_merged", lambda x, y: x.reshape(*y.shape, 2), ("b*s, 2", "b, s"), RESHAPE, grad=True
    ),
    moves("split_static_outer", lambda x: x.reshape(4, -1), ("4*b",), RESHAPE, grad=True),
    moves("swap_sizes", lambda x: x.reshape(x.shape[::-1]), ("b, s",), RESHAPE, grad=True),
    moves("swap_sizes_static", lambda x: x.reshape(x.shape[::-1]), ("3, s",), RESHAPE),
    moves("reshape_middle", lambda x: x.reshape(x.shape[0], 2, -1, 3), ("b, s, 6",), RESHAPE),
    moves("reshape_permuted", lambda x: lax.reshape(x, (x.size,), (1, 0)), ("b, s",), RESHAPE),
    moves("reshape_halves", lambda x: x.reshape(2, -1), (Arg("s", "int32"),), RESHAPE, sizes=EVEN),
]

WHOLE = [
    moves("heads", _heads, ("b, s, 6",), RESHAPE, grad=True),
    moves(
        "patches",
        _patches,
        ("b, h, w, 3",),
        RESHAPE,
        buckets={"h": 4, "w": 6},
        sizes=({"b": 1, "h": 2, "w": 2}, {"b": 4, "h": 4, "w": 6}, {"b": 3, "h": 2, "w": 4}),
        grad=True,
    ),
    moves("through_rows", _through_rows, ("b, s, 3", "3, 2"), RESHAPE, grad=True),
    moves("pixel_shuffle", lambda x: lax.reshape(x, (x.shape[0], 2, 2, x.shape[1])), ("b, s, 4",)),
]

CASES = [*PLAIN, *MERGES, *SPLITS, *WHOLE]
