"""Sorting, selection, and what users build from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, family

ALL = ("mixed", "negative", "positive", "special")
AT_LEAST_3 = ({"b": 4, "s": 3}, {"b": 1, "s": 7}, {"b": 3, "s": 8})

case, smooth, sort = family(), family(grad=True), family("sort")
top_k = family("top_k", sizes=AT_LEAST_3, constraints=("s >= 3",))
KEYS = [
    *(("bfloat16", 0, 0), ("float16", 0, 0), ("float8_e4m3fn", 0, 0), ("float8_e4m3fnuz", 0, 0)),
    *(("float8_e5m2fnuz", 0, 0), ("int32", -3, 4), ("int8", 120, 128), ("uint8", 250, 256)),
    *(("bool", 0, 1), ("complex64", 0, 0)),
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
    sort(
        "sort",
        lambda x: [jnp.sort(x, axis=0), jnp.sort(x, axis=1), jnp.sort(x, axis=None)],
        domains=ALL,
    ),
    sort("sort_gradient", lambda x: jnp.sort(x, axis=1), grad=True),
    sort("sort_unstable", lambda x: jnp.sort(x, stable=False), domains=ALL),
    sort(
        "sort_descending",
        lambda x: [jnp.sort(x, descending=True), jnp.argsort(x, descending=True)],
        domains=ALL,
    ),
    *(
        sort(
            f"sort_{dtype}",
            lambda x: [jnp.sort(x, axis=1), jnp.argsort(x, axis=1), jnp.sort(x, axis=0)],
            f"{dtype}[b, s] {low}:{high}",
            domains=("mixed", "special") if "float" in dtype else ("mixed",),
        )
        for dtype, low, high in KEYS
    ),
    sort(
        "sort_complex_special",
        lambda x: [jnp.sort(lax.complex(x, -x)), jnp.argsort(lax.complex(-x, x))],
        domains=("special",),
    ),
    sort(
        "argsort_ties",
        lambda x: [jnp.argsort(x, axis=0), jnp.argsort(x, axis=1)],
        Arg("b, s", make=_both_nans),
    ),
    sort(
        "sort_two_keys",
        lambda x, y, z: _sort_rows(x, y, z, num_keys=2),
        "int32[b, s] 0:2",
        Arg("b, s", make=_both_nans),
        "b, s",
    ),
    sort(
        "sort_one_key_two_values",
        lambda x, y, z: _sort_rows(x, y, z, dimension=0),
        "uint8[s, b] 254:256; s, b; bool[s, b]",
    ),
    sort(
        "sort_all_keys_unstable",
        lambda x, y: lax.sort((x, y), num_keys=2, is_stable=False),
        "int32[s] 0:2",
        Arg("s", make=_both_nans),
    ),
    sort(
        "sort_key_value_gradient", lambda x, y: lax.sort_key_val(x, y)[1], "b, s; b, s", grad=True
    ),
    sort("sort_static_axis", lambda x: jnp.sort(x, axis=1), "b, 5", grad=True),
    sort("sort_size_expression", lambda x: jnp.sort(jnp.concatenate([x, 2 * x])), "s"),
    sort("lexsort", lambda x, y: jnp.lexsort((x, y)), "int32[s] 0:3; int32[s] 0:2"),
    case("ranks", lambda x: jnp.argsort(jnp.argsort(x, axis=1), axis=1), domains=ALL),
    case("rank_average", lambda x: jax.scipy.stats.rankdata(x), "int32[s] 0:3"),
    top_k(
        "top_k", lambda x: lax.top_k(x, 3), domains=ALL, sizes=AT_LEAST_3, constraints=("s >= 3",)
    ),
    top_k(
        "top_k_gradient",
        lambda x: lax.top_k(x, 3)[0],
        grad=True,
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    top_k(
        "top_k_ties",
        lambda x: lax.top_k(x, 3),
        Arg("b, s", make=_both_nans),
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    case(
        "top_k_all",
        lambda x: lax.top_k(x, x.shape[-1]),
        Arg("b, s", make=_both_nans),
        covers="top_k",
    ),
    top_k(
        "top_k_of_sizes",
        lambda x: [lax.top_k(x, x.shape[1] // 2), lax.top_k(x.T, x.shape[0])],
        sizes=({"b": 1, "s": 2}, {"b": 3, "s": 7}, {"b": 4, "s": 8}),
        constraints=("s >= 2",),
    ),
    smooth("top_k_static_axis", lambda x: lax.top_k(x, 2), "b, 5", covers="top_k"),
    *(
        top_k(
            f"top_k_{dtype}",
            lambda x: lax.top_k(x, 3),
            f"{dtype}[b, s] {low}:{high}",
            domains=("mixed", "special") if "float" in dtype else ("mixed",),
            sizes=AT_LEAST_3,
            constraints=("s >= 3",),
        )
        for dtype, low, high in KEYS
        if dtype != "complex64"
    ),
    top_k(
        "top_k_lowest_int",
        lambda x: lax.top_k(x, 3),
        "int8[b, s] -128:-126",
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    case(
        "approx_top_k",
        lambda x: [*lax.approx_max_k(x, 2), *lax.approx_min_k(x, 2, reduction_dimension=0)],
        covers="approx_top_k",
        sizes=({"b": 2, "s": 7}, {"b": 3, "s": 2}, {"b": 4, "s": 8}),
        constraints=("b >= 2", "s >= 2"),
    ),
    case(
        "approx_top_k_of_rows",
        lambda x: [lax.approx_max_k(x, 2), lax.approx_min_k(x, 2)],
        "b, 5",
        covers="approx_top_k",
    ),
    case("median", lambda x: [jnp.median(x), jnp.median(x, 0), jnp.median(x, 1)], domains=ALL),
    case("nanmedian", lambda x: [jnp.nanmedian(x, 1), jnp.nanmedian(x)], domains=ALL),
    case(
        "quantile",
        lambda x: [jnp.quantile(x, 0.3, axis=1), jnp.quantile(x, jnp.array([0.1, 0.9]), axis=0)],
        domains=ALL,
    ),
    smooth("quantile_gradient", lambda x: jnp.quantile(x, 0.3, axis=1)),
    case(
        "quantile_methods",
        lambda x: [
            jnp.quantile(x, 0.4, axis=1, method=m)
            for m in ("lower", "higher", "nearest", "midpoint")
        ],
    ),
    case("percentile", lambda x: jnp.percentile(x, 75, axis=0), "s, 2"),
    case("nanquantile", lambda x: jnp.nanquantile(x, 0.6, axis=1), domains=ALL),
    *(
        case(
            f"searchsorted_{method}",
            lambda a, v, method=method: [
                jnp.searchsorted(a, v, side=side, method=method) for side in ("left", "right")
            ],
            Arg("5", make=_sorted_values),
            "b, s",
            domains=ALL,
        )
        for method in ("scan", "scan_unrolled", "compare_all")
    ),
    case(
        "interp",
        lambda x, xp, fp: jnp.interp(x, xp, fp),
        "b, s",
        Arg("5", make=_sorted_values),
        "5",
    ),
    case(
        "partition",
        lambda x: [jnp.sort(jnp.partition(x, 2)[..., :2]), jnp.partition(x, 2)[..., 2]],
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    case(
        "partition_whole",
        lambda x: [jnp.partition(x, 2), jnp.argpartition(x, 2)],
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    case(
        "unique",
        lambda x: jnp.unique(x, size=4, fill_value=-1, return_counts=True, return_inverse=True),
        "int32[s] 0:4",
    ),
    case("unique_index", lambda x: jnp.unique(x, size=3, return_index=True), "int32[s] 0:3"),
    case(
        "nonzero_and_where",
        lambda x: [
            jnp.nonzero(x, size=5, fill_value=-1),
            jnp.where(x > 1, size=3),
            jnp.argwhere(x, size=4),
            jnp.flatnonzero(x, size=6),
        ],
        "int32[b, s] -1:3",
    ),
    case(
        "bincount",
        lambda x: [jnp.bincount(x, length=5), jnp.bincount(x, x * 0.5, length=5)],
        "int32[s] 0:6",
    ),
    case(
        "histogram_counts",
        lambda x: [jnp.histogram(x, bins=4), jnp.histogram(x, bins=4, range=(-1.0, 1.0))],
        "s",
    ),
    case(
        "histogram_of_edges",
        lambda x, w: jnp.histogram(x, bins=jnp.array([-1.0, 0.0, 0.5, 2.0]), weights=w),
        "s; s",
    ),
    case("isin", lambda x, y: jnp.isin(x, y), "int32[s]; int32[b]"),
    case(
        "set_operations",
        lambda x, y: [
            jnp.intersect1d(x, y, size=3, fill_value=-9),
            jnp.union1d(x, y, size=5, fill_value=-9),
        ],
        "int32[s] 0:5; int32[b] 0:5",
    ),
    case(
        "top_p_mask", lambda x: jnp.cumsum(jnp.sort(jax.nn.softmax(x), descending=True), -1) < 0.9
    ),
    smooth(
        "argmax_by_sort",
        lambda x, i: jnp.take_along_axis(x, jnp.argsort(i, axis=1), axis=1),
        "b, s; b, s",
    ),
    *(
        case(
            f"searchsorted_in_open_{method}",
            lambda a, v, m=method: [
                jnp.searchsorted(jnp.sort(a), v, side=side, method=m) for side in ("left", "right")
            ],
            "s; b",
            domains=("mixed", "special"),
        )
        for method in ("scan", "compare_all", "sort")
    ),
    case(
        "searchsorted_in_rows",
        lambda a, v: jax.vmap(jnp.searchsorted)(jnp.sort(a), v),
        "b, s; b, 3",
        domains=("mixed", "special"),
    ),
    case("searchsorted_unsorted", lambda a, v: jnp.searchsorted(a, v), "s; b"),
    smooth("interp_in_open", lambda x, a, b: jnp.interp(x, jnp.sort(a), b), "b; s; s"),
    case("digitize_in_open", lambda x, a: jnp.digitize(x, jnp.sort(a)), "b; s"),
]
