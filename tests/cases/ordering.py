"""Sorting, selection, and what users build from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, cases, family

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


TABLE = {
    "sort": sort(
        lambda x: [jnp.sort(x, axis=0), jnp.sort(x, axis=1), jnp.sort(x, axis=None)], domains=ALL
    ),
    "sort_gradient": sort(lambda x: jnp.sort(x, axis=1), grad=True),
    "sort_unstable": sort(lambda x: jnp.sort(x, stable=False), domains=ALL),
    "sort_descending": sort(
        lambda x: [jnp.sort(x, descending=True), jnp.argsort(x, descending=True)], domains=ALL
    ),
    **{
        f"sort_{dtype}": sort(
            lambda x: [jnp.sort(x, axis=1), jnp.argsort(x, axis=1), jnp.sort(x, axis=0)],
            f"{dtype}[b, s] {low}:{high}",
            domains=("mixed", "special") if "float" in dtype else ("mixed",),
        )
        for dtype, low, high in KEYS
    },
    "sort_complex_special": sort(
        lambda x: [jnp.sort(lax.complex(x, -x)), jnp.argsort(lax.complex(-x, x))],
        domains=("special",),
    ),
    "argsort_ties": sort(
        lambda x: [jnp.argsort(x, axis=0), jnp.argsort(x, axis=1)], Arg("b, s", make=_both_nans)
    ),
    "sort_two_keys": sort(
        lambda x, y, z: _sort_rows(x, y, z, num_keys=2),
        "int32[b, s] 0:2",
        Arg("b, s", make=_both_nans),
        "b, s",
    ),
    "sort_one_key_two_values": sort(
        lambda x, y, z: _sort_rows(x, y, z, dimension=0), "uint8[s, b] 254:256; s, b; bool[s, b]"
    ),
    "sort_all_keys_unstable": sort(
        lambda x, y: lax.sort((x, y), num_keys=2, is_stable=False),
        "int32[s] 0:2",
        Arg("s", make=_both_nans),
    ),
    "sort_key_val_gradient": sort(lambda x, y: lax.sort_key_val(x, y)[1], "b, s; b, s", grad=True),
    "sort_static_axis": sort(lambda x: jnp.sort(x, axis=1), "b, 5", grad=True),
    "sort_size_expression": sort(lambda x: jnp.sort(jnp.concatenate([x, 2 * x])), "s"),
    "lexsort": sort(lambda x, y: jnp.lexsort((x, y)), "int32[s] 0:3; int32[s] 0:2"),
    "ranks": case(lambda x: jnp.argsort(jnp.argsort(x, axis=1), axis=1), domains=ALL),
    "rank_average": case(lambda x: jax.scipy.stats.rankdata(x), "int32[s] 0:3"),
    "top_k": top_k(lambda x: lax.top_k(x, 3), domains=ALL),
    "top_k_gradient": top_k(lambda x: lax.top_k(x, 3)[0], grad=True),
    "top_k_ties": top_k(lambda x: lax.top_k(x, 3), Arg("b, s", make=_both_nans)),
    "top_k_all": case(
        lambda x: lax.top_k(x, x.shape[-1]), Arg("b, s", make=_both_nans), covers="top_k"
    ),
    "top_k_of_sizes": top_k(
        lambda x: [lax.top_k(x, x.shape[1] // 2), lax.top_k(x.T, x.shape[0])],
        sizes=({"b": 1, "s": 2}, {"b": 3, "s": 7}, {"b": 4, "s": 8}),
        constraints=("s >= 2",),
    ),
    "top_k_static_axis": smooth(lambda x: lax.top_k(x, 2), "b, 5", covers="top_k"),
    **{
        f"top_k_{dtype}": top_k(
            lambda x: lax.top_k(x, 3),
            f"{dtype}[b, s] {low}:{high}",
            domains=("mixed", "special") if "float" in dtype else ("mixed",),
        )
        for dtype, low, high in KEYS
        if dtype != "complex64"
    },
    "top_k_lowest_int": top_k(lambda x: lax.top_k(x, 3), "int8[b, s] -128:-126"),
    "approx_top_k": case(
        lambda x: [*lax.approx_max_k(x, 2), *lax.approx_min_k(x, 2, reduction_dimension=0)],
        covers="approx_top_k",
        sizes=({"b": 2, "s": 7}, {"b": 3, "s": 2}, {"b": 4, "s": 8}),
        constraints=("b >= 2", "s >= 2"),
    ),
    "approx_top_k_of_rows": case(
        lambda x: [lax.approx_max_k(x, 2), lax.approx_min_k(x, 2)], "b, 5", covers="approx_top_k"
    ),
    "median": case(lambda x: [jnp.median(x), jnp.median(x, 0), jnp.median(x, 1)], domains=ALL),
    "nanmedian": case(lambda x: [jnp.nanmedian(x, 1), jnp.nanmedian(x)], domains=ALL),
    "quantile": case(
        lambda x: [jnp.quantile(x, 0.3, axis=1), jnp.quantile(x, jnp.array([0.1, 0.9]), axis=0)],
        domains=ALL,
    ),
    "quantile_gradient": smooth(lambda x: jnp.quantile(x, 0.3, axis=1)),
    "quantile_methods": case(
        lambda x: [
            jnp.quantile(x, 0.4, axis=1, method=m)
            for m in ("lower", "higher", "nearest", "midpoint")
        ]
    ),
    "percentile": case(lambda x: jnp.percentile(x, 75, axis=0), "s, 2"),
    "nanquantile": case(lambda x: jnp.nanquantile(x, 0.6, axis=1), domains=ALL),
    **{
        f"searchsorted_{method}": case(
            lambda a, v, method=method: [
                jnp.searchsorted(a, v, side=side, method=method) for side in ("left", "right")
            ],
            Arg("5", make=_sorted_values),
            "b, s",
            domains=ALL,
        )
        for method in ("scan", "scan_unrolled", "compare_all")
    },
    "interp": case(
        lambda x, xp, fp: jnp.interp(x, xp, fp), "b, s", Arg("5", make=_sorted_values), "5"
    ),
    "partition": case(
        lambda x: [jnp.sort(jnp.partition(x, 2)[..., :2]), jnp.partition(x, 2)[..., 2]],
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    "partition_whole": case(
        lambda x: [jnp.partition(x, 2), jnp.argpartition(x, 2)],
        sizes=AT_LEAST_3,
        constraints=("s >= 3",),
    ),
    "unique": case(
        lambda x: jnp.unique(x, size=4, fill_value=-1, return_counts=True, return_inverse=True),
        "int32[s] 0:4",
    ),
    "unique_index": case(lambda x: jnp.unique(x, size=3, return_index=True), "int32[s] 0:3"),
    "nonzero_and_where": case(
        lambda x: [
            jnp.nonzero(x, size=5, fill_value=-1),
            jnp.where(x > 1, size=3),
            jnp.argwhere(x, size=4),
            jnp.flatnonzero(x, size=6),
        ],
        "int32[b, s] -1:3",
    ),
    "bincount": case(
        lambda x: [jnp.bincount(x, length=5), jnp.bincount(x, x * 0.5, length=5)], "int32[s] 0:6"
    ),
    "histogram_counts": case(
        lambda x: [jnp.histogram(x, bins=4), jnp.histogram(x, bins=4, range=(-1.0, 1.0))], "s"
    ),
    "histogram_of_edges": case(
        lambda x, w: jnp.histogram(x, bins=jnp.array([-1.0, 0.0, 0.5, 2.0]), weights=w), "s; s"
    ),
    "isin": case(lambda x, y: jnp.isin(x, y), "int32[s]; int32[b]"),
    "set_operations": case(
        lambda x, y: [
            jnp.intersect1d(x, y, size=3, fill_value=-9),
            jnp.union1d(x, y, size=5, fill_value=-9),
        ],
        "int32[s] 0:5; int32[b] 0:5",
    ),
    "top_p": case(lambda x: jnp.cumsum(jnp.sort(jax.nn.softmax(x), descending=True), -1) < 0.9),
    "argmax_by_sort": smooth(
        lambda x, i: jnp.take_along_axis(x, jnp.argsort(i, axis=1), axis=1), "b, s; b, s"
    ),
    **{
        f"searchsorted_in_open_{method}": case(
            lambda a, v, m=method: [
                jnp.searchsorted(jnp.sort(a), v, side=side, method=m) for side in ("left", "right")
            ],
            "s; b",
            domains=("mixed", "special"),
        )
        for method in ("scan", "compare_all", "sort")
    },
    "searchsorted_in_rows": case(
        lambda a, v: jax.vmap(jnp.searchsorted)(jnp.sort(a), v),
        "b, s; b, 3",
        domains=("mixed", "special"),
    ),
    "searchsorted_unsorted": case(lambda a, v: jnp.searchsorted(a, v), "s; b"),
    "interp_in_open": smooth(lambda x, a, b: jnp.interp(x, jnp.sort(a), b), "b; s; s"),
    "digitize_in_open": case(lambda x, a: jnp.digitize(x, jnp.sort(a)), "b; s"),
}
CASES = cases(TABLE)
