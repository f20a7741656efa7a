"""Gathers and what jax.numpy reads by index."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import cases, family

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
ATLEAST2 = ({"b": 1, "s": 8, "t": 4}, {"b": 4, "s": 2, "t": 1}, {"b": 3, "s": 7, "t": 3})

case, smooth = (family(sizes=SIZES, domains=("mixed",), grad=g) for g in (False, True))
gather = family("gather", sizes=SIZES, domains=("mixed",))

WILD = "int32[t] -2*b - 2:2*b + 2"  # any, in bounds or not
WILD_ONE = "int32[] -2*b - 2:2*b + 2"


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

    return lambda x, i: lax.gather(x, i[..., None], numbers, (1, 1), mode=mode)


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


READS = {
    "take_rows": gather(lambda x, i: x[i], "b, s; int32[t] -b:b", grad=True),
    "take_columns": gather(lambda x, i: x[:, i], "s, b; int32[t] -b:b", grad=True),
    "take_elements": gather(lambda x, i: x[i, -1], "int32[b, s]; int32[t] -b:b"),
    "take_pairs": gather(lambda x, i: x[i, i % x.shape[1]], "b, s; int32[t] -b:b", grad=True),
    "take_grid": gather(lambda x, i: x[i[:, None], i[None, :]], "b, b; int32[t] -b:b"),
    "take_keys": gather(lambda k, i: k[i], "key[b]; int32[t] -b:b"),
    "take_scalar": smooth(lambda x, i: x[i], "b, s; int32[] -b:b"),
    "take_permuted": smooth(_permute, "b, 2; int32[2] 0:9"),
    "newaxis_ellipsis": case(lambda x, i: x[..., None, i], "2, s, b; int32[t] -b:b"),
    "embedding": smooth(lambda w, i: w[i], "7, 3; int32[b, s] 0:7"),
    "position_embedding": smooth(
        lambda w, x: x + w[: x.shape[1]], "9, 3; b, s, 3", constraints=("s <= 9",)
    ),
}

MODES = {
    f"get_{mode}": gather(_get(mode), f"b, s; {WILD}", grad=mode != "promise_in_bounds")
    for mode in ("fill", "clip", "promise_in_bounds")
}
MODES |= {
    "get_fill_value": gather(_get("fill", 4), f"b, s; {WILD}", grad=True),
    "get_fill_int": gather(_get("fill"), f"int32[b, s]; {WILD}"),
    "get_fill_uint": gather(_get("fill"), f"uint8[b]; {WILD}"),
    "get_fill_bool": gather(_get("fill", True), f"bool[b]; {WILD}"),
    "get_fill_complex": gather(_get("fill"), f"complex64[b]; {WILD}"),
    "get_fill_scalar": smooth(_get("fill", 2), "b, s; int32[] -9:9"),
    "get_narrow_index": case(
        lambda x, i: (x.at[jnp.uint8(i)].get(mode="clip"), x.at[jnp.int8(i)].get(mode="fill")),
        f"b, s; {WILD}",
    ),
    "get_wide_index": case(lambda x, i: x.at[jnp.uint32(i)].get(mode="clip"), f"b, s; {WILD}"),
    # `lax.dynamic_slice`, and what it is the derivative of, move what is outside to the end.
    "take_scalar_outside": smooth(lambda x, i: x[i], f"b, s; {WILD_ONE}"),
    "take_row_outside": smooth(lambda x, i: x[i - 9], f"4, s; {WILD_ONE}"),
    "take_number_outside": smooth(lambda x: (x[9], x[-9]), "4, s"),
    "take_part_outside": smooth(lambda x, i: x[::-1, None, i, 1:], f"b, b, s; {WILD_ONE}"),
    "take_each_outside": smooth(jax.vmap(lambda x, i: x[i], (None, 0)), f"b, s; {WILD}"),
    "take_default": smooth(lambda x, i: jnp.take(x, i, axis=0), f"b, s; {WILD}"),
    "take_clip": smooth(lambda x, i: jnp.take(x, i, axis=1, mode="clip"), f"s, b; {WILD}"),
    "take_flat": case(lambda x, i: jnp.take(x, i, mode="fill"), f"b, s; {WILD}"),
}

WINDOWS = {
    f"windows_{mode}_{name}": gather(
        _gather(mode, sizes),
        "b, s; int32[t] -3:12",
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
}
WINDOWS |= {
    f"one_window_{mode}": gather(_one_window(mode), "b, s; int32[2] -2:5")
    for mode in ("fill", "clip", "promise_in_bounds")
}
WINDOWS |= {
    "windows_of_static": gather(
        jax.vmap(lambda x, y, i: lax.dynamic_slice_in_dim(y, i, x.shape[0]), (None, None, 0)),
        "s; 12; int32[t] -5:20",
        grad=True,
        constraints=("s <= 12",),
    ),
    "windows_of_rows": case(_context_windows, "b, s; int32[b] -3:9", sizes=ATLEAST2),
}

BATCHED = {
    f"batched_{mode}": gather(
        _batched(mode), "b, s; int32[b, 3] -9:10", grad=mode != "promise_in_bounds"
    )
    for mode in ("fill", "clip", "promise_in_bounds")
}
BATCHED |= {
    "take_along_axis": gather(_grouped, "b, s; int32[b, t] -s:s", grad=True),
    "take_along_short_axis": gather(
        lambda x, i: jnp.take_along_axis(x, i, axis=0), "b, s; int32[1, s] -b:b"
    ),
    "vmapped_rows": smooth(jax.vmap(lambda x, i: x[i]), "b, s; int32[b] -s:s"),
    "cross_entropy": smooth(
        lambda x, y: -jnp.take_along_axis(jax.nn.log_softmax(x), y[..., None], -1)[..., 0],
        "b, s, 5; int32[b, s] 0:5",
    ),
}

OTHERS = {
    "one_hot": case(lambda i: jax.nn.one_hot(i, 5), "int32[b, s] -2:7"),
    "one_hot_of_size": case(lambda i, x: jax.nn.one_hot(i, x.shape[0]), f"{WILD}; b"),
    "select": smooth(lambda x: jnp.select([x > 1, x > 0], [x * 2, x * 3], -1.0)),
    "where_select": smooth(lambda x: jnp.where(x > 0, x, 0)),
    "nonzero": case(lambda x: jnp.nonzero(x > 0, size=5, fill_value=-1)),
    "triangle": case(lambda x: x[jnp.triu_indices(x.shape[0])], "b, b"),
    "unravel": case(lambda i, x: jnp.unravel_index(i, x.shape), "int32[t] 0:b*s; b, s"),
    "sorted_rows": case(lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1)),
    "argwhere": case(lambda x: jnp.argwhere(x > 0, size=3), "s"),
    "extract_masked": case(lambda x: x[jnp.nonzero(x > 0, size=4, fill_value=0)], "s"),
    "take_wrapped": case(lambda x, i: jnp.take(x, i, mode="wrap", axis=1), "b, s; int32[3] -20:20"),
    "take_filled_with_a_size": case(
        lambda x, i: [
            jnp.take(x, i, axis=1, fill_value=x.shape[1]),
            x.at[0].get(mode="fill", fill_value=2 * x.shape[1] + 1),
            x.at[9].get(mode="fill", fill_value=x.shape[1]),
        ],
        "b, s; int32[3] -20:20",
    ),
    "intersection_with_indices": case(
        lambda x, y: jnp.intersect1d(x, y, size=3, return_indices=True),
        "int32[s] 0:9; int32[b] 0:9",
    ),
    "digitize": case(lambda x: jnp.digitize(x, jnp.array([-1.0, 0.0, 1.0]))),
}

CASES = cases(READS | MODES | WINDOWS | BATCHED | OTHERS)
