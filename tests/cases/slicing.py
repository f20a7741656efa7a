"""Slices, pads, reversals and windows at run-time places."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import cases, family

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


SLICES = {
    "lax_slices": smooth(_lax_slices, covers="slice", sizes=ATLEAST2),
    "lax_last_two": case(
        lambda x: lax.slice_in_dim(x, x.shape[1] - 2, x.shape[1], axis=1),
        covers="slice",
        sizes=ATLEAST2,
    ),
    "lax_slice_by_size": case(
        lambda x: lax.slice(x, (1, 0), x.shape, (x.shape[1], (x.shape[0] + 1) // 2)), covers="slice"
    ),
    "lax_slices_keys": case(lambda k: lax.slice_in_dim(k, k.shape[0] // 2, k.shape[0]), "key[s]"),
    "jnp_slices": smooth(_jnp_slices, covers="gather", sizes=ATLEAST2),
    "slice_to_nothing": case(lambda x: (x[:, 1:], x[:, 1:].sum())),
    "jnp_strides": rev(_strided, grad=True, sizes=ATLEAST2),
    "strides_int": rev(_strided, "int32[b, s]", sizes=ATLEAST2),
    "one_element": smooth(lambda x: x[0, 0] + x[-1, -1]),
    "gradient": smooth(lambda x: jnp.gradient(x, axis=1), sizes=ATLEAST3),
    "delete": case(lambda x: jnp.delete(x, 1, axis=1), sizes=ATLEAST2),
    "insert": case(lambda x: jnp.insert(x, 1, 5.0, axis=1), sizes=ATLEAST2),
    "diff": smooth(jnp.diff, sizes=ATLEAST2),
    "trapezoid": smooth(jnp.trapezoid, sizes=ATLEAST2),
    "windows": smooth(_windows, sizes=ATLEAST3),
    "windows_vmapped": smooth(_stride_windows, sizes=ATLEAST3),
}

REVERSALS = {
    "rev": rev(lambda x: lax.rev(x, (0, 2)), "b, 2, s", grad=True),
    "flip": rev(jnp.flip, "uint8[b, s]"),
    "flip_bool": rev(lambda x: jnp.flip(x, 1), "bool[b, s]"),
    "rot90": rev(jnp.rot90, "bfloat16[b, s]"),
    "rev_keys": rev(lambda k: lax.rev(k, (0,)), "key[s]"),
}

PADS = {
    "pad": pad(lambda x: lax.pad(x, x[0, 0], ((1, 2, 0), (-1, 3, 2))), grad=True),
    "pad_low_by_size": pad(lambda x: lax.pad(x, 0.5, [(x.shape[0], 0, 0)]), "s"),
    "pad_low": pad(lambda x: lax.pad(x, x.dtype.type(2), ((3, 0, 0), (0, 0, 1)))),
    "pad_negative": pad(
        lambda x: lax.pad(x, x.dtype.type(2), ((1, -1, 0), (-1, -1, 1))), grad=True, sizes=ATLEAST2
    ),
    "pad_to_double": pad(
        lambda x: lax.pad(x, x.dtype.type(0.5), ((x.shape[0], x.shape[0], 0), (0, x.shape[1], 0))),
        grad=True,
    ),
    "pad_by_shrinking": pad(
        lambda x: lax.pad(x, x.dtype.type(1), ((10 - x.shape[0], 0, 0),)), "int32[s]"
    ),
    "pad_by_unknown_sign": pad(
        lambda x: lax.pad(x, x.dtype.type(1), ((x.shape[0] - 3, 2, 1),)), "int32[s]"
    ),
    "pad_to_static": pad(lambda x: lax.pad(x, True, ((0, 10 - x.shape[0], 0),)), "bool[s]"),
    "pad_interior": pad(lambda x: lax.pad(x, x[0], ((x.shape[0] - 2, 1, x.shape[0] - 1),)), "s"),
    "pad_left_to_static": pad(
        lambda x: jnp.pad(x, ((0, 0), (10 - x.shape[1], 0))), grad=True, constraints=("s <= 10",)
    ),
    "jnp_pad": case(lambda x: jnp.pad(x, ((1, 0), (0, 2)), constant_values=3)),
    "jnp_pad_edge": case(lambda x: jnp.pad(x, ((0, 0), (1, 2)), mode="edge")),
    "jnp_pad_reflect": case(
        lambda x: jnp.pad(x, ((0, 0), (1, 1)), mode="reflect"),
        sizes=ATLEAST2,
        constraints=("s >= 2",),
    ),
    "jnp_pad_special": case(lambda x: jnp.pad(x, 1), domains=("special",)),
}

DYNAMIC = {
    "dynamic_slices": smooth(
        _dynamic_slices, "b, s; int32[] -10:11", covers="dynamic_slice", sizes=ATLEAST2
    ),
    "dynamic_slice_of_static": case(
        lambda x, y, i: lax.dynamic_slice_in_dim(y, i, x.shape[0]),
        "s; 20; int32[] 5:25",
        covers="dynamic_slice",
        constraints=("s <= 20",),
    ),
    "dynamic_slice_narrow_index": case(
        lambda x, i, j: lax.dynamic_slice(x, (jnp.uint8(i), jnp.uint8(j)), (1, 2)),
        "b, s; int32[] -10:11; int32[] -10:11",
        sizes=ATLEAST2,
    ),
    "slice_keys": case(lambda k, i: lax.dynamic_slice_in_dim(k, i, 1), "key[s]; int32[] -10:11"),
    "dynamic_update": update(
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)),
        "b, s; 1, 2; int32[] -10:11",
        sizes=ATLEAST2,
    ),
    "dynamic_update_whole_axis": update(
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)), "b, s; 1, s; int32[] -10:11"
    ),
    "dynamic_update_partial": update(
        lambda x, y, i: lax.dynamic_update_slice(x, y[:, 1:], (i, i)), "b, s; b, s; int32[] -10:11"
    ),
    "kv_cache": update(
        lambda cache, new, i: lax.dynamic_update_slice_in_dim(cache, new, i, axis=1),
        "b, 12, 2; b, s, 2; int32[] -10:11",
        constraints=("s <= 12",),
    ),
    "kv_cache_per_row": case(
        lambda cache, new, at: jax.vmap(
            lambda c, n, i: lax.dynamic_update_slice_in_dim(c, n, i, axis=0)
        )(cache, new, at),
        "b, 12, 2; b, s, 2; int32[b] 0:12",
        covers="scatter",
        constraints=("s <= 12",),
    ),
    "dynamic_update_keys": case(
        lambda k, j, i: lax.dynamic_update_slice_in_dim(k, j, i, axis=0),
        "key[s]; key[1]; int32[] -10:11",
    ),
}

ROLLS = {
    "roll": smooth(lambda x: jnp.roll(x, 2, 1)),
    "roll_back": case(lambda x: jnp.roll(x, (-1, 3), (0, 1)), "int32[b, s]"),
    "roll_by_size": case(lambda x: jnp.roll(x, x.shape[1] // 2, 1)),
    "roll_flat": case(lambda x: jnp.roll(x, 5)),
    "roll_traced": smooth(lambda x, i: jnp.roll(x, i, 1), "b, s; int32[] -10:11"),
}

CASES = cases(SLICES | REVERSALS | PADS | DYNAMIC | ROLLS)
