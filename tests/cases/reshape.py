"""Reshapes that carry, merge and split symbolic axes."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from tests.harness import Arg, Case

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
EVEN = ({"b": 1, "s": 8}, {"b": 4, "s": 2}, {"b": 3, "s": 6})
moves = functools.partial(Case, sizes=SIZES, domains=("mixed",))

RESHAPE = ("reshape",)


PLAIN = [
    moves("reshape_into_leading", lambda x: x.reshape(-1), (Arg("b, 3", "int32"),), RESHAPE),
    moves("reshape_from_leading", lambda x: x.reshape(-1, 3), (Arg("3*b", "bool"),), RESHAPE),
]

MERGES = [
    moves("merge_all", jnp.ravel, (Arg("b, s, 2", "bfloat16"),), RESHAPE, rtol=1e-2),
    moves("merge_three", lambda x: x.reshape(-1), (Arg("b, t, s", "uint8"),), RESHAPE),
    moves("merge_static_outer", lambda x: x.reshape(-1), (Arg("4, b", "complex64"),), RESHAPE),
    moves("merge_keys", lambda k: k.reshape(-1), (Arg("b, s", "key"),), RESHAPE),
]

SPLITS = [
    moves("reshape_halves", lambda x: x.reshape(2, -1), (Arg("s", "int32"),), RESHAPE, sizes=EVEN),
]


CASES = [*PLAIN, *MERGES, *SPLITS]
