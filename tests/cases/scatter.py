"""Scatters and what jax.numpy writes by index."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, cases, family

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
ATLEAST2 = ({"b": 1, "s": 8, "t": 4}, {"b": 4, "s": 2, "t": 1}, {"b": 3, "s": 7, "t": 3})

case, smooth = (family(sizes=SIZES, domains=("mixed",), grad=g) for g in (False, True))

WILD = "int32[t] -2*b - 2:2*b + 2"  # any, in bounds or not
SORTED = Arg("t", "int32", 0, "b", make=lambda a, _: a * 0 + sorted(a))
FLOATS = ("add", "mul", "min", "max", "set")


def _at(method, mode=None, value=lambda y: y):
    return lambda x, i, y: getattr(x.at[i], method)(value(y), mode=mode)


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


ROWS = {
    f"{method}_rows_{mode}": case(
        _at(method, mode),
        f"b, s; {WILD}; t, s",
        covers="scatter" if method == "set" else f"scatter-{method}",
        grad=method != "mul" and mode != "promise_in_bounds",
    )
    for method in FLOATS
    for mode in ("drop", "clip", "promise_in_bounds")
    if method != "set" or mode == "drop"
}
ROWS |= {
    "subtract_rows": smooth(_at("subtract"), f"b, s; {WILD}; t, s"),
    "scatter_sub_rows": smooth(
        lambda x, i, y: lax.scatter_sub(
            x, i[:, None], y, lax.ScatterDimensionNumbers((1,), (0,), (0,))
        ),
        f"b, s; {WILD}; t, s",
        covers="scatter-sub",
    ),
    "set_rows_scalar": smooth(_at("set", value=lambda y: 2.0), f"b, s; {WILD}; "),
    "add_columns": smooth(lambda x, i, y: x.at[:, i].add(y), f"s, b; {WILD}; s, t"),
    "add_pairs": smooth(lambda x, i, y: x.at[i, i].add(y), f"b, b; {WILD}; t"),
    "add_int": case(_at("add"), f"int32[b]; {WILD}; int32[t]", covers="scatter-add"),
    "max_uint": case(_at("max"), f"uint8[b]; {WILD}; uint8[t] 0:200"),
    "set_bool": case(_at("set", value=lambda y: True), f"bool[b]; {WILD}; "),
    "add_complex": case(_at("add"), f"complex64[b]; {WILD}; complex64[t]"),
    "mul_bfloat16": case(_at("mul"), "bfloat16[b]; int32[t] -b:b; bfloat16[t]", rtol=0.05),
    "max_special": case(_at("max"), f"b, s; {WILD}; t, s", domains=("special",)),
    "apply": case(lambda x, i: x.at[i].apply(jnp.sin), f"b, s; {WILD}", covers="scatter"),
    "set_unique": smooth(
        lambda x, y: x.at[jnp.arange(y.shape[0]) * 2].set(y, unique_indices=True, mode="drop"),
        "b, s; b, s",
    ),
    "mul_unique": smooth(
        lambda x, y: x.at[jnp.arange(y.shape[0]) + 1].mul(y, unique_indices=True, mode="drop"),
        "b, s; b, s",
    ),
    "set_keys": case(_at("set"), "key[b]; int32[] -b:b; key[]"),
    "set_key_rows": case(lambda k, i, j: k.at[i].set(j[0]), "key[b]; int32[t] -b:b; key[t]"),
}

WINDOWS = {
    f"scatter_windows_{name}_{mode}": case(
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
}
WINDOWS |= {
    f"scatter_batched_{mode}": case(
        _batched(lax.scatter_add, mode),
        "b, s; int32[b, 3] -9:10; b, 3",
        covers="scatter-add",
        grad=mode != "promise_in_bounds",
    )
    for mode in ("drop", "clip", "promise_in_bounds")
}
WINDOWS |= {
    "sliced_writes": smooth(_sliced_writes, "b, s; b, s", sizes=ATLEAST2),
    "cache_rows": smooth(_cache_rows, "b, 6, 2; b, 2; int32[b] 0:6"),
    "set_block": case(
        lambda x, y: x.at[:2, :2].set(y),
        "s, s; 2, 2",
        sizes=({"s": 2}, {"s": 8}, {"s": 5}),
        constraints=("s >= 2",),
    ),
}

SEGMENTS = {
    "segment_sum": smooth(_segments(jax.ops.segment_sum), "t, s; int32[t] -1:5"),
    "segment_sum_sorted": smooth(
        lambda x, i: jax.ops.segment_sum(x, i, x.shape[1], indices_are_sorted=True), "t, b", SORTED
    ),
    "segment_max": smooth(_segments(jax.ops.segment_max), "t, s; int32[t] 0:3"),
    "segment_min": case(_segments(jax.ops.segment_min), "t; int32[t] 0:3"),
    "segment_prod": case(_segments(jax.ops.segment_prod), "t; int32[t] 0:3"),
    "graph": smooth(_graph, "b, s; int32[t] -b:b; int32[t] -b:b"),
    "histogram": case(_histogram, "int32[s] 0:6"),
    "histogram_2d": case(lambda x: jnp.histogram(x, bins=4, range=(-2, 2)), "s"),
}

CASES = cases(ROWS | WINDOWS | SEGMENTS)
