"""Scatters and what jax.numpy writes by index."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
ATLEAST2 = ({"b": 1, "s": 8, "t": 4}, {"b": 4, "s": 2, "t": 1}, {"b": 3, "s": 7, "t": 3})
moves = functools.partial(Case, sizes=SIZES, domains=("mixed",))

WILD = Arg("t", "int32", "-2*b - 2", "2*b + 2")  # any, in bounds or not
VALID = Arg("t", "int32", "-b", "b")
FLOATS = ("add", "mul", "min", "max", "set")


def _at(method, mode=None, value=lambda y: y):
    def fn(x, i, y):
        return getattr(x.at[i], method)(value(y), mode=mode)

    return fn


def _windows(op, mode, halved=False):
    """Add windows ``y`` at these places of the second axis."""
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (1,))

    def fn(x, i, y):
        y = y[:, :, : x.shape[1] // 2] if halved else y
        return op(x, i[:, None], y, numbers, mode=mode)

    return fn


def _batched(op, mode):
    numbers = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
    return lambda x, i, y: op(x, i[..., None], y, numbers, mode=mode)


def _sliced_writes(x, y):
    s = x.shape[1]
    return (
        x.at[:, 1:].set(y[:, :-1]),
        x.at[:, :-1].add(y[:, 1:]),
        x.at[:, s // 2 :].mul(3.0),
        x.at[:, -1].set(0.0),
        x.at[0, 0].max(2.0),
        x.at[:, ::2].min(y[:, ::2]),
        x.at[-1, 1:].divide(2.0),
        x.at[:, ::-1].set(y),
    )


def _segments(reduce, **options):
    return lambda x, i: reduce(x, i, num_segments=3, **options)


ROWS = [
    moves(
        f"{method}_rows_{mode}",
        _at(method, mode),
        ("b, s", WILD, "t, s"),
        ("scatter" if method == "set" else f"scatter-{method}",),
        grad=method != "mul" and mode != "promise_in_bounds",
    )
    for method in FLOATS
    for mode in ("drop", "clip", "promise_in_bounds")
    if method != "set" or mode == "drop"
]
ROWS += [
    moves("subtract_rows", _at("subtract"), ("b, s", WILD, "t, s"), grad=True),
    moves(
        "scatter_sub_rows",
        lambda x, i, y: lax.scatter_sub(
            x, i[:, None], y, lax.ScatterDimensionNumbers((1,), (0,), (0,))
        ),
        ("b, s", WILD, "t, s"),
        ("scatter-sub",),
        grad=True,
    ),
    moves("set_rows_scalar", _at("set", value=lambda y: 2.0), ("b, s", WILD, ""), grad=True),
    moves("max_uint", _at("max"), (Arg("b", "uint8"), WILD, Arg("t", "uint8", 0, 200))),
    moves("set_bool", _at("set", value=lambda y: True), (Arg("b", "bool"), WILD, "")),
    moves("add_complex", _at("add"), (Arg("b", "complex64"), WILD, Arg("t", "complex64"))),
    moves(
        "mul_bfloat16", _at("mul"), (Arg("b", "bfloat16"), VALID, Arg("t", "bfloat16")), rtol=0.05
    ),
    moves(
        "mul_unique",
        lambda x, y: x.at[jnp.arange(y.shape[0]) + 1].mul(y, unique_indices=True, mode="drop"),
        ("b, s", "b, s"),
        grad=True,
    ),
    moves("set_keys", _at("set"), (Arg("b", "key"), Arg("", "int32", "-b", "b"), Arg("", "key"))),
    moves(
        "set_key_rows",
        lambda k, i, j: k.at[i].set(j[0]),
        (Arg("b", "key"), VALID, Arg("t", "key")),
    ),
]

WINDOWS = [
    moves(
        f"scatter_windows_{name}_{mode}",
        _windows(op, mode, halved=name == "symbolic"),
        ("b, s", Arg("t", "int32", -3, 12), shape),
        grad=op is lax.scatter_add and mode != "promise_in_bounds",
        sizes=ATLEAST2,
    )
    for mode in ("drop", "clip", "promise_in_bounds")
    for op, name, shape in (
        (lax.scatter_add, "static", "t, b, 2"),
        (lax.scatter_add, "symbolic", "t, b - 1, s"),
        (lax.scatter_max, "leading_axis_partial", "t, b - 1, s"),
        (lax.scatter_add, "whole", "t, b, s"),
    )
]
WINDOWS += [
    moves(
        f"scatter_batched_{mode}",
        _batched(lax.scatter_add, mode),
        ("b, s", Arg("b, 3", "int32", -9, 10), "b, 3"),
        ("scatter-add",),
        grad=mode != "promise_in_bounds",
    )
    for mode in ("drop", "clip", "promise_in_bounds")
]
WINDOWS += [
    moves("sliced_writes", _sliced_writes, ("b, s", "b, s"), grad=True, sizes=ATLEAST2),
    moves(
        "set_block",
        lambda x, y: x.at[:2, :2].set(y),
        ("s, s", "2, 2"),
        sizes=({"s": 2}, {"s": 8}, {"s": 5}),
        constraints=("s >= 2",),
    ),
]

SEGMENTS = [
    moves("segment_min", _segments(jax.ops.segment_min), ("t", Arg("t", "int32", 0, 3))),
]

CASES = [*ROWS, *WINDOWS, *SEGMENTS]
