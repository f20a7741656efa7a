"""Slices, pads, reversals and windows at run-time places."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

SIZES = ({"b": 1, "s": 8, "t": 3}, {"b": 4, "s": 1, "t": 4}, {"b": 3, "s": 7, "t": 1})
ATLEAST2 = ({"b": 1, "s": 8, "t": 4}, {"b": 4, "s": 2, "t": 1}, {"b": 3, "s": 7, "t": 3})
ATLEAST3 = ({"b": 1, "s": 8}, {"b": 4, "s": 3}, {"b": 3, "s": 7})
moves = functools.partial(Case, sizes=SIZES, domains=("mixed",))

START = Arg("", "int32", -10, 11)
KEYS = Arg("s", "key")


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
    moves("lax_slices", _lax_slices, ("b, s",), ("slice",), grad=True, sizes=ATLEAST2),
    moves(
        "lax_last_two",
        lambda x: lax.slice_in_dim(x, x.shape[1] - 2, x.shape[1], axis=1),
        ("b, s",),
        ("slice",),
        sizes=ATLEAST2,
    ),
    moves(
        "lax_slice_by_size",
        lambda x: lax.slice(x, (1, 0), x.shape, (x.shape[1], (x.shape[0] + 1) // 2)),
        ("b, s",),
        ("slice",),
    ),
    moves("lax_slices_keys", lambda k: lax.slice_in_dim(k, k.shape[0] // 2, k.shape[0]), (KEYS,)),
    moves("jnp_slices", _jnp_slices, ("b, s",), ("gather",), grad=True, sizes=ATLEAST2),
    moves("slice_to_nothing", lambda x: (x[:, 1:], x[:, 1:].sum()), ("b, s",)),
    moves("jnp_strides", _strided, ("b, s",), ("rev",), grad=True, sizes=ATLEAST2),
    moves("strides_int", _strided, (Arg("b, s", "int32"),), ("rev",), sizes=ATLEAST2),
    moves("one_element", lambda x: x[0, 0] + x[-1, -1], ("b, s",), grad=True),
    moves("gradient", lambda x: jnp.gradient(x, axis=1), ("b, s",), grad=True, sizes=ATLEAST3),
    moves("delete", lambda x: jnp.delete(x, 1, axis=1), ("b, s",), sizes=ATLEAST2),
    moves("insert", lambda x: jnp.insert(x, 1, 5.0, axis=1), ("b, s",), sizes=ATLEAST2),
    moves("diff", jnp.diff, ("b, s",), grad=True, sizes=ATLEAST2),
    moves("trapezoid", jnp.trapezoid, ("b, s",), grad=True, sizes=ATLEAST2),
    moves("windows", _windows, ("b, s",), grad=True, sizes=ATLEAST3),
    moves("windows_vmapped", _stride_windows, ("b, s",), grad=True, sizes=ATLEAST3),
]

REVERSALS = [
    moves("rev", lambda x: lax.rev(x, (0, 2)), ("b, 2, s",), ("rev",), grad=True),
    moves("flip", jnp.flip, (Arg("b, s", "uint8"),), ("rev",)),
    moves("flip_bool", lambda x: jnp.flip(x, 1), (Arg("b, s", "bool"),), ("rev",)),
    moves("rot90", jnp.rot90, (Arg("b, s", "bfloat16"),), ("rev",)),
    moves("rev_keys", lambda k: lax.rev(k, (0,)), (KEYS,), ("rev",)),
]

PADS = [
    moves(
        "pad",
        lambda x: lax.pad(x, x[0, 0], ((1, 2, 0), (-1, 3, 2))),
        ("b, s",),
        ("pad",),
        grad=True,
    ),
    moves("pad_low_by_size", lambda x: lax.pad(x, 0.5, [(x.shape[0], 0, 0)]), ("s",), ("pad",)),
    moves(
        "pad_low",
        lambda x: lax.pad(x, x.dtype.type(2), ((3, 0, 0), (0, 0, 1))),
        ("b, s",),
        ("pad",),
    ),
    moves(
        "pad_negative",
        lambda x: lax.pad(x, x.dtype.type(2), ((1, -1, 0), (-1, -1, 1))),
        ("b, s",),
        ("pad",),
        grad=True,
        sizes=ATLEAST2,
    ),
    moves(
        "pad_to_double",
        lambda x: lax.pad(x, x.dtype.type(0.5), ((x.shape[0], x.shape[0], 0), (0, x.shape[1], 0))),
        ("b, s",),
        ("pad",),
        grad=True,
    ),
    moves(
        "pad_by_shrinking",
        lambda x: lax.pad(x, x.dtype.type(1), ((10 - x.shape[0], 0, 0),)),
        (Arg("s", "int32"),),
        ("pad",),
    ),
    moves(
        "pad_by_unknown_sign",
        lambda x: lax.pad(x, x.dtype.type(1), ((x.shape[0] - 3, 2, 1),)),
        (Arg("s", "int32"),),
        ("pad",),
    ),
    moves(
        "pad_to_static",
        lambda x: lax.pad(x, True, ((0, 10 - x.shape[0], 0),)),
        (Arg("s", "bool"),),
        ("pad",),
    ),
    moves(
        "pad_interior_by_size",
        lambda x: lax.pad(x, x[0], ((x.shape[0] - 2, 1, x.shape[0] - 1),)),
        ("s",),
        ("pad",),
    ),
    moves(
        "pad_left_to_static",
        lambda x: jnp.pad(x, ((0, 0), (10 - x.shape[1], 0))),
        ("b, s",),
        ("pad",),
        grad=True,
        constraints=("s <= 10",),
    ),
    moves("jnp_pad", lambda x: jnp.pad(x, ((1, 0), (0, 2)), constant_values=3), ("b, s",)),
    moves("jnp_pad_edge", lambda x: jnp.pad(x, ((0, 0), (1, 2)), mode="edge"), ("b, s",)),
    moves(
        "jnp_pad_reflect",
        lambda x: jnp.pad(x, ((0, 0), (1, 1)), mode="reflect"),
        ("b, s",),
        sizes=ATLEAST2,
        constraints=("s >= 2",),
    ),
    moves("jnp_pad_special", lambda x: jnp.pad(x, 1), ("b, s",), domains=("special",)),
]

DYNAMIC = [
    moves(
        "dynamic_slices",
        _dynamic_slices,
        ("b, s", START),
        ("dynamic_slice",),
        grad=True,
        sizes=ATLEAST2,
    ),
    moves(
        "dynamic_slice_of_static",
        lambda x, y, i: lax.dynamic_slice_in_dim(y, i, x.shape[0]),
        ("s", "20", Arg("", "int32", 5, 25)),
        ("dynamic_slice",),
        constraints=("s <= 20",),
    ),
    moves(
        "dynamic_slice_narrow_index",
        lambda x, i, j: lax.dynamic_slice(x, (jnp.uint8(i), jnp.uint8(j)), (1, 2)),
        ("b, s", START, START),
        sizes=ATLEAST2,
    ),
    moves("dynamic_slice_keys", lambda k, i: lax.dynamic_slice_in_dim(k, i, 1), (KEYS, START)),
    moves(
        "dynamic_update",
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)),
        ("b, s", "1, 2", START),
        ("dynamic_update_slice",),
        grad=True,
        sizes=ATLEAST2,
    ),
    moves(
        "dynamic_update_whole_axis",
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)),
        ("b, s", "1, s", START),
        ("dynamic_update_slice",),
        grad=True,
    ),
    moves(
        "dynamic_update_partial",
        lambda x, y, i: lax.dynamic_update_slice(x, y[:, 1:], (i, i)),
        ("b, s", "b, s", START),
        ("dynamic_update_slice",),
        grad=True,
    ),
    moves(
        "kv_cache",
        lambda cache, new, i: lax.dynamic_update_slice_in_dim(cache, new, i, axis=1),
        ("b, 12, 2", "b, s, 2", START),
        ("dynamic_update_slice",),
        grad=True,
        constraints=("s <= 12",),
    ),
    moves(
        "kv_cache_per_row",
        lambda cache, new, at: jax.vmap(
            lambda c, n, i: lax.dynamic_update_slice_in_dim(c, n, i, axis=0)
        )(cache, new, at),
        ("b, 12, 2", "b, s, 2", Arg("b", "int32", 0, 12)),
        ("scatter",),
        constraints=("s <= 12",),
    ),
    moves(
        "dynamic_update_keys",
        lambda k, j, i: lax.dynamic_update_slice_in_dim(k, j, i, axis=0),
        (KEYS, Arg("1", "key"), START),
    ),
]

ROLLS = [
    moves("roll", lambda x: jnp.roll(x, 2, 1), ("b, s",), grad=True),
    moves("roll_back", lambda x: jnp.roll(x, (-1, 3), (0, 1)), (Arg("b, s", "int32"),)),
    moves("roll_by_size", lambda x: jnp.roll(x, x.shape[1] // 2, 1), ("b, s",)),
    moves("roll_flat", lambda x: jnp.roll(x, 5), ("b, s",)),
    moves("roll_traced", lambda x, i: jnp.roll(x, i, 1), ("b, s", START), grad=True),
]

CASES = [*SLICES, *REVERSALS, *PADS, *DYNAMIC, *ROLLS]
