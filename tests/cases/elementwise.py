"""Elementwise primitives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bucketjit._jax.jaxprs import primitives
from tests.harness import cases, family

ALL = ("mixed", "negative", "positive", "special")
POSITIVE: dict[str, Any] = {"domains": ("positive",), "rtol": 1e-4}
GAMMA: dict[str, Any] = {"domains": ("positive",), "rtol": 1e-3, "atol": 1e-4}
MANY = "int32[b, s] -1073741824:1073741824"
case, smooth, special = family(), family(grad=True), family(domains=ALL)
select, barrier = family("select_n"), family("optimization_barrier")
convert, bitcast = family("convert_element_type"), family("bitcast_convert_type")


def each(*fns: Callable[..., Any]) -> Callable[..., Any]:
    """Every function of the same arguments."""
    return lambda *args: [fn(*args) for fn in fns]


def calls(primitives: str, args: str = "b, s", *others: Callable[..., Any], **options: Any) -> Any:
    """A case of the functions of ``jax.lax`` that have the names of primitives, and of others."""
    fns = [getattr(lax, primitive) for primitive in primitives.split()]
    also = options.pop("also", "")
    return case(each(*fns, *others), args, covers=f"{primitives} {also}", **options)


# Primitives that only some versions of JAX have.
NEWER = {
    name: calls(name, grad=True, domains=ALL)
    for name in ("log2", "one_minus_square")
    if hasattr(lax, name)
}
if hasattr(lax, "polynomial"):
    NEWER |= {"polynomial": case(lambda x: lax.polynomial(x, (1, -2, 0.5)), covers="polynomial")}

ARITHMETIC = {
    "add": smooth(lambda x, y: x + y, "b, 3; b, 3", covers="add"),
    "arithmetic": calls("add sub mul div rem max min atan2", "b, s; b, s", domains=ALL),
    "arithmetic_gradients": smooth(
        each(lax.sub, lax.mul, lax.div, lax.max, lax.min, lax.atan2), "b, s; b, s", covers="div"
    ),
    "arithmetic_int": case(
        lambda x, y: [x + y, x - y, x * y, lax.div(x, y + 9), lax.rem(x, y + 9), -x, lax.sign(x)],
        "int32[b, s]; int32[b, s]",
        covers="div rem neg sign",
    ),
    "arithmetic_bfloat16": case(
        each(lax.add, lax.mul, lax.div, lax.max),
        "bfloat16[b, s]; bfloat16[b, s]",
        covers="add mul",
        rtol=2e-2,
        atol=2e-2,
    ),
    "scalar_operand": smooth(
        lambda x, y: [x * 2.0, y + x, jnp.maximum(x, 0), 1 - x], "b, s; ", covers="mul add max sub"
    ),
    "one_axis_broadcasts": smooth(lambda x, y: x[:, None] * y[None] + y, "b; s", covers="mul"),
    "size_expressions": smooth(
        lambda x, y: jnp.concatenate([x, y]) * jnp.concatenate([y, x]), "s; b", covers="mul"
    ),
    "pow": calls("pow", "b, s; b, s", domains=("positive", "special"), grad=True),
    "pow_int": case(
        lambda x, n: [lax.pow(x, n), lax.integer_pow(n, 2)],
        "b, s; int32[b, s] 0:4",
        covers="pow integer_pow",
    ),
    "nextafter": calls("nextafter", "b, s; b, s", domains=ALL),
    "mulhi": calls("mulhi", f"{MANY}; {MANY}"),
    "add_any": smooth(jax.grad(lambda x: jnp.sum(jnp.sin(x) * jnp.cos(x))), covers="add_any"),
    "dim_as_value": smooth(
        lambda x: [x * x.shape[0], x / (x.shape[0] * x.shape[1] + 1), jnp.float32(x.size)],
        covers="dim_as_value",
    ),
}

FUNCTIONS = {
    "unary_signs": calls("neg abs sign floor ceil is_finite square", domains=ALL, grad=True),
    "round": special(
        each(
            lambda x: lax.round(x * 2, lax.RoundingMethod.TO_NEAREST_EVEN),
            lambda x: lax.round(x * 2, lax.RoundingMethod.AWAY_FROM_ZERO),
        ),
        covers="round",
    ),
    "roots_and_powers": calls(
        "sqrt rsqrt cbrt",
        "b, s",
        *(lambda x: lax.integer_pow(x, 3), lambda x: x**-2),
        **{"also": "integer_pow", "domains": ("positive", "special"), "grad": True, "rtol": 1e-4},
    ),
    "reduce_precision": smooth(lambda x: lax.reduce_precision(x, 5, 4), covers="reduce_precision"),
    "exponentials": calls("exp exp2 expm1 log log1p logistic tanh", domains=ALL, grad=True),
    "trigonometry": calls(
        "sin cos tan atan sinh cosh asinh", **{"domains": ("mixed", "special"), "grad": True}
    ),
    "inverse_trigonometry": smooth(
        lambda x: each(lax.asin, lax.acos, lax.atanh, lambda x: lax.acosh(x + 2))(jnp.tanh(x)),
        covers="asin acos atanh acosh",
        rtol=1e-4,
    ),
    "error_functions": calls(
        "erf erfc",
        "b, s",
        lambda x: lax.erf_inv(jnp.tanh(x)),
        **{"also": "erf_inv", "grad": True, "rtol": 1e-4},
    ),
    "gamma_functions": calls("lgamma digamma", **POSITIVE, grad=True),
    "incomplete_gamma": calls("igamma igammac igamma_grad_a", "b; b", **GAMMA),
    "incomplete_gamma_gradients": calls("igamma", "b; b", **GAMMA, grad=True),
    "polygamma_and_zeta": case(
        lambda x: [lax.polygamma(jnp.ones_like(x), x), lax.zeta(x + 1.5, x)],
        "s",
        covers="polygamma zeta",
        **POSITIVE,
    ),
    "incomplete_beta": case(
        lambda a, b, x: lax.betainc(a, b, jax.nn.sigmoid(x)),
        "b; b; b",
        covers="regularized_incomplete_beta",
        **POSITIVE,
    ),
    "bessel": calls("bessel_i0e bessel_i1e", domains=("mixed", "positive"), grad=True),
    "complex_parts": smooth(
        lambda x, y: [lax.complex(x, y), *each(lax.real, lax.conj, lax.abs)(lax.complex(x, y))],
        "b, s; b, s",
        covers="complex real conj abs",
    ),
    "complex_functions": case(
        each(lax.exp, lax.real, lax.imag, lax.sin, lambda z: z * z + 1, lax.neg),
        "complex64[b, s]",
        covers="exp imag mul",
    ),
    "activations": smooth(
        each(jax.nn.gelu, jax.nn.silu, jax.nn.relu, jax.nn.softplus, jax.nn.elu, jax.nn.hard_swish),
        "b, s, 2",
        covers="tanh",
    ),
    "special_functions": case(
        each(
            *(jax.scipy.special.logit, jax.scipy.special.entr, jax.scipy.special.ndtri, jnp.sinc),
            lambda x: jax.scipy.special.xlogy(x, x),
        ),
        domains=("mixed",),
        rtol=1e-4,
    ),
    "nan_to_num": special(each(jnp.nan_to_num, jnp.isnan, jnp.isinf, jnp.signbit)),
    "float_parts": case(
        lambda x: [*jnp.frexp(x), *jnp.modf(x), jnp.hypot(x, x), jnp.logaddexp(x, 2 * x)],
        domains=("mixed", "positive"),
    ),
}

BITS = {
    "bits": case(
        each(lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lambda x, y: ~x),
        "uint8[b, s] 0:256; uint8[b, s] 0:256",
        covers="and or xor not",
    ),
    "logic": case(
        lambda x, y: [x & y, x | y, x ^ y, ~x], "bool[b, s]; bool[b, s]", covers="and or xor not"
    ),
    "shifts_and_counts": calls(
        "shift_left shift_right_arithmetic shift_right_logical",
        "int32[b, s] -1000:1000; int32[b, s] 0:7",
        *(lambda x, _: lax.population_count(x), lambda x, _: lax.clz(x)),
        also="population_count clz",
    ),
    "comparisons": calls("eq ne lt le gt ge", "b, s; b, s", domains=ALL),
    "comparisons_int": calls("eq ne lt ge", "int32[b, s]; int32[b, s]"),
    "comparisons_in_total_order": special(
        lambda x, y: [p.bind(x, y) for p in primitives("eq_to", "lt_to", "le_to")],
        "b, s; b, s",
        covers="eq_to lt_to le_to",
    ),
}

CHOICES = {
    "where": select(
        lambda x, y: [jnp.where(x > 0, x, y), jnp.where(x > 0, x, 0.0)],
        "b, s; b, s",
        grad=True,
        domains=ALL,
    ),
    "select_n_scalar_predicate": select(
        lambda p, x, y: lax.select_n(p[()] > 0, x, y), "; b, s; b, s", grad=True
    ),
    "select_n_many": select(lambda i, x: lax.select_n(i, x, x + 1, x * 2), "int32[b, s] 0:3; b, s"),
    "select_n_keys": select(lax.select_n, "bool[b]; key[b]; key[b]"),
    "clamp": special(
        lambda x, low: [
            lax.clamp(np.float32(-0.5), x, np.float32(0.5)),
            lax.clamp(low, x, low + 1),
            jnp.clip(x, 0, None),
        ],
        "b, s; b, s",
        covers="clamp",
        grad=True,
    ),
}

TYPES = {
    "convert_element_type": convert(
        lambda x: [x.astype(jnp.bfloat16), x.astype(jnp.complex64), x > 0, x.astype(bool)],
        rtol=1e-2,
    ),
    "convert_element_type_int": convert(
        lambda x: [x.astype(jnp.float32) * 0.5, x.astype(jnp.uint8), x.astype(jnp.int8)],
        "int32[b, s] 0:100",
    ),
    **{
        f"bitcast_{name}": bitcast(lambda x, to=to: lax.bitcast_convert_type(x, to), arg, **options)
        for name, to, arg, options in (
            ("same_width", jnp.int32, "b, s", {"domains": ALL}),
            ("to_narrower", jnp.uint8, "b, s", {}),
            ("to_wider", jnp.uint32, "uint16[b, s, 2] 0:9999", {}),
        )
    },
    "copy": smooth(lambda x: jnp.array(x, copy=True), covers="copy"),
    "stop_gradient_of_factor": smooth(lambda x: x * lax.stop_gradient(x), covers="stop_gradient"),
    "optimization_barrier": barrier(
        lambda x, i, k: lax.optimization_barrier((x * 2, i, k, 3.0)), "b, s; int32[s]; key[b]"
    ),
    "optimization_barrier_gradient": barrier(
        lambda x, y: sum(lax.optimization_barrier((x * 2, y))), "b, s; s", grad=True
    ),
}

CASES = cases(ARITHMETIC | FUNCTIONS | BITS | CHOICES | TYPES | NEWER)
