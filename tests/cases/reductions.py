"""Reductions, and what users build from them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, cases, family

case, smooth = family(), family(grad=True)
fold, total, product = family("reduce"), family("reduce_sum"), family("reduce_prod")
extremes, places = family("reduce_max reduce_min"), family("argmax argmin")
bitwise = family("reduce_and reduce_or reduce_xor")

ALL = ("mixed", "negative", "positive", "special")


def every_axis(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction over each axis of a matrix, and over both."""
    return lambda x: [fn(x, axis=0), fn(x, axis=1), fn(x)]


def _fold(x: Any, start: Any, fn: Callable[..., Any], *axes: int) -> Any:
    starts = jax.tree.map(lambda value, array: np.asarray(value, array.dtype), start, x)
    return lax.reduce(x, starts, fn, axes)


def _absolute_max(a: Any, b: Any) -> Any:
    """Associative, and no operation that the rules know."""
    return jnp.where(jnp.abs(a) >= jnp.abs(b), a, b)


def _first_and_sum(a: Any, b: Any) -> Any:
    """Two results; the order of the first matters, and 0 is not neutral for it."""
    return jnp.minimum(a[0], b[0]), a[1] + b[1]


def _affine(a: Any, b: Any) -> Any:
    """Composition of x -> m*x + c: associative, not commutative."""
    return a[0] * b[0], b[0] * a[1] + b[1]


TABLE = {
    "reduce_sum": total(every_axis(jnp.sum), grad=True),
    "reduce_sum_inner_static": total(lambda x: x.sum((0, 2)), "b, 3, s", grad=True),
    "reduce_sum_int": total(every_axis(jnp.sum), "int32[b, s]"),
    "reduce_sum_uint8": total(every_axis(jnp.sum), "uint8[b, s] 0:256"),
    "reduce_sum_bfloat16": total(every_axis(jnp.sum), "bfloat16[b, s]", rtol=3e-2, atol=3e-2),
    "reduce_sum_complex": total(every_axis(jnp.sum), "complex64[b, s]"),
    "reduce_sum_bool": total(every_axis(jnp.sum), "bool[b, s]"),
    "reduce_sum_special": total(every_axis(jnp.sum), domains=("special",)),
    "reduce_prod": product(every_axis(jnp.prod), rtol=1e-4),
    "reduce_prod_int": product(every_axis(jnp.prod), "int32[b, s] 1:4"),
    "reduce_prod_complex": case(every_axis(jnp.prod), "complex64[b, s]", rtol=1e-4),
    "reduce_max_min": extremes(
        lambda x: [every_axis(jnp.max)(x), every_axis(jnp.min)(x)], domains=ALL
    ),
    "reduce_min_of_infinity": case(
        lambda x: x.min(1),
        Arg("b, s", make=lambda x, rng: x + np.inf),
        covers="reduce_min",
        domains=("mixed",),
    ),
    "reduce_max_min_gradient": extremes(
        lambda x: [every_axis(jnp.max)(x), every_axis(jnp.min)(x)], grad=True
    ),
    **{
        f"reduce_max_min_{dtype}": extremes(
            lambda x: [every_axis(jnp.max)(x), every_axis(jnp.min)(x)],
            f"{dtype}[b, s] {low}:{high}",
            domains=ALL if dtype.startswith(("bf", "fl")) else ("mixed",),
        )
        for dtype, low, high in [
            *(("bfloat16", 0, 0), ("float16", 0, 0), ("float8_e4m3fn", 0, 0)),
            *(("float8_e5m2", 0, 0), ("int32", -50, 50), ("int8", -128, 128), ("uint8", 0, 256)),
            *(("uint32", 5, 50), ("bool", 0, 1)),
        ]
    },
    "reduce_max_min_complex": extremes(
        lambda z: [every_axis(jnp.max)(z), every_axis(jnp.min)(z)], "complex64[b, s]"
    ),
    "reduce_max_min_complex_nan": extremes(
        lambda x: [every_axis(jnp.max)(lax.complex(x, -x)), jnp.min(lax.complex(x, x))],
        domains=("special",),
    ),
    "reduce_and_or_bool": case(
        lambda x: [every_axis(jnp.all)(x), every_axis(jnp.any)(x)],
        "bool[b, s]",
        covers="reduce_and reduce_or",
    ),
    "reduce_bitwise": bitwise(
        lambda x: [lax.reduce_and(x, (0, 1)), lax.reduce_or(x, (1,)), lax.reduce_xor(x, (0,))],
        "uint32[b, s] 1:200",
    ),
    "reduce_bitwise_signed": bitwise(
        lambda x: [lax.reduce_and(x, (1,)), lax.reduce_or(x, (0,)), lax.reduce_xor(x, (0, 1))],
        "int32[b, s] -9:9",
    ),
    "reduce_xor_bool": case(lambda x: lax.reduce_xor(x, (1,)), "bool[b, s]"),
    "argmax_argmin": places(
        lambda x: [every_axis(jnp.argmax)(x), every_axis(jnp.argmin)(x)], domains=ALL
    ),
    **{
        f"argmax_argmin_{dtype}": places(
            lambda x: [jnp.argmax(x, 0), jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.argmin(x, 1)],
            f"{dtype}[b, s] {low}:{high}",
        )
        for dtype, low, high in [
            ("bfloat16", 0, 0),
            ("int32", -2, 3),
            ("uint8", 0, 2),
            ("bool", 0, 1),
            ("float8_e4m3fn", 0, 0),
        ]
    },
    "argmax_at_the_lowest_value": places(
        lambda x: [jnp.argmax(x - jnp.inf, 1), jnp.argmin(jnp.abs(x) + jnp.inf, 0)]
    ),
    "argmax_small_index": case(
        lambda x: lax.argmax(x, 0, jnp.int8),
        "n",
        covers="argmax",
        buckets={"n": 256},
        sizes=({"n": 100}, {"n": 127}),
    ),
    "reduce_known_function": fold(
        lambda x: [
            _fold(x, 2.0, lax.add, 0, 1),
            _fold(x, 0.5, lax.max, 1),
            _fold(x, 3.0, lax.mul, 0),
            _fold(x, -0.25, lambda a, b: jnp.minimum(b, a), 0, 1),
        ],
        rtol=1e-4,
    ),
    "reduce_own_function": fold(
        lambda x: [_fold(x, 0.0, _absolute_max, 0, 1), _fold(x, 7.0, _absolute_max, 1)]
    ),
    "reduce_not_neutral": fold(lambda x: _fold(x, 1, lambda a, b: a + b + 1, 0), "int32[b, s]"),
    "reduce_two_operands": fold(
        lambda x, y: _fold((x, y), (5, 0), _first_and_sum, 1), "b, s; int32[b, s]"
    ),
    "reduce_in_order": fold(
        lambda m, c: _fold((m, c), (1, 0), _affine, 0), "s, b; s, b", rtol=1e-4
    ),
    "reduce_static_axis": fold(lambda x: _fold(x, 0.0, _absolute_max, 1), "b, 3"),
    "mean": smooth(every_axis(jnp.mean), covers="reduce_sum dim_as_value"),
    "mean_int": case(every_axis(jnp.mean), "int32[b, s]"),
    "mean_where": smooth(
        lambda x, m: [
            jnp.mean(x, where=m, axis=1),
            jnp.sum(x, where=m),
            jnp.max(x, initial=-9, where=m),
        ],
        "b, s; bool[b, s]",
    ),
    "var_std": case(
        lambda x: [every_axis(jnp.var)(x), every_axis(jnp.std)(x), jnp.var(x, 1, ddof=0.5)],
        rtol=1e-4,
    ),
    "var_gradient": smooth(
        lambda x: [jnp.var(x, 1), jnp.var(x)], sizes=({"b": 3, "s": 5}, {"b": 4, "s": 8}), rtol=1e-4
    ),
    "var_ddof": case(
        lambda x: [jnp.var(x, 1, ddof=1), jnp.std(x, ddof=1)],
        sizes=({"b": 3, "s": 5}, {"b": 4, "s": 8}),
        constraints=("s >= 2",),
        rtol=1e-4,
    ),
    "average": smooth(lambda x, w: jnp.average(x, 1, jnp.abs(w) + 1), "b, s; b, s"),
    "ptp": smooth(every_axis(jnp.ptp)),
    "nan_reductions": case(
        lambda x: [
            every_axis(f)(x)
            for f in (jnp.nansum, jnp.nanmean, jnp.nanmax, jnp.nanmin, jnp.nanprod, jnp.nanstd)
        ],
        domains=("mixed", "special"),
        rtol=1e-4,
    ),
    "nan_arguments": case(
        lambda x: [jnp.nanargmax(x, 1), jnp.nanargmin(x)], domains=("mixed", "special")
    ),
    "count_nonzero": case(every_axis(jnp.count_nonzero), "int32[b, s] -1:2"),
    "logsumexp": case(every_axis(jax.nn.logsumexp), domains=ALL),
    "logsumexp_gradient": smooth(every_axis(jax.nn.logsumexp)),
    "softmax": smooth(
        lambda x: [jax.nn.softmax(x), jax.nn.log_softmax(x, 0), jax.nn.softmax(x, (0, 1))]
    ),
    "softmax_special": case(lambda x: [jax.nn.softmax(x), jax.nn.log_softmax(x)], domains=ALL),
    "softmax_where": case(lambda x, m: jax.nn.softmax(x, where=m), "b, s; bool[b, s]"),
    "layer_norm": smooth(
        lambda x, g: jax.nn.standardize(x, axis=-1) * g, "b, s, 4; 4", rtol=1e-4, atol=1e-4
    ),
    "standardize_open_axis": case(lambda x: jax.nn.standardize(x, axis=0), rtol=1e-3, atol=1e-4),
    "cross_entropy_of_one_hot": smooth(
        lambda x, y: -jnp.mean(jnp.sum(jax.nn.one_hot(y, 3) * jax.nn.log_softmax(x), -1)),
        "b, s, 3; int32[b, s] 0:3",
    ),
    "norms": case(
        lambda x: [
            *(jnp.linalg.norm(x), jnp.linalg.norm(x, axis=1), jnp.linalg.norm(x, 1, axis=0)),
            *(jnp.linalg.norm(x, jnp.inf, axis=1), jnp.linalg.norm(x, -jnp.inf, axis=1)),
            *(jnp.linalg.norm(x, 0, axis=1), jnp.linalg.norm(x, 3, axis=1)),
            *(jnp.linalg.norm(x, "fro"), jnp.linalg.norm(x, 1)),
        ],
        rtol=1e-4,
    ),
    "norm_gradient": smooth(lambda x: [jnp.linalg.norm(x, axis=1), jnp.linalg.norm(x)]),
    "prod": product(lambda x: x.prod(1), grad=True, rtol=1e-3),
    "prod_closed": product(lambda x: x.prod((1, 2)), "b, 3, 2", grad=True),
    "prod_of_two_axes": smooth(lambda x: x.prod((0, 2)), "b, 2, s", rtol=1e-2),
    "prod_hessian": case(lambda x: jax.hessian(jnp.prod)(x), "s", rtol=1e-3, atol=1e-3),
    "reduce_closed_gradient": fold(
        lambda x: lax.reduce(x, np.float32(2), lambda a, b: a + jnp.sin(b), (1,)), "b, 3", grad=True
    ),
    "reduce_of_nothing": fold(
        lambda x: [
            _fold(x[: x.shape[0] % 2], start, fn, 0)
            for start, fn in ((5, lax.add), (-3, lax.max), (-3, _absolute_max))
        ],
        "s, 2",
    ),
    "reduce_the_rest": fold(lambda x: _fold(x[x.shape[0] // 2 * 2 :], -3, _absolute_max, 0), "s"),
    "segment_reductions": case(
        lambda x, i: [
            jax.ops.segment_sum(x, i, 4),
            jax.ops.segment_max(x, i, 4),
            jax.ops.segment_prod(x, i, num_segments=4),
        ],
        "s, 2; int32[s] 0:4",
        covers="scatter-add",
        rtol=1e-4,
    ),
    "segment_sum_gradient": smooth(lambda x, i: jax.ops.segment_sum(x, i, 4), "s, 2; int32[s] 0:4"),
    "allclose": case(
        lambda x, y: [jnp.allclose(x, x), jnp.array_equal(x, y), jnp.array_equal(x, x)],
        "b, s; b, s",
    ),
    "vmapped": case(jax.vmap(lambda x: [jnp.sum(x), jnp.max(x), jnp.argmax(x)]), "b, s, 2"),
}
CASES = cases(TABLE)
