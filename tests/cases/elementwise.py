"""Elementwise primitives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bucketjit._jax.jaxprs import primitives
from tests.harness import Arg, Case

ALL = ("mixed", "negative", "positive", "special")


def each(*fns: Callable[..., Any]) -> Callable[..., Any]:
    """Every function of the same arguments."""
    return lambda *args: [fn(*args) for fn in fns]


def _newer() -> list[Case]:
    """Primitives that only some versions of JAX have."""
    found = []
    for name in ("log2", "one_minus_square"):
        if hasattr(lax, name):
            found.append(Case(name, getattr(lax, name), ("b, s",), (name,), grad=True, domains=ALL))
    if hasattr(lax, "polynomial"):
        found.append(
            Case(
                "polynomial",
                lambda x: lax.polynomial(x, (1.0, -2.0, 0.5)),
                ("b, s",),
                ("polynomial",),
            )
        )
    return found


CASES = [
    Case("add", lambda x, y: x + y, ("b, 3", "b, 3"), ("add",), grad=True),
    Case(
        "arithmetic",
        each(lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, lax.atan2),
        ("b, s", "b, s"),
        ("add", "sub", "mul", "div", "rem", "max", "min", "atan2"),
        domains=ALL,
    ),
    Case(
        "arithmetic_gradients",
        each(lax.sub, lax.mul, lax.div, lax.max, lax.min, lax.atan2),
        ("b, s", "b, s"),
        ("div",),
        grad=True,
    ),
    Case(
        "arithmetic_int",
        lambda x, y: [x + y, x - y, x * y, lax.div(x, y + 9), lax.rem(x, y + 9), -x, lax.sign(x)],
        (Arg("b, s", "int32"), Arg("b, s", "int32")),
        ("div", "rem", "neg", "sign"),
    ),
    Case(
        "arithmetic_bfloat16",
        each(lax.add, lax.mul, lax.div, lax.max),
        (Arg("b, s", "bfloat16"), Arg("b, s", "bfloat16")),
        ("add", "mul"),
        rtol=2e-2,
        atol=2e-2,
    ),
    Case(
        "scalar_operand",
        lambda x, y: [x * 2.0, y + x, jnp.maximum(x, 0), 1 - x],
        ("b, s", ""),
        ("mul", "add", "max", "sub"),
        grad=True,
    ),
    Case(
        "one_axis_broadcasts",
        lambda x, y: x[:, None] * y[None, :] + y,
        ("b", "s"),
        ("mul",),
        grad=True,
    ),
    Case(
        "size_expressions",
        lambda x, y: jnp.concatenate([x, y]) * jnp.concatenate([y, x]),
        ("s", "b"),
        ("mul",),
        grad=True,
    ),
    Case(
        "unary_signs",
        each(lax.neg, lax.abs, lax.sign, lax.floor, lax.ceil, lax.is_finite, lax.square),
        ("b, s",),
        ("neg", "abs", "sign", "floor", "ceil", "is_finite", "square"),
        domains=ALL,
        grad=True,
    ),
    Case(
        "round",
        each(
            lambda x: lax.round(x * 2, lax.RoundingMethod.TO_NEAREST_EVEN),
            lambda x: lax.round(x * 2, lax.RoundingMethod.AWAY_FROM_ZERO),
        ),
        ("b, s",),
        ("round",),
        domains=ALL,
    ),
    Case(
        "roots_and_powers",
        each(lax.sqrt, lax.rsqrt, lax.cbrt, lambda x: lax.integer_pow(x, 3), lambda x: x**-2),
        ("b, s",),
        ("sqrt", "rsqrt", "cbrt", "integer_pow"),
        domains=("positive", "special"),
        grad=True,
        rtol=1e-4,
    ),
    Case("pow", lax.pow, ("b, s", "b, s"), ("pow",), domains=("positive", "special"), grad=True),
    Case(
        "pow_int",
        lambda x, n: [lax.pow(x, n), lax.integer_pow(n, 2)],
        ("b, s", Arg("b, s", "int32", low=0, high=4)),
        ("pow", "integer_pow"),
    ),
    Case("nextafter", lax.nextafter, ("b, s", "b, s"), ("nextafter",), domains=ALL),
    Case(
        "reduce_precision",
        lambda x: lax.reduce_precision(x, 5, 4),
        ("b, s",),
        ("reduce_precision",),
        grad=True,
    ),
    Case(
        "exponentials",
        each(lax.exp, lax.exp2, lax.expm1, lax.log, lax.log1p, lax.logistic, lax.tanh),
        ("b, s",),
        ("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh"),
        domains=ALL,
        grad=True,
    ),
    Case(
        "trigonometry",
        each(lax.sin, lax.cos, lax.tan, lax.atan, lax.sinh, lax.cosh, lax.asinh),
        ("b, s",),
        ("sin", "cos", "tan", "atan", "sinh", "cosh", "asinh"),
        domains=("mixed", "special"),
        grad=True,
    ),
    Case(
        "inverse_trigonometry",
        lambda x: each(lax.asin, lax.acos, lax.atanh, lambda x: lax.acosh(x + 2))(jnp.tanh(x)),
        ("b, s",),
        ("asin", "acos", "atanh", "acosh"),
        grad=True,
        rtol=1e-4,
    ),
    Case(
        "error_functions",
        each(lax.erf, lax.erfc, lambda x: lax.erf_inv(jnp.tanh(x))),
        ("b, s",),
        ("erf", "erfc", "erf_inv"),
        grad=True,
        rtol=1e-4,
    ),
    Case(
        "gamma_functions",
        each(lax.lgamma, lax.digamma),
        ("b, s",),
        ("lgamma", "digamma"),
        domains=("positive",),
        grad=True,
        rtol=1e-4,
    ),
    Case(
        "incomplete_gamma",
        each(lax.igamma, lax.igammac, lax.igamma_grad_a),
        ("b", "b"),
        ("igamma", "igammac", "igamma_grad_a"),
        domains=("positive",),
        rtol=1e-3,
        atol=1e-4,
    ),
    Case(
        "incomplete_gamma_gradients",
        lax.igamma,
        ("b", "b"),
        ("igamma",),
        domains=("positive",),
        grad=True,
        rtol=1e-3,
        atol=1e-4,
    ),
    Case(
        "polygamma_and_zeta",
        lambda x: [lax.polygamma(jnp.ones_like(x), x), lax.zeta(x + 1.5, x)],
        ("s",),
        ("polygamma", "zeta"),
        domains=("positive",),
        rtol=1e-4,
    ),
    Case(
        "incomplete_beta",
        lambda a, b, x: lax.betainc(a, b, jax.nn.sigmoid(x)),
        ("b", "b", "b"),
        ("regularized_incomplete_beta",),
        domains=("positive",),
        rtol=1e-4,
    ),
    Case(
        "bessel",
        each(lax.bessel_i0e, lax.bessel_i1e),
        ("b, s",),
        ("bessel_i0e", "bessel_i1e"),
        domains=("mixed", "positive"),
        grad=True,
    ),
    Case(
        "complex_parts",
        lambda x, y: [
            lax.complex(x, y),
            lax.real(lax.complex(x, y)),
            lax.conj(lax.complex(x, y)),
            lax.abs(lax.complex(x, y)),
        ],
        ("b, s", "b, s"),
        ("complex", "real", "conj", "abs"),
        grad=True,
    ),
    Case(
        "complex_functions",
        each(lax.exp, lax.real, lax.imag, lax.sin, lambda z: z * z + 1, lax.neg),
        (Arg("b, s", "complex64"),),
        ("exp", "imag", "mul"),
    ),
    Case(
        "bits",
        each(lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lambda x, y: ~x),
        (Arg("b, s", "uint8", low=0, high=256), Arg("b, s", "uint8", low=0, high=256)),
        ("and", "or", "xor", "not"),
    ),
    Case(
        "logic",
        lambda x, y: [x & y, x | y, x ^ y, ~x],
        (Arg("b, s", "bool"), Arg("b, s", "bool")),
        ("and", "or", "xor", "not"),
    ),
    Case(
        "shifts_and_counts",
        lambda x, n: [
            lax.shift_left(x, n),
            lax.shift_right_arithmetic(x, n),
            lax.shift_right_logical(x, n),
            lax.population_count(x),
            lax.clz(x),
        ],
        (Arg("b, s", low=-1000, high=1000, dtype="int32"), Arg("b, s", "int32", low=0, high=7)),
        (
            *("shift_left", "shift_right_arithmetic", "shift_right_logical"),
            *("population_count", "clz"),
        ),
    ),
    Case(
        "mulhi",
        lax.mulhi,
        (
            Arg("b, s", "int32", low=-(2**30), high=2**30),
            Arg("b, s", "int32", low=-(2**30), high=2**30),
        ),
        ("mulhi",),
    ),
    Case(
        "comparisons",
        each(lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge),
        ("b, s", "b, s"),
        ("eq", "ne", "lt", "le", "gt", "ge"),
        domains=ALL,
    ),
    Case(
        "comparisons_int",
        each(lax.eq, lax.ne, lax.lt, lax.ge),
        (Arg("b, s", "int32"), Arg("b, s", "int32")),
        ("eq", "ne", "lt", "ge"),
    ),
    Case(
        "comparisons_in_total_order",
        lambda x, y: [p.bind(x, y) for p in primitives("eq_to", "lt_to", "le_to")],
        ("b, s", "b, s"),
        ("eq_to", "lt_to", "le_to"),
        domains=ALL,
    ),
    Case(
        "where",
        lambda x, y: [jnp.where(x > 0, x, y), jnp.where(x > 0, x, 0.0)],
        ("b, s", "b, s"),
        ("select_n",),
        grad=True,
        domains=ALL,
    ),
    Case(
        "select_n_scalar_predicate",
        lambda p, x, y: lax.select_n(p[()] > 0, x, y),
        ("", "b, s", "b, s"),
        ("select_n",),
        grad=True,
    ),
    Case(
        "select_n_many",
        lambda i, x: lax.select_n(i, x, x + 1, x * 2),
        (Arg("b, s", "int32", low=0, high=3), "b, s"),
        ("select_n",),
    ),
    Case(
        "select_n_keys",
        lambda p, x, y: lax.select_n(p, x, y),
        (Arg("b", "bool"), Arg("b", "key"), Arg("b", "key")),
        ("select_n",),
    ),
    Case(
        "clamp",
        lambda x, low: [
            lax.clamp(np.float32(-0.5), x, np.float32(0.5)),
            lax.clamp(low, x, low + 1),
            jnp.clip(x, 0, None),
        ],
        ("b, s", "b, s"),
        ("clamp",),
        domains=ALL,
        grad=True,
    ),
    Case(
        "convert_element_type",
        lambda x: [x.astype(jnp.bfloat16), x.astype(jnp.complex64), x > 0, x.astype(bool)],
        ("b, s",),
        ("convert_element_type",),
        rtol=1e-2,
    ),
    Case(
        "convert_element_type_int",
        lambda x: [x.astype(jnp.float32) * 0.5, x.astype(jnp.uint8), x.astype(jnp.int8)],
        (Arg("b, s", "int32", low=0, high=100),),
        ("convert_element_type",),
    ),
    Case(
        "bitcast_same_width",
        lambda x: lax.bitcast_convert_type(x, jnp.int32),
        ("b, s",),
        ("bitcast_convert_type",),
        domains=ALL,
    ),
    Case(
        "bitcast_to_narrower",
        lambda x: lax.bitcast_convert_type(x, jnp.uint8),
        ("b, s",),
        ("bitcast_convert_type",),
    ),
    Case(
        "bitcast_to_wider",
        lambda x: lax.bitcast_convert_type(x, jnp.uint32),
        (Arg("b, s, 2", "uint16", low=0, high=9999),),
        ("bitcast_convert_type",),
    ),
    Case("copy", lambda x: jnp.array(x, copy=True), ("b, s",), ("copy",), grad=True),
    Case(
        "stop_gradient_of_factor",
        lambda x: x * lax.stop_gradient(x),
        ("b, s",),
        ("stop_gradient",),
        grad=True,
    ),
    Case(
        "optimization_barrier",
        lambda x, i, k: lax.optimization_barrier((x * 2, i, k, 3.0)),
        ("b, s", Arg("s", "int32"), Arg("b", "key")),
        ("optimization_barrier",),
    ),
    Case(
        "optimization_barrier_gradient",
        lambda x, y: sum(lax.optimization_barrier((x * 2, y))),
        ("b, s", "s"),
        ("optimization_barrier",),
        grad=True,
    ),
    Case(
        "add_any",
        lambda x: jax.grad(lambda v: jnp.sum(jnp.sin(v) * jnp.cos(v)))(x),
        ("b, s",),
        ("add_any",),
        grad=True,
    ),
    Case(
        "dim_as_value",
        lambda x: [x * x.shape[0], x / (x.shape[0] * x.shape[1] + 1), jnp.float32(x.size)],
        ("b, s",),
        ("dim_as_value",),
        grad=True,
    ),
    Case(
        "activations",
        each(jax.nn.gelu, jax.nn.silu, jax.nn.relu, jax.nn.softplus, jax.nn.elu, jax.nn.hard_swish),
        ("b, s, 2",),
        ("tanh",),
        domains=("mixed", "negative", "positive"),
        grad=True,
    ),
    Case(
        "special_functions",
        each(
            jax.scipy.special.logit,
            jax.scipy.special.entr,
            jax.scipy.special.ndtri,
            lambda x: jax.scipy.special.xlogy(x, x),
            jnp.sinc,
        ),
        ("b, s",),
        domains=("mixed",),
        rtol=1e-4,
    ),
    Case(
        "nan_to_num",
        each(jnp.nan_to_num, jnp.isnan, jnp.isinf, jnp.signbit),
        ("b, s",),
        domains=ALL,
    ),
    Case(
        "float_parts",
        lambda x: [*jnp.frexp(x), *jnp.modf(x), jnp.hypot(x, x), jnp.logaddexp(x, 2 * x)],
        ("b, s",),
        domains=("mixed", "positive"),
    ),
    *_newer(),
]
