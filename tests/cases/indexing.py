"""Gathers and what jax.numpy reads by index."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
ATLEAST2 = ({"b": 1, "s": 8, "t": 4}, {"b": 4, "s": 2, "t": 1}, {"b": 3, "s": 7, "t": 3})
moves = functools.partial(Case, sizes=SIZES, domains=("mixed",))

AT = Arg("t", "int32", "-b", "b")  # valid, negative ones too
WILD = Arg("t", "int32", "-2*b - 2", "2*b + 2")  # any, in bounds or not
WILD_ONE = Arg("", "int32", "-2*b - 2", "2*b + 2")


def _get(mode, fill_value=None):
    return lambda x, i: x.at[i].get(mode=mode, fill_value=fill_value)


def _gather(mode, slice_sizes):
    """A window of this size at every index along the second axis."""
    numbers = lax.GatherDimensionNumbers((1, 2), (), (1,))

    def fn(x, i):
        sizes = slice_sizes(*x.shape)
        return lax.gather(x, i[:, None], numbers, sizes, mode=mode, fill_value=9)

    return fn


def _batched(mode):
    """Row ``b`` is indexed by the indices of row ``b``."""
    numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))

    def fn(x, i):
        return lax.gather(x, i[..., None], numbers, (1, 1), mode=mode)

    return fn


def _one_window(mode):
    numbers = lax.GatherDimensionNumbers((0,), (0,), (0, 1))
    return lambda x, i: lax.gather(x, i, numbers, (1, x.shape[1] - 1), mode=mode, fill_value=3)


def _grouped(x, i):
    return jnp.take_along_axis(x, i, axis=1), jnp.take_along_axis(x, i[:, :1], 1, mode="clip")


READS = [
    moves("take_keys", lambda k, i: k[i], (Arg("b", "key"), AT), ("gather",)),
    moves(
        "position_embedding",
        lambda w, x: x + w[: x.shape[1]],
        ("9, 3", "b, s, 3"),
        grad=True,
        constraints=("s <= 9",),
    ),
]

MODES = [
    moves(f"get_{mode}", _get(mode), ("b, s", WILD), ("gather",), grad=mode != "promise_in_bounds")
    for mode in ("fill", "clip", "promise_in_bounds")
]
MODES += [
    moves("get_fill_uint", _get("fill"), (Arg("b", "uint8"), WILD), ("gather",)),
    moves("get_fill_bool", _get("fill", True), (Arg("b", "bool"), WILD), ("gather",)),
    moves("get_fill_complex", _get("fill"), (Arg("b", "complex64"), WILD), ("gather",)),
    moves("take_part_outside", lambda x, i: x[::-1, None, i, 1:], ("b, b, s", WILD_ONE), grad=True),
]

WINDOWS = [
    moves(
        f"windows_{mode}_{name}",
        _gather(mode, sizes),
        ("b, s", Arg("t", "int32", -3, 12)),
        ("gather",),
        grad=mode != "promise_in_bounds",
        sizes=(
            {"b": 1, "s": 2, "t": 4},
            {"b": 3, "s": 7, "t": 1},
            {"b": 4, "s": 8, "t": 3},
            {"b": 2, "s": 4, "t": 2},
        ),
    )
    for mode in ("fill", "clip", "promise_in_bounds")
    for name, sizes in {
        "static": lambda b, s: (b, 2),
        "symbolic": lambda b, s: (b - 1, s // 2),
        "whole": lambda b, s: (b, s),
    }.items()
]
WINDOWS += [
    moves(f"one_window_{mode}", _one_window(mode), ("b, s", Arg("2", "int32", -2, 5)), ("gather",))
    for mode in ("fill", "clip", "promise_in_bounds")
]
WINDOWS += [
    moves(
        "windows_of_static",
        jax.vmap(lambda x, y, i: lax.dynamic_slice_in_dim(y, i, x.shape[0]), (None, None, 0)),
        ("s", "12", Arg("t", "int32", -5, 20)),
        ("gather",),
        grad=True,
        constraints=("s <= 12",),
    ),
]

BATCHED = [
    moves(
        f"batched_{mode}",
        _batched(mode),
        ("b, s", Arg("b, 3", "int32", -9, 10)),
        ("gather",),
        grad=mode != "promise_in_bounds",
    )
    for mode in ("fill", "clip", "promise_in_bounds")
]
BATCHED += [
    moves(
        "cross_entropy",
        lambda x, y: -jnp.take_along_axis(jax.nn.log_softmax(x), y[..., None], -1)[..., 0],
        ("b, s, 5", Arg("b, s", "int32", 0, 5)),
        grad=True,
    ),
]

OTHERS = [
    moves(
        "select", lambda x: jnp.select([x > 1, x > 0], [x * 2, x * 3], -1.0), ("b, s",), grad=True
    ),
    moves("nonzero", lambda x: jnp.nonzero(x > 0, size=5, fill_value=-1), ("b, s",)),
    moves("triangle", lambda x: x[jnp.triu_indices(x.shape[0])], ("b, b",)),
    moves(
        "unravel", lambda i, x: jnp.unravel_index(i, x.shape), (Arg("t", "int32", 0, "b*s"), "b, s")
    ),
    moves(
        "take_filled_with_a_size",
        lambda x, i: [
            jnp.take(x, i, axis=1, fill_value=x.shape[1]),
            x.at[0].get(mode="fill", fill_value=2 * x.shape[1] + 1),
            x.at[9].get(mode="fill", fill_value=x.shape[1]),
        ],
        ("b, s", Arg("3", "int32", -20, 20)),
    ),
    moves(
        "intersection_with_indices",
        lambda x, y: jnp.intersect1d(x, y, size=3, return_indices=True),
        (Arg("s", "int32", 0, 9), Arg("b", "int32", 0, 9)),
    ),
]

CASES = [*READS, *MODES, *WINDOWS, *BATCHED, *OTHERS]
