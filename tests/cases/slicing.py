"""Slices, pads, reversals and windows at run-time places."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import family

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
ATLEAST2 = ({"b": 1, "s": 8, "t": 4}, {"b": 4, "s": 2, "t": 1}, {"b": 3, "s": 7, "t": 3})
ATLEAST3 = ({"b": 1, "s": 8}, {"b": 4, "s": 3}, {"b": 3, "s": 7})

MOVED: dict[str, Any] = {"sizes": SIZES, "domains": ("mixed",)}
case, smooth = family(**MOVED), family(**MOVED, grad=True)
pad, rev = family("pad", **MOVED), family("rev", **MOVED)
update = family("dynamic_update_slice", **MOVED, grad=True)


def _lax_slices(x):
    s = x.shape[1]
    return (
        lax.slice_in_dim(x, 1, s, axis=1),
        lax.slice_in_dim(x, 0, s - 1, axis=1),
        lax.slice_in_dim(x, s // 2, s, axis=1),
        lax.slice_in_dim(x, s // 2, s, stride=2, axis=1),
        lax.slice_in_dim(x, 0, s, stride=3, axis=1),
        lax.slice(x, (0, s - 1), (x.shape[0], s)),
    )


def _jnp_slices(x):
    s = x.shape[1]
    return x[:, 1:], x[:, :-1], x[:, s // 2 :], x[:, : s // 2 + 1], x[..., -2:], x[-1], x[:, -1]


def _strided(x):
    return x[:, ::2], x[:, 1::2], x[:, ::-1], x[::-1, ::3], x[:, :0:-1]


def _dynamic_slices(x, i):
    return (
        lax.dynamic_slice_in_dim(x, i, 2, axis=1),
        lax.dynamic_slice_in_dim(x, i, x.shape[1] // 2, axis=1),
        lax.dynamic_slice(x, (i, i), (1, x.shape[1])),
        lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False),
    )


def _windows(x):
    return jnp.stack([x[:, k : x.shape[1] - 2 + k] for k in range(3)], axis=-1)


def _stride_windows(x):
    at = jnp.arange(x.shape[1] - 2)
    return jax.vmap(lambda i: lax.dynamic_slice_in_dim(x, i, 3, axis=1), out_axes=1)(at)


SLICES = [
    smooth("lax_slices", _lax_slices, covers="slice", sizes=ATLEAST2),
    case(
        "lax_last_two",
        lambda x: lax.slice_in_dim(x, x.shape[1] - 2, x.shape[1], axis=1),
        covers="slice",
        sizes=ATLEAST2,
    ),
    case(
        "lax_slice_by_size",
        lambda x: lax.slice(x, (1, 0), x.shape, (x.shape[1], (x.shape[0] + 1) // 2)),
        covers="slice",
    ),
    case("lax_slices_keys", lambda k: lax.slice_in_dim(k, k.shape[0] // 2, k.shape[0]), "key[s]"),
    smooth("jnp_slices", _jnp_slices, covers="gather", sizes=ATLEAST2),
    case("slice_to_nothing", lambda x: (x[:, 1:], x[:, 1:].sum())),
    rev("jnp_strides", _strided, grad=True, sizes=ATLEAST2),
    rev("strides_int", _strided, "int32[b, s]", sizes=ATLEAST2),
    smooth("one_element", lambda x: x[0, 0] + x[-1, -1]),
    smooth("gradient", lambda x: jnp.gradient(x, axis=1), sizes=ATLEAST3),
    case("delete", lambda x: jnp.delete(x, 1, axis=1), sizes=ATLEAST2),
    case("insert", lambda x: jnp.insert(x, 1, 5.0, axis=1), sizes=ATLEAST2),
    smooth("diff", jnp.diff, sizes=ATLEAST2),
    smooth("trapezoid", jnp.trapezoid, sizes=ATLEAST2),
    smooth("windows", _windows, sizes=ATLEAST3),
    smooth("windows_vmapped", _stride_windows, sizes=ATLEAST3),
]

REVERSALS = [
    rev("rev", lambda x: lax.rev(x, (0, 2)), "b, 2, s", grad=True),
    rev("flip", jnp.flip, "uint8[b, s]"),
    rev("flip_bool", lambda x: jnp.flip(x, 1), "bool[b, s]"),
    rev("rot90", jnp.rot90, "bfloat16[b, s]"),
    rev("rev_keys", lambda k: lax.rev(k, (0,)), "key[s]"),
]

PADS = [
    pad("pad", lambda x: lax.pad(x, x[0, 0], ((1, 2, 0), (-1, 3, 2))), grad=True),
    pad("pad_low_by_size", lambda x: lax.pad(x, 0.5, [(x.shape[0], 0, 0)]), "s"),
    pad("pad_low", lambda x: lax.pad(x, x.dtype.type(2), ((3, 0, 0), (0, 0, 1)))),
    pad(
        "pad_negative",
        lambda x: lax.pad(x, x.dtype.type(2), ((1, -1, 0), (-1, -1, 1))),
        grad=True,
        sizes=ATLEAST2,
    ),
    pad(
        "pad_to_double",
        lambda x: lax.pad(x, x.dtype.type(0.5), ((x.shape[0], x.shape[0], 0), (0, x.shape[1], 0))),
        grad=True,
    ),
    pad(
        "pad_by_shrinking",
        lambda x: lax.pad(x, x.dtype.type(1), ((10 - x.shape[0], 0, 0),)),
        "int32[s]",
    ),
    pad(
        "pad_by_unknown_sign",
        lambda x: lax.pad(x, x.dtype.type(1), ((x.shape[0] - 3, 2, 1),)),
        "int32[s]",
    ),
    pad("pad_to_static", lambda x: lax.pad(x, True, ((0, 10 - x.shape[0], 0),)), "bool[s]"),
    pad(
        "pad_interior_by_size",
        lambda x: lax.pad(x, x[0], ((x.shape[0] - 2, 1, x.shape[0] - 1),)),
        "s",
    ),
    pad(
        "pad_left_to_static",
        lambda x: jnp.pad(x, ((0, 0), (10 - x.shape[1], 0))),
        grad=True,
        constraints=("s <= 10",),
    ),
    case("jnp_pad", lambda x: jnp.pad(x, ((1, 0), (0, 2)), constant_values=3)),
    case("jnp_pad_edge", lambda x: jnp.pad(x, ((0, 0), (1, 2)), mode="edge")),
    case(
        "jnp_pad_reflect",
        lambda x: jnp.pad(x, ((0, 0), (1, 1)), mode="reflect"),
        sizes=ATLEAST2,
        constraints=("s >= 2",),
    ),
    case("jnp_pad_special", lambda x: jnp.pad(x, 1), domains=("special",)),
]

DYNAMIC = [
    smooth(
        "dynamic_slices",
        _dynamic_slices,
        "b, s; int32[] -10:11",
        covers="dynamic_slice",
        sizes=ATLEAST2,
    ),
    case(
        "dynamic_slice_of_static",
        lambda x, y, i: lax.dynamic_slice_in_dim(y, i, x.shape[0]),
        "s; 20; int32[] 5:25",
        covers="dynamic_slice",
        constraints=("s <= 20",),
    ),
    case(
        "dynamic_slice_narrow_index",
        lambda x, i, j: lax.dynamic_slice(x, (jnp.uint8(i), jnp.uint8(j)), (1, 2)),
        "b, s; int32[] -10:11; int32[] -10:11",
        sizes=ATLEAST2,
    ),
    case(
        "dynamic_slice_keys",
        lambda k, i: lax.dynamic_slice_in_dim(k, i, 1),
        "key[s]; int32[] -10:11",
    ),
    update(
        "dynamic_update",
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)),
        "b, s; 1, 2; int32[] -10:11",
        sizes=ATLEAST2,
    ),
    update(
        "dynamic_update_whole_axis",
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)),
        "b, s; 1, s; int32[] -10:11",
    ),
    update(
        "dynamic_update_partial",
        lambda x, y, i: lax.dynamic_update_slice(x, y[:, 1:], (i, i)),
        "b, s; b, s; int32[] -10:11",
    ),
    update(
        "kv_cache",
        lambda cache, new, i: lax.dynamic_update_slice_in_dim(cache, new, i, axis=1),
        "b, 12, 2; b, s, 2; int32[] -10:11",
        constraints=("s <= 12",),
    ),
    case(
        "kv_cache_per_row",
        lambda cache, new, at: jax.vmap(
            lambda c, n, i: lax.dynamic_update_slice_in_dim(c, n, i, axis=0)
        )(cache, new, at),
        "b, 12, 2; b, s, 2; int32[b] 0:12",
        covers="scatter",
        constraints=("s <= 12",),
    ),
    case(
        "dynamic_update_keys",
        lambda k, j, i: lax.dynamic_update_slice_in_dim(k, j, i, axis=0),
        "key[s]; key[1]; int32[] -10:11",
    ),
]

ROLLS = [
    smooth("roll", lambda x: jnp.roll(x, 2, 1)),
    case("roll_back", lambda x: jnp.roll(x, (-1, 3), (0, 1)), "int32[b, s]"),
    case("roll_by_size", lambda x: jnp.roll(x, x.shape[1] // 2, 1)),
    case("roll_flat", lambda x: jnp.roll(x, 5)),
    smooth("roll_traced", lambda x, i: jnp.roll(x, i, 1), "b, s; int32[] -10:11"),
]

CASES = [*SLICES, *REVERSALS, *PADS, *DYNAMIC, *ROLLS]
