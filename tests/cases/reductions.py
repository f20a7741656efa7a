"""Reductions, and what users build from them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, family

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


CASES = [
    total("reduce_sum", every_axis(jnp.sum), grad=True),
    total("reduce_sum_inner_static", lambda x: x.sum((0, 2)), "b, 3, s", grad=True),
    total("reduce_sum_int", every_axis(jnp.sum), "int32[b, s]"),
    total("reduce_sum_uint8", every_axis(jnp.sum), "uint8[b, s] 0:256"),
    total("reduce_sum_bfloat16", every_axis(jnp.sum), "bfloat16[b, s]", rtol=3e-2, atol=3e-2),
    total("reduce_sum_complex", every_axis(jnp.sum), "complex64[b, s]"),
    total("reduce_sum_bool", every_axis(jnp.sum), "bool[b, s]"),
    total("reduce_sum_special", every_axis(jnp.sum), domains=("special",)),
    product("reduce_prod", every_axis(jnp.prod), rtol=1e-4),
    product("reduce_prod_int", every_axis(jnp.prod), "int32[b, s] 1:4"),
    case("reduce_prod_complex", every_axis(jnp.prod), "complex64[b, s]", rtol=1e-4),
    extremes(
        "reduce_max_min", lambda x: [every_axis(jnp.max)(x), every_axis(jnp.min)(x)], domains=ALL
    ),
    case(
        "reduce_min_of_infinity",
        lambda x: x.min(1),
        Arg("b, s", make=lambda x, rng: x + np.inf),
        covers="reduce_min",
        domains=("mixed",),
    ),
    extremes(
        "reduce_max_min_gradient",
        lambda x: [every_axis(jnp.max)(x), every_axis(jnp.min)(x)],
        grad=True,
    ),
    *(
        extremes(
            f"reduce_max_min_{dtype}",
            lambda x: [every_axis(jnp.max)(x), every_axis(jnp.min)(x)],
            f"{dtype}[b, s] {low}:{high}",
            domains=ALL if dtype.startswith(("bf", "fl")) else ("mixed",),
        )
        for dtype, low, high in [
            *(("bfloat16", 0, 0), ("float16", 0, 0), ("float8_e4m3fn", 0, 0)),
            *(("float8_e5m2", 0, 0), ("int32", -50, 50), ("int8", -128, 128), ("uint8", 0, 256)),
            *(("uint32", 5, 50), ("bool", 0, 1)),
        ]
    ),
    extremes(
        "reduce_max_min_complex",
        lambda z: [every_axis(jnp.max)(z), every_axis(jnp.min)(z)],
        "complex64[b, s]",
    ),
    extremes(
        "reduce_max_min_complex_nan",
        lambda x: [every_axis(jnp.max)(lax.complex(x, -x)), jnp.min(lax.complex(x, x))],
        domains=("special",),
    ),
    case(
        "reduce_and_or_bool",
        lambda x: [every_axis(jnp.all)(x), every_axis(jnp.any)(x)],
        "bool[b, s]",
        covers="reduce_and reduce_or",
    ),
    bitwise(
        "reduce_bitwise",
        lambda x: [lax.reduce_and(x, (0, 1)), lax.reduce_or(x, (1,)), lax.reduce_xor(x, (0,))],
        "uint32[b, s] 1:200",
    ),
    bitwise(
        "reduce_bitwise_signed",
        lambda x: [lax.reduce_and(x, (1,)), lax.reduce_or(x, (0,)), lax.reduce_xor(x, (0, 1))],
        "int32[b, s] -9:9",
    ),
    case("reduce_xor_bool", lambda x: lax.reduce_xor(x, (1,)), "bool[b, s]"),
    places(
        "argmax_argmin",
        lambda x: [every_axis(jnp.argmax)(x), every_axis(jnp.argmin)(x)],
        domains=ALL,
    ),
    *(
        places(
            f"argmax_argmin_{dtype}",
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
    ),
    places(
        "argmax_at_the_lowest_value",
        lambda x: [jnp.argmax(x - jnp.inf, 1), jnp.argmin(jnp.abs(x) + jnp.inf, 0)],
    ),
    case(
        "argmax_small_index",
        lambda x: lax.argmax(x, 0, jnp.int8),
        "n",
        covers="argmax",
        buckets={"n": 256},
        sizes=({"n": 100}, {"n": 127}),
    ),
    fold(
        "reduce_known_function",
        lambda x: [
            _fold(x, 2.0, lax.add, 0, 1),
            _fold(x, 0.5, lax.max, 1),
            _fold(x, 3.0, lax.mul, 0),
            _fold(x, -0.25, lambda a, b: jnp.minimum(b, a), 0, 1),
        ],
        rtol=1e-4,
    ),
    fold(
        "reduce_own_function",
        lambda x: [_fold(x, 0.0, _absolute_max, 0, 1), _fold(x, 7.0, _absolute_max, 1)],
    ),
    fold(
        "reduce_start_not_neutral", lambda x: _fold(x, 1, lambda a, b: a + b + 1, 0), "int32[b, s]"
    ),
    fold(
        "reduce_two_operands",
        lambda x, y: _fold((x, y), (5, 0), _first_and_sum, 1),
        "b, s; int32[b, s]",
    ),
    fold(
        "reduce_in_order", lambda m, c: _fold((m, c), (1, 0), _affine, 0), "s, b; s, b", rtol=1e-4
    ),
    fold("reduce_static_axis", lambda x: _fold(x, 0.0, _absolute_max, 1), "b, 3"),
    smooth("mean", every_axis(jnp.mean), covers="reduce_sum dim_as_value"),
    case("mean_int", every_axis(jnp.mean), "int32[b, s]"),
    smooth(
        "mean_where",
        lambda x, m: [
            jnp.mean(x, where=m, axis=1),
            jnp.sum(x, where=m),
            jnp.max(x, initial=-9, where=m),
        ],
        "b, s; bool[b, s]",
    ),
    case(
        "var_std",
        lambda x: [every_axis(jnp.var)(x), every_axis(jnp.std)(x), jnp.var(x, 1, ddof=0.5)],
        rtol=1e-4,
    ),
    smooth(
        "var_gradient",
        lambda x: [jnp.var(x, 1), jnp.var(x)],
        sizes=({"b": 3, "s": 5}, {"b": 4, "s": 8}),
        rtol=1e-4,
    ),
    case(
        "var_ddof",
        lambda x: [jnp.var(x, 1, ddof=1), jnp.std(x, ddof=1)],
        sizes=({"b": 3, "s": 5}, {"b": 4, "s": 8}),
        constraints=("s >= 2",),
        rtol=1e-4,
    ),
    smooth("average", lambda x, w: jnp.average(x, 1, jnp.abs(w) + 1), "b, s; b, s"),
    smooth("ptp", every_axis(jnp.ptp)),
    case(
        "nan_reductions",
        lambda x: [
            every_axis(f)(x)
            for f in (jnp.nansum, jnp.nanmean, jnp.nanmax, jnp.nanmin, jnp.nanprod, jnp.nanstd)
        ],
        domains=("mixed", "special"),
        rtol=1e-4,
    ),
    case(
        "nan_arguments",
        lambda x: [jnp.nanargmax(x, 1), jnp.nanargmin(x)],
        domains=("mixed", "special"),
    ),
    case("count_nonzero", every_axis(jnp.count_nonzero), "int32[b, s] -1:2"),
    case("logsumexp", every_axis(jax.nn.logsumexp), domains=ALL),
    smooth("logsumexp_gradient", every_axis(jax.nn.logsumexp)),
    smooth(
        "softmax",
        lambda x: [jax.nn.softmax(x), jax.nn.log_softmax(x, 0), jax.nn.softmax(x, (0, 1))],
    ),
    case("softmax_special", lambda x: [jax.nn.softmax(x), jax.nn.log_softmax(x)], domains=ALL),
    case("softmax_where", lambda x, m: jax.nn.softmax(x, where=m), "b, s; bool[b, s]"),
    smooth(
        "layer_norm",
        lambda x, g: jax.nn.standardize(x, axis=-1) * g,
        "b, s, 4; 4",
        rtol=1e-4,
        atol=1e-4,
    ),
    case(
        "standardize_over_open_axis", lambda x: jax.nn.standardize(x, axis=0), rtol=1e-3, atol=1e-4
    ),
    smooth(
        "cross_entropy_of_one_hot",
        lambda x, y: -jnp.mean(jnp.sum(jax.nn.one_hot(y, 3) * jax.nn.log_softmax(x), -1)),
        "b, s, 3; int32[b, s] 0:3",
    ),
    case(
        "norms",
        lambda x: [
            *(jnp.linalg.norm(x), jnp.linalg.norm(x, axis=1), jnp.linalg.norm(x, 1, axis=0)),
            *(jnp.linalg.norm(x, jnp.inf, axis=1), jnp.linalg.norm(x, -jnp.inf, axis=1)),
            *(jnp.linalg.norm(x, 0, axis=1), jnp.linalg.norm(x, 3, axis=1)),
            *(jnp.linalg.norm(x, "fro"), jnp.linalg.norm(x, 1)),
        ],
        rtol=1e-4,
    ),
    smooth("norm_gradient", lambda x: [jnp.linalg.norm(x, axis=1), jnp.linalg.norm(x)]),
    product("prod", lambda x: x.prod(1), grad=True, rtol=1e-3),
    product("prod_closed", lambda x: x.prod((1, 2)), "b, 3, 2", grad=True),
    smooth("prod_of_two_axes", lambda x: x.prod((0, 2)), "b, 2, s", rtol=1e-2),
    case("prod_hessian", lambda x: jax.hessian(jnp.prod)(x), "s", rtol=1e-3, atol=1e-3),
    fold(
        "reduce_closed_gradient",
        lambda x: lax.reduce(x, np.float32(2), lambda a, b: a + jnp.sin(b), (1,)),
        "b, 3",
        grad=True,
    ),
    fold(
        "reduce_of_nothing",
        lambda x: [
            _fold(x[: x.shape[0] % 2], start, fn, 0)
            for start, fn in ((5, lax.add), (-3, lax.max), (-3, _absolute_max))
        ],
        "s, 2",
    ),
    fold("reduce_the_rest", lambda x: _fold(x[x.shape[0] // 2 * 2 :], -3, _absolute_max, 0), "s"),
    case(
        "segment_reductions",
        lambda x, i: [
            jax.ops.segment_sum(x, i, 4),
            jax.ops.segment_max(x, i, 4),
            jax.ops.segment_prod(x, i, num_segments=4),
        ],
        "s, 2; int32[s] 0:4",
        covers="scatter-add",
        rtol=1e-4,
    ),
    smooth("segment_sum_gradient", lambda x, i: jax.ops.segment_sum(x, i, 4), "s, 2; int32[s] 0:4"),
    case(
        "allclose",
        lambda x, y: [jnp.allclose(x, x), jnp.array_equal(x, y), jnp.array_equal(x, x)],
        "b, s; b, s",
    ),
    case("vmapped", jax.vmap(lambda x: [jnp.sum(x), jnp.max(x), jnp.argmax(x)]), "b, s, 2"),
]
