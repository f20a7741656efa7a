"""Pooling and other reductions over sliding windows, and their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, Case


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


def _case(name: str, fn: Any, *args: Any, covers: tuple[str, ...], **options: Any) -> Case:
    return Case(f"window_{name}", fn, args, covers, **options)


CASES = [
    _case("max_batch", pool("max", W3, S2), "b, 6, 2", covers=MAX, grad=True),
    _case("max_same", pool("max", W3), "b, s, 2", covers=MAX, grad=True),
    _case("max_special", pool("max", W3, S2), "b, s, 2", covers=MAX, domains=SPECIAL),
    _case("max_same_stride", pool("max", W3, S2), "b, s, f", covers=MAX, grad=True),
    _case("max_same_even", pool("max", (1, 4, 1), (1, 3, 1)), "2, s, 2", covers=MAX, grad=True),
    _case(
        "max_same_lower",
        pool("max", (1, 4, 1), (1, 2, 1), "SAME_LOWER"),
        "2, s, 2",
        covers=MAX,
        grad=True,
    ),
    _case(
        "max_valid",
        pool("max", W3, S2, "VALID"),
        "b, s, 2",
        covers=MAX,
        grad=True,
        sizes=FROM_3,
    ),
    _case(
        "max_explicit",
        pool("max", W3, S2, ((0, 0), (2, 1), (0, 0))),
        "b, s, 2",
        covers=MAX,
        grad=True,
    ),
    _case(
        "max_dilated",
        pool("max", W3, S2, window_dilation=(1, 2, 1)),
        "b, s, 2",
        covers=MAX,
    ),
    _case(
        "max_base_dilated",
        pool("max", W3, S2, base_dilation=(1, 3, 1)),
        "b, s, 2",
        covers=MAX,
        domains=SPECIAL,
    ),
    _case("max_2d", pool("max", (1, 3, 2, 1), (1, 2, 2, 1)), "1, s, t, 2", covers=MAX, grad=True),
    _case("max_int8", pool("max", W3, S2), Arg("b, s, 2", "int8"), covers=MAX),
    _case("max_uint8", pool("max", W3, S2), Arg("b, s, 2", "uint8", low=0), covers=MAX),
    _case("max_bfloat16", pool("max", W3, S2), Arg("b, s, 2", "bfloat16"), covers=MAX),
    _case("min_same_stride", pool("min", W3, S2), "b, s, 2", covers=MIN, grad=True),
    _case("min_special", pool("min", W3), "b, s, 2", covers=MIN, domains=SPECIAL),
    _case("min_uint8", pool("min", W3, S2), Arg("b, s, 2", "uint8", low=3), covers=MIN),
    _case("sum_same_stride", pool("sum", W3, S2), "b, s, f", covers=SUM, grad=True),
    _case(
        "sum_valid", pool("sum", W3, S2, "VALID"), "b, s, 2", covers=SUM, grad=True, sizes=FROM_3
    ),
    _case(
        "sum_dilated",
        pool("sum", W3, S2, base_dilation=(1, 2, 1), window_dilation=(1, 2, 1)),
        "b, s, 2",
        covers=SUM,
        grad=True,
    ),
    _case("sum_3d", pool("sum", (2, 3, 2), (1, 2, 2)), "r, s, t", covers=SUM, grad=True),
    _case("sum_int32", pool("sum", W3, S2), Arg("b, s, 2", "int32"), covers=SUM),
    _case("sum_complex", pool("sum", W3, S2), Arg("b, s, 2", "complex64"), covers=SUM),
    _case("average_counted", average_without_padding, "b, s, 2", covers=SUM, grad=True),
    # windows of symbolic size
    _case("global_max", global_pool("max"), "b, s, 2", covers=MAX, grad=True, domains=SPECIAL),
    _case("global_sum", global_pool("sum"), "b, s, 2", covers=SUM),
    _case(
        "adaptive_max",
        adaptive_pool("max"),
        "b, s, 2",
        covers=MAX,
        grad=True,
        sizes=FROM_3,
        constraints=("s >= 3",),
    ),
    _case(
        "adaptive_sum",
        adaptive_pool("sum"),
        "b, s, 2",
        covers=SUM,
        sizes=FROM_3,
        constraints=("s >= 3",),
    ),
    _case(
        "moving_sum",
        lambda x, w: pool("sum", (w.shape[0],), (1,), "VALID")(x),
        "s",
        "t",
        covers=SUM,
        sizes=({"s": 4, "t": 4}, {"s": 8, "t": 2}, {"s": 7, "t": 3}, {"s": 5, "t": 1}),
        constraints=("s >= t",),
    ),
    # any reducer
    _case("product", pool("mul", W3, S2), "b, s, 2", covers=ANY),
    _case("product_tangent", tangent(pool("mul", W3, S2)), "b, s, 2", "b, s, 2", covers=ANY),
    _case("product_int", pool("mul", W3, S2), Arg("b, s, 2", "int32"), covers=ANY),
    _case("own_reducer", most_negative, "b, s, 2", covers=ANY),
    _case("own_reducer_vmap", jax.vmap(most_negative), "b, 1, s, 2", covers=ANY),
    _case("two_arrays", mean_and_count, "b, s", Arg("b, s", "int32"), covers=ANY, domains=SPECIAL),
    _case(
        "any",
        lambda x: lax.reduce_window(x, np.array(False), lax.bitwise_or, (1, 2), (1, 2), "SAME"),
        Arg("b, s", "bool"),
        covers=ANY,
    ),
    # gradients by name
    _case("max_tangent", tangent(pool("max", W3, S2)), "b, s, 2", "b, s, 2", covers=GATHER),
    _case(
        "max_tangent_special",
        lambda x, t: jax.jvp(pool("max", W3, S2), (x,), (t,))[1],
        "b, s, 2",
        Arg("b, s, 2", make=finite),
        covers=GATHER,
        domains=SPECIAL,
    ),
    _case(
        "min_tangent_valid",
        tangent(pool("min", W3, S2, "VALID")),
        "b, s, 2",
        "b, s, 2",
        covers=GATHER,
        sizes=FROM_3,
    ),
    _case("max_second_order", second_order(pool("max", W3, S2)), "b, s, 2", covers=GATHER),
    _case(
        "max_gradient_special",
        lambda x, g: jax.vjp(pool("max", W3), x)[1](g)[0],
        "b, s, 2",
        Arg("b, s, 2", make=finite),
        covers=SCATTER,
        domains=SPECIAL,
    ),
    _case(
        "max_grad_vmap",
        jax.vmap(jax.grad(lambda x: jnp.sum(pool("max", (3,), (2,))(x) ** 2))),
        "b, s",
        covers=SCATTER,
    ),
    _case("scatter_own", select_and_scatter, "b, 4", "b, 2", covers=("select_and_scatter",)),
]
