"""Gathers and what jax.numpy reads by index."""

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


def _context_windows(x, i):
    return jax.vmap(lambda row, k: lax.dynamic_slice_in_dim(row, k, 2))(x, i)


def _grouped(x, i):
    return jnp.take_along_axis(x, i, axis=1), jnp.take_along_axis(x, i[:, :1], 1, mode="clip")


def _permute(x, i):
    order = (jnp.arange(x.shape[0]) * 7 + i[0]) % x.shape[0]
    return x[order]


READS = [
    moves("take_rows", lambda x, i: x[i], ("b, s", AT), ("gather",), grad=True),
    moves("take_columns", lambda x, i: x[:, i], ("s, b", AT), ("gather",), grad=True),
    moves("take_elements", lambda x, i: x[i, -1], (Arg("b, s", "int32"), AT), ("gather",)),
    moves("take_pairs", lambda x, i: x[i, i % x.shape[1]], ("b, s", AT), ("gather",), grad=True),
    moves("take_grid", lambda x, i: x[i[:, None], i[None, :]], ("b, b", AT), ("gather",)),
    moves("take_keys", lambda k, i: k[i], (Arg("b", "key"), AT), ("gather",)),
    moves("take_scalar", lambda x, i: x[i], ("b, s", Arg("", "int32", "-b", "b")), grad=True),
    moves("take_permuted", _permute, ("b, 2", Arg("2", "int32", 0, 9)), grad=True),
    moves("newaxis_ellipsis", lambda x, i: x[..., None, i], ("2, s, b", AT)),
    moves("embedding", lambda w, i: w[i], ("7, 3", Arg("b, s", "int32", 0, 7)), grad=True),
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
    moves("get_fill_value", _get("fill", 4), ("b, s", WILD), ("gather",), grad=True),
    moves("get_fill_int", _get("fill"), (Arg("b, s", "int32"), WILD), ("gather",)),
    moves("get_fill_uint", _get("fill"), (Arg("b", "uint8"), WILD), ("gather",)),
    moves("get_fill_bool", _get("fill", True), (Arg("b", "bool"), WILD), ("gather",)),
    moves("get_fill_complex", _get("fill"), (Arg("b", "complex64"), WILD), ("gather",)),
    moves("get_fill_scalar", _get("fill", 2), ("b, s", Arg("", "int32", -9, 9)), grad=True),
    moves(
        "get_narrow_index",
        lambda x, i: (x.at[jnp.uint8(i)].get(mode="clip"), x.at[jnp.int8(i)].get(mode="fill")),
        ("b, s", WILD),
    ),
    moves("get_wide_index", lambda x, i: x.at[jnp.uint32(i)].get(mode="clip"), ("b, s", WILD)),
    # `lax.dynamic_slice`, and what it is the derivative of, move what is outside to the end.
    moves("take_scalar_outside", lambda x, i: x[i], ("b, s", WILD_ONE), grad=True),
    moves("take_row_outside", lambda x, i: x[i - 9], ("4, s", WILD_ONE), grad=True),
    moves("take_number_outside", lambda x: (x[9], x[-9]), ("4, s",), grad=True),
    moves("take_part_outside", lambda x, i: x[::-1, None, i, 1:], ("b, b, s", WILD_ONE), grad=True),
    moves("take_each_outside", jax.vmap(lambda x, i: x[i], (None, 0)), ("b, s", WILD), grad=True),
    moves("take_default", lambda x, i: jnp.take(x, i, axis=0), ("b, s", WILD), grad=True),
    moves("take_clip", lambda x, i: jnp.take(x, i, axis=1, mode="clip"), ("s, b", WILD), grad=True),
    moves("take_flat", lambda x, i: jnp.take(x, i, mode="fill"), ("b, s", WILD)),
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
    moves("windows_of_rows", _context_windows, ("b, s", Arg("b", "int32", -3, 9)), sizes=ATLEAST2),
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
        "take_along_axis",
        _grouped,
        ("b, s", Arg("b, t", "int32", "-s", "s")),
        ("gather",),
        grad=True,
    ),
    moves(
        "take_along_short_axis",
        lambda x, i: jnp.take_along_axis(x, i, axis=0),
        ("b, s", Arg("1, s", "int32", "-b", "b")),
        ("gather",),
    ),
    moves(
        "vmapped_rows",
        jax.vmap(lambda x, i: x[i]),
        ("b, s", Arg("b", "int32", "-s", "s")),
        grad=True,
    ),
    moves(
        "cross_entropy",
        lambda x, y: -jnp.take_along_axis(jax.nn.log_softmax(x), y[..., None], -1)[..., 0],
        ("b, s, 5", Arg("b, s", "int32", 0, 5)),
        grad=True,
    ),
]

OTHERS = [
    moves("one_hot", lambda i: jax.nn.one_hot(i, 5), (Arg("b, s", "int32", -2, 7),)),
    moves("one_hot_of_size", lambda i, x: jax.nn.one_hot(i, x.shape[0]), (WILD, "b")),
    moves(
        "select", lambda x: jnp.select([x > 1, x > 0], [x * 2, x * 3], -1.0), ("b, s",), grad=True
    ),
    moves("where_select", lambda x: jnp.where(x > 0, x, 0), ("b, s",), grad=True),
    moves("nonzero", lambda x: jnp.nonzero(x > 0, size=5, fill_value=-1), ("b, s",)),
    moves("triangle", lambda x: x[jnp.triu_indices(x.shape[0])], ("b, b",)),
    moves(
        "unravel", lambda i, x: jnp.unravel_index(i, x.shape), (Arg("t", "int32", 0, "b*s"), "b, s")
    ),
    moves("sorted_rows", lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1), ("b, s",)),
    moves("argwhere", lambda x: jnp.argwhere(x > 0, size=3), ("s",)),
    moves("extract_masked", lambda x: x[jnp.nonzero(x > 0, size=4, fill_value=0)], ("s",)),
    moves(
        "take_wrapped",
        lambda x, i: jnp.take(x, i, mode="wrap", axis=1),
        ("b, s", Arg("3", "int32", -20, 20)),
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
    moves("digitize", lambda x: jnp.digitize(x, jnp.array([-1.0, 0.0, 1.0])), ("b, s",)),
]

CASES = [*READS, *MODES, *WINDOWS, *BATCHED, *OTHERS]
