"""Pooling and other reductions over sliding windows, and their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, cases, family


def pool(
    op: str,
    window: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    padding: Any = "SAME",
    **dilations: Any,
) -> Callable[[Any], Any]:
    """A pooling of this kind, as model libraries write it."""
    reducer, identity = {
        "max": (lax.max, -jnp.inf),
        "min": (lax.min, jnp.inf),
        "sum": (lax.add, 0.0),
        "mul": (lax.mul, 1.0),
    }[op]

    def fn(x: Any) -> Any:
        init = identity
        if jnp.issubdtype(x.dtype, jnp.integer):
            info = jnp.iinfo(x.dtype)
            init = {"max": info.min, "min": info.max, "sum": 0, "mul": 1}[op]
        init = np.asarray(init, x.dtype)
        steps = strides or (1,) * x.ndim
        return lax.reduce_window(x, init, reducer, window, steps, padding, **dilations)

    return fn


def average_without_padding(x: Any) -> Any:
    """An average that counts what is real in each window, as Flax does it."""
    window, strides = (1, 3, 1), (1, 2, 1)
    total = lax.reduce_window(x, 0.0, lax.add, window, strides, "SAME")
    count = lax.reduce_window(jnp.ones_like(x), 0.0, lax.add, window, strides, "SAME")
    return total / count


def global_pool(op: str) -> Callable[[Any], Any]:
    return lambda x: pool(op, (1, x.shape[1], 1), (1, x.shape[1], 1), "VALID")(x)


def adaptive_pool(op: str) -> Callable[[Any], Any]:
    """A fixed number of windows, or one more, whatever the size of the axis."""
    return lambda x: pool(op, (1, x.shape[1] // 3, 1), (1, x.shape[1] // 3, 1), "VALID")(x)


def second_order(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    inner = jax.grad(lambda x: jnp.sum(jnp.sin(fn(x))))
    return jax.grad(lambda x: jnp.sum(inner(x) ** 2))


def tangent(fn: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, t: jax.jvp(fn, (x,), (t,))


def most_negative(x: Any) -> Any:
    """A reducer that is no monoid JAX knows, started from what is not neutral."""

    def reducer(a: Any, b: Any) -> Any:
        return jnp.where(jnp.abs(b) > jnp.abs(a), b, a)

    return lax.reduce_window(x, jnp.float32(0.25), reducer, (1, 3, 1), (1, 2, 1), "SAME")


def mean_and_count(x: Any, n: Any) -> Any:
    """Two arrays reduced together."""

    def reducer(a: Any, b: Any) -> Any:
        return jnp.maximum(a[0], b[0]) + 1.0, a[1] + b[1]

    init = (np.float32(-3.0), np.int32(1))
    return lax.reduce_window((x, n), init, reducer, (1, 3), (1, 2), "SAME")


def select_and_scatter(x: Any, source: Any) -> Any:
    """The primitive as it stands, with a user's own select and scatter."""
    select = jax.make_jaxpr(lambda a, b: a >= b)(0.0, 0.0)
    scatter = jax.make_jaxpr(lambda a, b: a + b)(0.0, 0.0)
    return lax.select_and_scatter_p.bind(
        x,
        source,
        jnp.float32(0),
        select_jaxpr=getattr(select, "jaxpr", select),
        select_consts=(),
        scatter_jaxpr=getattr(scatter, "jaxpr", scatter),
        scatter_consts=(),
        window_dimensions=(1, 2),
        window_strides=(1, 2),
        padding=((0, 0), (0, 0)),
    )


def finite(x: Any, rng: np.random.Generator) -> Any:
    return rng.standard_normal(x.shape).astype(x.dtype)


SPECIAL = ("mixed", "negative", "special")
W3, S2 = (1, 3, 1), (1, 2, 1)
MAX, MIN, SUM = ("reduce_window_max",), ("reduce_window_min",), ("reduce_window_sum",)
ANY = ("reduce_window",)
GATHER, SCATTER = ("select_and_gather_add",), ("select_and_scatter_add",)
FROM_3 = ({"b": 1, "s": 3}, {"b": 3, "s": 6}, {"b": 4, "s": 8}, {"b": 2, "s": 7})

maximum = family("reduce_window_max", "window_", grad=True)
minimum, total = family("reduce_window_min", "window_"), family("reduce_window_sum", "window_")
case, tangents = family("reduce_window", "window_"), family("select_and_gather_add", "window_")


TABLE = {
    "max_batch": maximum(pool("max", W3, S2), "b, 6, 2"),
    "max_same": maximum(pool("max", W3), "b, s, 2"),
    "max_special": maximum(pool("max", W3, S2), "b, s, 2", domains=SPECIAL, grad=False),
    "max_same_stride": maximum(pool("max", W3, S2), "b, s, f"),
    "max_same_even": maximum(pool("max", (1, 4, 1), (1, 3, 1)), "2, s, 2"),
    "max_same_lower": maximum(pool("max", (1, 4, 1), (1, 2, 1), "SAME_LOWER"), "2, s, 2"),
    "max_valid": maximum(pool("max", W3, S2, "VALID"), "b, s, 2", sizes=FROM_3),
    "max_explicit": maximum(pool("max", W3, S2, ((0, 0), (2, 1), (0, 0))), "b, s, 2"),
    "max_dilated": maximum(pool("max", W3, S2, window_dilation=(1, 2, 1)), "b, s, 2", grad=False),
    "max_base_dilated": maximum(
        pool("max", W3, S2, base_dilation=(1, 3, 1)), "b, s, 2", domains=SPECIAL, grad=False
    ),
    "max_2d": maximum(pool("max", (1, 3, 2, 1), (1, 2, 2, 1)), "1, s, t, 2"),
    "max_int8": maximum(pool("max", W3, S2), "int8[b, s, 2]", grad=False),
    "max_uint8": maximum(pool("max", W3, S2), "uint8[b, s, 2] 0:6", grad=False),
    "max_bfloat16": maximum(pool("max", W3, S2), "bfloat16[b, s, 2]", grad=False),
    "min_same_stride": minimum(pool("min", W3, S2), "b, s, 2", grad=True),
    "min_special": minimum(pool("min", W3), "b, s, 2", domains=SPECIAL),
    "min_uint8": minimum(pool("min", W3, S2), "uint8[b, s, 2] 3:6"),
    "sum_same_stride": total(pool("sum", W3, S2), "b, s, f", grad=True),
    "sum_valid": total(pool("sum", W3, S2, "VALID"), "b, s, 2", grad=True, sizes=FROM_3),
    "sum_dilated": total(
        pool("sum", W3, S2, base_dilation=(1, 2, 1), window_dilation=(1, 2, 1)),
        "b, s, 2",
        grad=True,
    ),
    "sum_3d": total(pool("sum", (2, 3, 2), (1, 2, 2)), "r, s, t", grad=True),
    "sum_int32": total(pool("sum", W3, S2), "int32[b, s, 2]"),
    "sum_complex": total(pool("sum", W3, S2), "complex64[b, s, 2]"),
    "average_counted": total(average_without_padding, "b, s, 2", grad=True),
    # windows of symbolic size
    "global_max": maximum(global_pool("max"), "b, s, 2", domains=SPECIAL),
    "global_sum": total(global_pool("sum"), "b, s, 2"),
    "adaptive_max": maximum(adaptive_pool("max"), "b, s, 2", sizes=FROM_3, constraints=("s >= 3",)),
    "adaptive_sum": total(adaptive_pool("sum"), "b, s, 2", sizes=FROM_3, constraints=("s >= 3",)),
    "moving_sum": total(
        lambda x, w: pool("sum", (w.shape[0],), (1,), "VALID")(x),
        "s; t",
        sizes=({"s": 4, "t": 4}, {"s": 8, "t": 2}, {"s": 7, "t": 3}, {"s": 5, "t": 1}),
        constraints=("s >= t",),
    ),
    # any reducer
    "product": case(pool("mul", W3, S2), "b, s, 2"),
    "product_tangent": case(tangent(pool("mul", W3, S2)), "b, s, 2; b, s, 2"),
    "product_int": case(pool("mul", W3, S2), "int32[b, s, 2]"),
    "own_reducer": case(most_negative, "b, s, 2"),
    "own_reducer_vmap": case(jax.vmap(most_negative), "b, 1, s, 2"),
    "two_arrays": case(mean_and_count, "b, s; int32[b, s]", domains=SPECIAL),
    "any": case(
        lambda x: lax.reduce_window(x, np.array(False), lax.bitwise_or, (1, 2), (1, 2), "SAME"),
        "bool[b, s]",
    ),
    # gradients by name
    "max_tangent": tangents(tangent(pool("max", W3, S2)), "b, s, 2; b, s, 2"),
    "max_tangent_special": tangents(
        lambda x, t: jax.jvp(pool("max", W3, S2), (x,), (t,))[1],
        "b, s, 2",
        Arg("b, s, 2", make=finite),
        domains=SPECIAL,
    ),
    "min_tangent_valid": tangents(
        tangent(pool("min", W3, S2, "VALID")), "b, s, 2; b, s, 2", sizes=FROM_3
    ),
    "max_second_order": tangents(second_order(pool("max", W3, S2)), "b, s, 2"),
    "max_gradient_special": case(
        lambda x, g: jax.vjp(pool("max", W3), x)[1](g)[0],
        "b, s, 2",
        Arg("b, s, 2", make=finite),
        covers="select_and_scatter_add",
        domains=SPECIAL,
    ),
    "max_grad_vmap": case(
        jax.vmap(jax.grad(lambda x: jnp.sum(pool("max", (3,), (2,))(x) ** 2))),
        covers="select_and_scatter_add",
    ),
    "scatter_own": case(select_and_scatter, "b, 4; b, 2", covers="select_and_scatter"),
}
CASES = cases(TABLE)
