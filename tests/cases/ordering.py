"""Sorting, selection, and what users build from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, Case

ALL = ("mixed", "negative", "positive", "special")
AT_LEAST_3 = ({"b": 4, "s": 3}, {"b": 1, "s": 7}, {"b": 3, "s": 8})
KEYS = [
    ("bfloat16", 0, 0),
    ("float16", 0, 0),
    ("float8_e4m3fn", 0, 0),
    ("float8_e4m3fnuz", 0, 0),
    ("float8_e5m2fnuz", 0, 0),
    ("int32", -3, 4),
    ("int8", 120, 128),
    ("uint8", 250, 256),
    ("bool", 0, 1),
    ("complex64", 0, 0),
]


def _sorted_values(x: Any, rng: np.random.Generator) -> Any:
    return np.sort(x, axis=-1)


def _both_nans(x: Any, rng: np.random.Generator) -> Any:
    """NaNs of both signs, both infinities and both zeros among few other values."""
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0], x.dtype)
    return special[rng.integers(0, len(special), x.shape)]


def _sort_rows(*operands: Any, num_keys: int = 1, dimension: int = -1) -> Any:
    return lax.sort(operands, num_keys=num_keys, dimension=dimension)


CASES = [
    Case(
        "sort",
        lambda x: [jnp.sort(x, axis=0), jnp.sort(x, axis=1), jnp.sort(x, axis=None)],
        ("b, s",),
        ("sort",),
        domains=ALL,
    ),
    Case("sort_gradient", lambda x: jnp.sort(x, axis=1), ("b, s",), ("sort",), grad=True),
    Case("sort_unstable", lambda x: jnp.sort(x, stable=False), ("b, s",), ("sort",), domains=ALL),
    Case(
        "sort_descending",
        lambda x: [jnp.sort(x, descending=True), jnp.argsort(x, descending=True)],
        ("b, s",),
        ("sort",),
        domains=ALL,
    ),
    *(
        Case(
            f"sort_{dtype}",
            lambda x: [jnp.sort(x, axis=1), jnp.argsort(x, axis=1), jnp.sort(x, axis=0)],
            (Arg("b, s", dtype, low, high),),
            ("sort",),
            domains=("mixed", "special") if "float" in dtype else ("mixed",),
        )
        for dtype, low, high in KEYS
    ),
    Case(
        "sort_complex_special",
        lambda x: [jnp.sort(lax.complex(x, -x)), jnp.argsort(lax.complex(-x, x))],
        ("b, s",),
        ("sort",),
        domains=("special",),
    ),
    Case(
        "argsort_ties",
        lambda x: [jnp.argsort(x, axis=0), jnp.argsort(x, axis=1)],
        (Arg("b, s", make=_both_nans),),
        ("sort",),
    ),
    Case(
        "sort_two_keys",
        lambda x, y, z: _sort_rows(x, y, z, num_keys=2),
        (Arg("b, s", "int32", 0, 2), Arg("b, s", make=_both_nans), "b, s"),
        ("sort",),
    ),
    Case(
        "sort_one_key_two_values",
        lambda x, y, z: _sort_rows(x, y, z, dimension=0),
        (Arg("s, b", "uint8", 254, 256), "s, b", Arg("s, b", "bool")),
        ("sort",),
    ),
    Case(
        "sort_all_keys_unstable",
        lambda x, y: lax.sort((x, y), num_keys=2, is_stable=False),
        (Arg("s", "int32", 0, 2), Arg("s", make=_both_nans)),
        ("sort",),
    ),
    Case(
        "sort_key_value_gradient",
        lambda x, y: lax.sort_key_val(x, y)[1],
        ("b, s", "b, s"),
        ("sort",),
        grad=True,
    ),
    Case("sort_static_axis", lambda x: jnp.sort(x, axis=1), ("b, 5",), ("sort",), grad=True),
    Case(
        "sort_size_expression", lambda x: jnp.sort(jnp.concatenate([x, 2 * x])), ("s",), ("sort",)
    ),
    Case(
        "lexsort",
        lambda x, y: jnp.lexsort((x, y)),
        (Arg("s", "int32", 0, 3), Arg("s", "int32", 0, 2)),
        ("sort",),
    ),
    Case("ranks", lambda x: jnp.argsort(jnp.argsort(x, axis=1), axis=1), ("b, s",), domains=ALL),
    Case(
        "rank_average",
        lambda x: jax.scipy.stats.rankdata(x),
        (Arg("s", "int32", 0, 3),),
    ),
    Case(
        "top_k",
        lambda x: lax.top_k(x, 3),
        ("b, s",),
        ("top_k",),
        domains=ALL,
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    Case(
        "top_k_gradient",
        lambda x: lax.top_k(x, 3)[0],
        ("b, s",),
        ("top_k",),
        grad=True,
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    Case(
        "top_k_ties",
        lambda x: lax.top_k(x, 3),
        (Arg("b, s", make=_both_nans),),
        ("top_k",),
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    Case(
        "top_k_all",
        lambda x: lax.top_k(x, x.shape[-1]),
        (Arg("b, s", make=_both_nans),),
        ("top_k",),
    ),
    Case(
        "top_k_of_sizes",
        lambda x: [lax.top_k(x, x.shape[1] // 2), lax.top_k(x.T, x.shape[0])],
        ("b, s",),
        ("top_k",),
        sizes=({"b": 1, "s": 2}, {"b": 3, "s": 7}, {"b": 4, "s": 8}),
        constraints=("s >= 2",),
    ),
    Case("top_k_static_axis", lambda x: lax.top_k(x, 2), ("b, 5",), ("top_k",), grad=True),
    *(
        Case(
            f"top_k_{dtype}",
            lambda x: lax.top_k(x, 3),
            (Arg("b, s", dtype, low, high),),
            ("top_k",),
            domains=("mixed", "special") if "float" in dtype else ("mixed",),
            sizes=AT_LEAST_3,
            constraints=("s >= 3",),
        )
        for dtype, low, high in KEYS
        if dtype != "complex64"
    ),
    Case(
        "top_k_lowest_int",
        lambda x: lax.top_k(x, 3),
        (Arg("b, s", "int8", -128, -126),),
        ("top_k",),
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    Case(
        "approx_top_k",
        lambda x: [*lax.approx_max_k(x, 2), *lax.approx_min_k(x, 2, reduction_dimension=0)],
        ("b, s",),
        ("approx_top_k",),
        sizes=({"b": 2, "s": 7}, {"b": 3, "s": 2}, {"b": 4, "s": 8}),
        constraints=("b >= 2", "s >= 2"),
    ),
    Case(
        "approx_top_k_of_rows",
        lambda x: [lax.approx_max_k(x, 2), lax.approx_min_k(x, 2)],
        ("b, 5",),
        ("approx_top_k",),
    ),
    Case(
        "median",
        lambda x: [jnp.median(x), jnp.median(x, 0), jnp.median(x, 1)],
        ("b, s",),
        domains=ALL,
    ),
    Case("nanmedian", lambda x: [jnp.nanmedian(x, 1), jnp.nanmedian(x)], ("b, s",), domains=ALL),
    Case(
        "quantile",
        lambda x: [jnp.quantile(x, 0.3, axis=1), jnp.quantile(x, jnp.array([0.1, 0.9]), axis=0)],
        ("b, s",),
        domains=ALL,
    ),
    Case("quantile_gradient", lambda x: jnp.quantile(x, 0.3, axis=1), ("b, s",), grad=True),
    Case(
        "quantile_methods",
        lambda x: [
            jnp.quantile(x, 0.4, axis=1, method=m)
            for m in ("lower", "higher", "nearest", "midpoint")
        ],
        ("b, s",),
    ),
    Case("percentile", lambda x: jnp.percentile(x, 75, axis=0), ("s, 2",)),
    Case("nanquantile", lambda x: jnp.nanquantile(x, 0.6, axis=1), ("b, s",), domains=ALL),
    *(
        Case(
            f"searchsorted_{method}",
            lambda a, v, method=method: [
                jnp.searchsorted(a, v, side=side, method=method) for side in ("left", "right")
            ],
            (Arg("5", make=_sorted_values), "b, s"),
            domains=ALL,
        )
        for method in ("scan", "scan_unrolled", "compare_all")
    ),
    Case(
        "interp",
        lambda x, xp, fp: jnp.interp(x, xp, fp),
        ("b, s", Arg("5", make=_sorted_values), "5"),
    ),
    Case(
        "partition",
        lambda x: [jnp.sort(jnp.partition(x, 2)[..., :2]), jnp.partition(x, 2)[..., 2]],
        ("b, s",),
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    Case(
        "partition_whole",
        lambda x: [jnp.partition(x, 2), jnp.argpartition(x, 2)],
        ("b, s",),
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    Case(
        "unique",
        lambda x: jnp.unique(x, size=4, fill_value=-1, return_counts=True, return_inverse=True),
        (Arg("s", "int32", 0, 4),),
    ),
    Case(
        "unique_index",
        lambda x: jnp.unique(x, size=3, return_index=True),
        (Arg("s", "int32", 0, 3),),
    ),
    Case(
        "nonzero_and_where",
        lambda x: [
            jnp.nonzero(x, size=5, fill_value=-1),
            jnp.where(x > 1, size=3),
            jnp.argwhere(x, size=4),
            jnp.flatnonzero(x, size=6),
        ],
        (Arg("b, s", "int32", -1, 3),),
    ),
    Case(
        "bincount",
        lambda x: [jnp.bincount(x, length=5), jnp.bincount(x, x * 0.5, length=5)],
        (Arg("s", "int32", 0, 6),),
    ),
    Case(
        "histogram_counts",
        lambda x: [jnp.histogram(x, bins=4), jnp.histogram(x, bins=4, range=(-1.0, 1.0))],
        ("s",),
    ),
    Case(
        "histogram_of_edges",
        lambda x, w: jnp.histogram(x, bins=jnp.array([-1.0, 0.0, 0.5, 2.0]), weights=w),
        ("s", "s"),
    ),
    Case("isin", lambda x, y: jnp.isin(x, y), (Arg("s", "int32"), Arg("b", "int32"))),
    Case(
        "set_operations",
        lambda x, y: [
            jnp.intersect1d(x, y, size=3, fill_value=-9),
            jnp.union1d(x, y, size=5, fill_value=-9),
        ],
        (Arg("s", "int32", 0, 5), Arg("b", "int32", 0, 5)),
    ),
    Case(
        "top_p_mask",
        lambda x: jnp.cumsum(jnp.sort(jax.nn.softmax(x), descending=True), -1) < 0.9,
        ("b, s",),
    ),
    Case(
        "argmax_by_sort",
        lambda x, i: jnp.take_along_axis(x, jnp.argsort(i, axis=1), axis=1),
        ("b, s", "b, s"),
        grad=True,
    ),
    *(
        Case(
            f"searchsorted_in_open_{method}",
            lambda a, v, m=method: [
                jnp.searchsorted(jnp.sort(a), v, side=side, method=m) for side in ("left", "right")
            ],
            ("s", "b"),
            domains=("mixed", "special"),
        )
        for method in ("scan", "compare_all", "sort")
    ),
    Case(
        "searchsorted_in_rows",
        lambda a, v: jax.vmap(jnp.searchsorted)(jnp.sort(a), v),
        ("b, s", "b, 3"),
        domains=("mixed", "special"),
    ),
    Case("searchsorted_unsorted", lambda a, v: jnp.searchsorted(a, v), ("s", "b")),
    Case(
        "interp_in_open",
        lambda x, a, b: jnp.interp(x, jnp.sort(a), b),
        ("b", "s", "s"),
        grad=True,
    ),
    Case("digitize_in_open", lambda x, a: jnp.digitize(x, jnp.sort(a)), ("b", "s")),
]
