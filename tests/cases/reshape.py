"""Reshapes that carry, merge and split symbolic axes."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

EVEN = ({"s": 2}, {"s": 8}, {"s": 4}, {"s": 6})
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
    Case("reshape_static_tail", lambda x: x.reshape(x.shape[0], 6), ("b, 2, 3",), RESHAPE, grad=True),
    Case("reshape_split_tail", lambda x: x.reshape(*x.shape[:2], 2, 3), ("b, s, 6",), RESHAPE),
    Case("reshape_ones", lambda x: x.reshape(x.shape[0], x.shape[2]), ("b, 1, s, 1",), RESHAPE),
    Case("reshape_add_ones", lambda x: x.reshape(1, x.shape[0], 1, -1), ("b, s",), RESHAPE),
    Case("reshape_into_leading", lambda x: x.reshape(-1), (Arg("b, 3", "int32"),), RESHAPE),
    Case("reshape_from_leading", lambda x: x.reshape(-1, 3), (Arg("3*b", "bool"),), RESHAPE),
    Case("reshape_leading_swap", lambda x: x.reshape(-1, 6), ("2*s, 3",), RESHAPE, grad=True),
    Case("reshape_floordiv", lambda x: x.reshape(-1, 2), ("s",), RESHAPE, sizes=EVEN, grad=True),
    Case(
        "reshape_floordiv_spelled",
        lambda x: x.reshape(x.shape[0] // 2, 2, 3),
        ("s, 3",),
        RESHAPE,
        sizes=EVEN,
    ),
    Case("reshape_two_groups", lambda x: x.reshape(x.shape[0] * 2, -1, 4), ("b, 2, s, 2, 2",)),
]

MERGES = [
    Case("merge", lambda x: x.reshape(-1, 3), ("b, s, 3",), RESHAPE, grad=True),
    Case("merge_all", jnp.ravel, (Arg("b, s, 2", "bfloat16"),), RESHAPE, rtol=1e-2),
    Case("merge_three", lambda x: x.reshape(-1), (Arg("b, t, s", "uint8"),), RESHAPE),
    Case("merge_static_outer", lambda x: x.reshape(-1), (Arg("4, b", "complex64"),), RESHAPE),
    Case("merge_inner", lambda x: x.reshape(x.shape[0], -1), ("b, 3, s",), RESHAPE, grad=True),
    Case("merge_keys", lambda k: k.reshape(-1), (Arg("b, s", "key"),), RESHAPE),
    Case("merge_empty", lambda x: x[:, 1:].reshape(-1), ("b, s",), RESHAPE),
    Case("merge_doubled", lambda x: x.reshape(-1), ("2*b, s + 1",), RESHAPE),
]

SPLITS = [
    Case("split_merged", lambda x, y: x.reshape(*y.shape, 2), ("b*s, 2", "b, s"), RESHAPE, grad=True),
    Case("split_static_outer", lambda x: x.reshape(4, -1), ("4*b",), RESHAPE, grad=True),
    Case("swap_sizes", lambda x: x.reshape(x.shape[::-1]), ("b, s",), RESHAPE, grad=True),
    Case("swap_sizes_static", lambda x: x.reshape(x.shape[::-1]), ("3, s",), RESHAPE),
    Case("reshape_middle", lambda x: x.reshape(x.shape[0], 2, -1, 3), ("b, s, 6",), RESHAPE),
    Case("reshape_permuted", lambda x: lax.reshape(x, (x.size,), (1, 0)), ("b, s",), RESHAPE),
    Case("reshape_halves", lambda x: x.reshape(2, -1), (Arg("s", "int32"),), RESHAPE, sizes=EVEN),
]

WHOLE = [
    Case("heads", _heads, ("b, s, 6",), RESHAPE, grad=True),
    Case(
        "patches",
        _patches,
        ("b, h, w, 3",),
        RESHAPE,
        buckets={"h": 4, "w": 6},
        sizes=({"b": 1, "h": 2, "w": 2}, {"b": 4, "h": 4, "w": 6}, {"b": 3, "h": 2, "w": 4}),
        grad=True,
    ),
    Case("through_rows", _through_rows, ("b, s, 3", "3, 2"), RESHAPE, grad=True),
    Case("pixel_shuffle", lambda x: lax.reshape(x, (x.shape[0], 2, 2, x.shape[1])), ("b, s, 4",)),
]

CASES = [*PLAIN, *MERGES, *SPLITS, *WHOLE]
