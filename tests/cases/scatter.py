"""Scatters and what jax.numpy writes by index."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, family

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
ATLEAST2 = ({"b": 1, "s": 8, "t": 4}, {"b": 4, "s": 2, "t": 1}, {"b": 3, "s": 7, "t": 3})

case, smooth = (family(sizes=SIZES, domains=("mixed",), grad=g) for g in (False, True))

WILD = "int32[t] -2*b - 2:2*b + 2"  # any, in bounds or not
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
        *(x.at[:, 1:].set(y[:, :-1]), x.at[:, :-1].add(y[:, 1:]), x.at[:, s // 2 :].mul(3.0)),
        *(x.at[:, -1].set(0.0), x.at[0, 0].max(2.0), x.at[:, ::2].min(y[:, ::2])),
        *(x.at[-1, 1:].divide(2.0), x.at[:, ::-1].set(y)),
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
    case(
        f"{method}_rows_{mode}",
        _at(method, mode),
        f"b, s; {WILD}; t, s",
        covers="scatter" if method == "set" else f"scatter-{method}",
        grad=method != "mul" and mode != "promise_in_bounds",
    )
    for method in FLOATS
    for mode in ("drop", "clip", "promise_in_bounds")
    if method != "set" or mode == "drop"
]
ROWS += [
    smooth("subtract_rows", _at("subtract"), f"b, s; {WILD}; t, s"),
    smooth(
        "scatter_sub_rows",
        lambda x, i, y: lax.scatter_sub(
            x, i[:, None], y, lax.ScatterDimensionNumbers((1,), (0,), (0,))
        ),
        f"b, s; {WILD}; t, s",
        covers="scatter-sub",
    ),
    smooth("set_rows_scalar", _at("set", value=lambda y: 2.0), f"b, s; {WILD}; "),
    smooth("add_columns", lambda x, i, y: x.at[:, i].add(y), f"s, b; {WILD}; s, t"),
    smooth("add_pairs", lambda x, i, y: x.at[i, i].add(y), f"b, b; {WILD}; t"),
    case("add_int", _at("add"), f"int32[b]; {WILD}; int32[t]", covers="scatter-add"),
    case("max_uint", _at("max"), f"uint8[b]; {WILD}; uint8[t] 0:200"),
    case("set_bool", _at("set", value=lambda y: True), f"bool[b]; {WILD}; "),
    case("add_complex", _at("add"), f"complex64[b]; {WILD}; complex64[t]"),
    case("mul_bfloat16", _at("mul"), "bfloat16[b]; int32[t] -b:b; bfloat16[t]", rtol=0.05),
    case("max_special", _at("max"), f"b, s; {WILD}; t, s", domains=("special",)),
    case("apply", _apply, f"b, s; {WILD}", covers="scatter"),
    smooth(
        "set_unique",
        lambda x, y: x.at[jnp.arange(y.shape[0]) * 2].set(y, unique_indices=True, mode="drop"),
        "b, s; b, s",
    ),
    smooth(
        "mul_unique",
        lambda x, y: x.at[jnp.arange(y.shape[0]) + 1].mul(y, unique_indices=True, mode="drop"),
        "b, s; b, s",
    ),
    case("set_keys", _at("set"), "key[b]; int32[] -b:b; key[]"),
    case("set_key_rows", lambda k, i, j: k.at[i].set(j[0]), "key[b]; int32[t] -b:b; key[t]"),
]

WINDOWS = [
    case(
        f"scatter_windows_{name}_{mode}",
        _windows(op, mode, halved=name == "symbolic"),
        "b, s; int32[t] -3:12",
        shape,
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
    case(
        f"scatter_batched_{mode}",
        _batched(lax.scatter_add, mode),
        "b, s; int32[b, 3] -9:10; b, 3",
        covers="scatter-add",
        grad=mode != "promise_in_bounds",
    )
    for mode in ("drop", "clip", "promise_in_bounds")
]
WINDOWS += [
    smooth("sliced_writes", _sliced_writes, "b, s; b, s", sizes=ATLEAST2),
    smooth("cache_rows", _cache_rows, "b, 6, 2; b, 2; int32[b] 0:6"),
    case(
        "set_block",
        lambda x, y: x.at[:2, :2].set(y),
        "s, s; 2, 2",
        sizes=({"s": 2}, {"s": 8}, {"s": 5}),
        constraints=("s >= 2",),
    ),
]

SEGMENTS = [
    smooth("segment_sum", _segments(jax.ops.segment_sum), "t, s; int32[t] -1:5"),
    smooth(
        "segment_sum_sorted",
        lambda x, i: jax.ops.segment_sum(x, i, x.shape[1], indices_are_sorted=True),
        "t, b",
        SORTED,
    ),
    smooth("segment_max", _segments(jax.ops.segment_max), "t, s; int32[t] 0:3"),
    case("segment_min", _segments(jax.ops.segment_min), "t; int32[t] 0:3"),
    case("segment_prod", _segments(jax.ops.segment_prod), "t; int32[t] 0:3"),
    smooth("graph", _graph, "b, s; int32[t] -b:b; int32[t] -b:b"),
    case("histogram", _histogram, "int32[s] 0:6"),
    case("histogram_2d", lambda x: jnp.histogram(x, bins=4, range=(-2, 2)), "s"),
]

CASES = [*ROWS, *WINDOWS, *SEGMENTS]
