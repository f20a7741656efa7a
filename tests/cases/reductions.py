"""Reductions, and what users build from them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, Case

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
    Case("reduce_sum", every_axis(jnp.sum), ("b, s",), ("reduce_sum",), grad=True),
    Case(
        "reduce_sum_inner_static", lambda x: x.sum((0, 2)), ("b, 3, s",), ("reduce_sum",), grad=True
    ),
    Case(
        "reduce_sum_int",
        every_axis(jnp.sum),
        (Arg("b, s", "int32"),),
        ("reduce_sum",),
    ),
    Case("reduce_sum_uint8", every_axis(jnp.sum), (Arg("b, s", "uint8", 0, 256),), ("reduce_sum",)),
    Case(
        "reduce_sum_bfloat16",
        every_axis(jnp.sum),
        (Arg("b, s", "bfloat16"),),
        ("reduce_sum",),
        rtol=3e-2,
        atol=3e-2,
    ),
    Case("reduce_sum_complex", every_axis(jnp.sum), (Arg("b, s", "complex64"),), ("reduce_sum",)),
    Case("reduce_sum_bool", every_axis(jnp.sum), (Arg("b, s", "bool"),), ("reduce_sum",)),
    Case(
        "reduce_sum_special", every_axis(jnp.sum), ("b, s",), ("reduce_sum",), domains=("special",)
    ),
    Case("reduce_prod", every_axis(jnp.prod), ("b, s",), ("reduce_prod",), rtol=1e-4),
    Case("reduce_prod_int", every_axis(jnp.prod), (Arg("b, s", "int32", 1, 4),), ("reduce_prod",)),
    Case("reduce_prod_complex", every_axis(jnp.prod), (Arg("b, s", "complex64"),), rtol=1e-4),
    Case(
        "reduce_max_min",
        lambda x: [every_axis(jnp.max)(x), every_axis(jnp.min)(x)],
        ("b, s",),
        ("reduce_max", "reduce_min"),
        domains=ALL,
    ),
    Case(
        "reduce_min_of_infinity",
        lambda x: x.min(1),
        (Arg("b, s", make=lambda x, rng: x + np.inf),),
        ("reduce_min",),
        domains=("mixed",),
    ),
    Case(
        "reduce_max_min_gradient",
        lambda x: [every_axis(jnp.max)(x), every_axis(jnp.min)(x)],
        ("b, s",),
        ("reduce_max", "reduce_min"),
        grad=True,
    ),
    *(
        Case(
            f"reduce_max_min_{dtype}",
            lambda x: [every_axis(jnp.max)(x), every_axis(jnp.min)(x)],
            (Arg("b, s", dtype, low, high),),
            ("reduce_max", "reduce_min"),
            domains=ALL if dtype.startswith(("bf", "fl")) else ("mixed",),
        )
        for dtype, low, high in [
            ("bfloat16", 0, 0),
            ("float16", 0, 0),
            ("float8_e4m3fn", 0, 0),
            ("float8_e5m2", 0, 0),
            ("int32", -50, 50),
            ("int8", -128, 128),
            ("uint8", 0, 256),
            ("uint32", 5, 50),
            ("bool", 0, 1),
        ]
    ),
    Case(
        "reduce_max_min_complex",
        lambda z: [every_axis(jnp.max)(z), every_axis(jnp.min)(z)],
        (Arg("b, s", "complex64"),),
        ("reduce_max", "reduce_min"),
    ),
    Case(
        "reduce_max_min_complex_nan",
        lambda x: [every_axis(jnp.max)(lax.complex(x, -x)), jnp.min(lax.complex(x, x))],
        ("b, s",),
        ("reduce_max", "reduce_min"),
        domains=("special",),
    ),
    Case(
        "reduce_and_or_bool",
        lambda x: [every_axis(jnp.all)(x), every_axis(jnp.any)(x)],
        (Arg("b, s", "bool"),),
        ("reduce_and", "reduce_or"),
    ),
    Case(
        "reduce_bitwise",
        lambda x: [
            lax.reduce_and(x, (0, 1)),
            lax.reduce_or(x, (1,)),
            lax.reduce_xor(x, (0,)),
        ],
        (Arg("b, s", "uint32", 1, 200),),
        ("reduce_and", "reduce_or", "reduce_xor"),
    ),
    Case(
        "reduce_bitwise_signed",
        lambda x: [lax.reduce_and(x, (1,)), lax.reduce_or(x, (0,)), lax.reduce_xor(x, (0, 1))],
        (Arg("b, s", "int32", -9, 9),),
        ("reduce_and", "reduce_or", "reduce_xor"),
    ),
    Case("reduce_xor_bool", lambda x: lax.reduce_xor(x, (1,)), (Arg("b, s", "bool"),)),
    Case(
        "argmax_argmin",
        lambda x: [every_axis(jnp.argmax)(x), every_axis(jnp.argmin)(x)],
        ("b, s",),
        ("argmax", "argmin"),
        domains=ALL,
    ),
    *(
        Case(
            f"argmax_argmin_{dtype}",
            lambda x: [jnp.argmax(x, 0), jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.argmin(x, 1)],
            (Arg("b, s", dtype, low, high),),
            ("argmax", "argmin"),
        )
        for dtype, low, high in [
            ("bfloat16", 0, 0),
            ("int32", -2, 3),
            ("uint8", 0, 2),
            ("bool", 0, 1),
            ("float8_e4m3fn", 0, 0),
        ]
    ),
    Case(
        "argmax_at_the_lowest_value",
        lambda x: [jnp.argmax(x - jnp.inf, 1), jnp.argmin(jnp.abs(x) + jnp.inf, 0)],
        ("b, s",),
        ("argmax", "argmin"),
    ),
    Case(
        "argmax_small_index",
        lambda x: lax.argmax(x, 0, jnp.int8),
        ("n",),
        ("argmax",),
        buckets={"n": 256},
        sizes=({"n": 100}, {"n": 127}),
    ),
    Case(
        "reduce_known_function",
        lambda x: [
            _fold(x, 2.0, lax.add, 0, 1),
            _fold(x, 0.5, lax.max, 1),
            _fold(x, 3.0, lax.mul, 0),
            _fold(x, -0.25, lambda a, b: jnp.minimum(b, a), 0, 1),
        ],
        ("b, s",),
        ("reduce",),
        rtol=1e-4,
    ),
    Case(
        "reduce_own_function",
        lambda x: [_fold(x, 0.0, _absolute_max, 0, 1), _fold(x, 7.0, _absolute_max, 1)],
        ("b, s",),
        ("reduce",),
    ),
    Case(
        "reduce_start_not_neutral",
        lambda x: _fold(x, 1, lambda a, b: a + b + 1, 0),
        (Arg("b, s", "int32"),),
        ("reduce",),
    ),
    Case(
        "reduce_two_operands",
        lambda x, y: _fold((x, y), (5, 0), _first_and_sum, 1),
        ("b, s", Arg("b, s", "int32")),
        ("reduce",),
    ),
    Case(
        "reduce_in_order",
        lambda m, c: _fold((m, c), (1, 0), _affine, 0),
        ("s, b", "s, b"),
        ("reduce",),
        rtol=1e-4,
    ),
    Case("reduce_static_axis", lambda x: _fold(x, 0.0, _absolute_max, 1), ("b, 3",), ("reduce",)),
    Case("mean", every_axis(jnp.mean), ("b, s",), ("reduce_sum", "dim_as_value"), grad=True),
    Case("mean_int", every_axis(jnp.mean), (Arg("b, s", "int32"),)),
    Case(
        "mean_where",
        lambda x, m: [
            jnp.mean(x, where=m, axis=1),
            jnp.sum(x, where=m),
            jnp.max(x, initial=-9, where=m),
        ],
        ("b, s", Arg("b, s", "bool")),
        grad=True,
    ),
    Case(
        "var_std",
        lambda x: [every_axis(jnp.var)(x), every_axis(jnp.std)(x), jnp.var(x, 1, ddof=0.5)],
        ("b, s",),
        rtol=1e-4,
    ),
    Case(
        "var_gradient",
        lambda x: [jnp.var(x, 1), jnp.var(x)],
        ("b, s",),
        grad=True,
        sizes=({"b": 3, "s": 5}, {"b": 4, "s": 8}),
        rtol=1e-4,
    ),
    Case(
        "var_ddof",
        lambda x: [jnp.var(x, 1, ddof=1), jnp.std(x, ddof=1)],
        ("b, s",),
        sizes=({"b": 3, "s": 5}, {"b": 4, "s": 8}),
        constraints=("s >= 2",),
        rtol=1e-4,
    ),
    Case("average", lambda x, w: jnp.average(x, 1, jnp.abs(w) + 1), ("b, s", "b, s"), grad=True),
    Case("ptp", every_axis(jnp.ptp), ("b, s",), grad=True),
    Case(
        "nan_reductions",
        lambda x: [
            every_axis(f)(x)
            for f in (jnp.nansum, jnp.nanmean, jnp.nanmax, jnp.nanmin, jnp.nanprod, jnp.nanstd)
        ],
        ("b, s",),
        domains=("mixed", "special"),
        rtol=1e-4,
    ),
    Case(
        "nan_arguments",
        lambda x: [jnp.nanargmax(x, 1), jnp.nanargmin(x)],
        ("b, s",),
        domains=("mixed", "special"),
    ),
    Case("count_nonzero", every_axis(jnp.count_nonzero), (Arg("b, s", "int32", -1, 2),)),
    Case("logsumexp", every_axis(jax.nn.logsumexp), ("b, s",), domains=ALL),
    Case("logsumexp_gradient", every_axis(jax.nn.logsumexp), ("b, s",), grad=True),
    Case(
        "softmax",
        lambda x: [jax.nn.softmax(x), jax.nn.log_softmax(x, 0), jax.nn.softmax(x, (0, 1))],
        ("b, s",),
        grad=True,
    ),
    Case(
        "softmax_special",
        lambda x: [jax.nn.softmax(x), jax.nn.log_softmax(x)],
        ("b, s",),
        domains=ALL,
    ),
    Case(
        "softmax_where",
        lambda x, m: jax.nn.softmax(x, where=m),
        ("b, s", Arg("b, s", "bool")),
    ),
    Case(
        "layer_norm",
        lambda x, g: jax.nn.standardize(x, axis=-1) * g,
        ("b, s, 4", "4"),
        grad=True,
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "standardize_over_open_axis",
        lambda x: jax.nn.standardize(x, axis=0),
        ("b, s",),
        rtol=1e-3,
        atol=1e-4,
    ),
    Case(
        "cross_entropy_of_one_hot",
        lambda x, y: -jnp.mean(jnp.sum(jax.nn.one_hot(y, 3) * jax.nn.log_softmax(x), -1)),
        ("b, s, 3", Arg("b, s", "int32", 0, 3)),
        grad=True,
    ),
    Case(
        "norms",
        lambda x: [
            jnp.linalg.norm(x),
            jnp.linalg.norm(x, axis=1),
            jnp.linalg.norm(x, 1, axis=0),
            jnp.linalg.norm(x, jnp.inf, axis=1),
            jnp.linalg.norm(x, -jnp.inf, axis=1),
            jnp.linalg.norm(x, 0, axis=1),
            jnp.linalg.norm(x, 3, axis=1),
            jnp.linalg.norm(x, "fro"),
            jnp.linalg.norm(x, 1),
        ],
        ("b, s",),
        rtol=1e-4,
    ),
    Case(
        "norm_gradient",
        lambda x: [jnp.linalg.norm(x, axis=1), jnp.linalg.norm(x)],
        ("b, s",),
        grad=True,
    ),
    Case("prod", lambda x: x.prod(1), ("b, s",), ("reduce_prod",), grad=True, rtol=1e-3),
    Case("prod_closed", lambda x: x.prod((1, 2)), ("b, 3, 2",), ("reduce_prod",), grad=True),
    Case("prod_of_two_axes", lambda x: x.prod((0, 2)), ("b, 2, s",), grad=True, rtol=1e-2),
    Case("prod_hessian", lambda x: jax.hessian(jnp.prod)(x), ("s",), rtol=1e-3, atol=1e-3),
    Case(
        "reduce_closed_gradient",
        lambda x: lax.reduce(x, np.float32(2), lambda a, b: a + jnp.sin(b), (1,)),
        ("b, 3",),
        ("reduce",),
        grad=True,
    ),
    Case(
        "reduce_of_nothing",  # in a bucket of one element, at even sizes
        lambda x: [
            _fold(x[: x.shape[0] % 2], start, fn, 0)
            for start, fn in ((5, lax.add), (-3, lax.max), (-3, _absolute_max))
        ],
        ("s, 2",),
        ("reduce",),
    ),
    Case(
        "reduce_the_rest",
        lambda x: _fold(x[x.shape[0] // 2 * 2 :], -3, _absolute_max, 0),
        ("s",),
        ("reduce",),
    ),
    Case(
        "segment_reductions",
        lambda x, i: [
            jax.ops.segment_sum(x, i, 4),
            jax.ops.segment_max(x, i, 4),
            jax.ops.segment_prod(x, i, num_segments=4),
        ],
        ("s, 2", Arg("s", "int32", 0, 4)),
        ("scatter-add",),
        rtol=1e-4,
    ),
    Case(
        "segment_sum_gradient",
        lambda x, i: jax.ops.segment_sum(x, i, 4),
        ("s, 2", Arg("s", "int32", 0, 4)),
        grad=True,
    ),
    Case(
        "allclose",
        lambda x, y: [jnp.allclose(x, x), jnp.array_equal(x, y), jnp.array_equal(x, x)],
        ("b, s", "b, s"),
    ),
    Case("vmapped", jax.vmap(lambda x: [jnp.sum(x), jnp.max(x), jnp.argmax(x)]), ("b, s, 2",)),
]
