"""Scatters and what jax.numpy writes by index."""

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
SORTED = Arg("t", "int32", 0, "b", make=lambda a, _: a * 0 + sorted(a))
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


def _apply(x, i):
    return x.at[i].apply(jnp.sin)


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


def _graph(nodes, senders, receivers):
    messages = nodes[senders]
    total = jax.ops.segment_sum(messages, receivers, num_segments=nodes.shape[0])
    count = jax.ops.segment_sum(jnp.ones(senders.shape), receivers, nodes.shape[0])
    return total / jnp.maximum(count, 1)[:, None]


def _histogram(i):
    return jnp.zeros(5, jnp.int32).at[i].add(1), jnp.bincount(i, length=4)


def _cache_rows(cache, new, at):
    rows = jnp.arange(new.shape[0])
    return cache.at[rows, at].set(new)


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
    moves("add_columns", lambda x, i, y: x.at[:, i].add(y), ("s, b", WILD, "s, t"), grad=True),
    moves("add_pairs", lambda x, i, y: x.at[i, i].add(y), ("b, b", WILD, "t"), grad=True),
    moves("add_int", _at("add"), (Arg("b", "int32"), WILD, Arg("t", "int32")), ("scatter-add",)),
    moves("max_uint", _at("max"), (Arg("b", "uint8"), WILD, Arg("t", "uint8", 0, 200))),
    moves("set_bool", _at("set", value=lambda y: True), (Arg("b", "bool"), WILD, "")),
    moves("add_complex", _at("add"), (Arg("b", "complex64"), WILD, Arg("t", "complex64"))),
    moves(
        "mul_bfloat16", _at("mul"), (Arg("b", "bfloat16"), VALID, Arg("t", "bfloat16")), rtol=0.05
    ),
    moves("max_special", _at("max"), ("b, s", WILD, "t, s"), domains=("special",)),
    moves("apply", _apply, ("b, s", WILD), ("scatter",)),
    moves(
        "set_unique",
        lambda x, y: x.at[jnp.arange(y.shape[0]) * 2].set(y, unique_indices=True, mode="drop"),
        ("b, s", "b, s"),
        grad=True,
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
    moves("cache_rows", _cache_rows, ("b, 6, 2", "b, 2", Arg("b", "int32", 0, 6)), grad=True),
    moves(
        "set_block",
        lambda x, y: x.at[:2, :2].set(y),
        ("s, s", "2, 2"),
        sizes=({"s": 2}, {"s": 8}, {"s": 5}),
        constraints=("s >= 2",),
    ),
]

SEGMENTS = [
    moves(
        "segment_sum", _segments(jax.ops.segment_sum), ("t, s", Arg("t", "int32", -1, 5)), grad=True
    ),
    moves(
        "segment_sum_sorted",
        lambda x, i: jax.ops.segment_sum(x, i, x.shape[1], indices_are_sorted=True),
        ("t, b", SORTED),
        grad=True,
    ),
    moves(
        "segment_max", _segments(jax.ops.segment_max), ("t, s", Arg("t", "int32", 0, 3)), grad=True
    ),
    moves("segment_min", _segments(jax.ops.segment_min), ("t", Arg("t", "int32", 0, 3))),
    moves("segment_prod", _segments(jax.ops.segment_prod), ("t", Arg("t", "int32", 0, 3))),
    moves("graph", _graph, ("b, s", VALID, VALID), grad=True),
    moves("histogram", _histogram, (Arg("s", "int32", 0, 6),)),
    moves("histogram_2d", lambda x: jnp.histogram(x, bins=4, range=(-2, 2)), ("s",)),
]

CASES = [*ROWS, *WINDOWS, *SEGMENTS]
