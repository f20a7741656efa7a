"""Contractions, and what users build from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, family

case, dot = family(grad=True), family("dot_general", grad=True)
ragged = family("ragged_dot_general")

LOOSE: dict[str, Any] = {"rtol": 3e-2, "atol": 3e-2}
SHORT = ({"b": 1, "s": 7}, {"b": 3, "s": 4}, {"b": 4, "s": 8})


def _ragged(
    contract: tuple[list[int], list[int]],
    batch: tuple[list[int], list[int]],
    ragged: list[int],
    group: list[int],
) -> Any:
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contract, batch),
        lhs_ragged_dimensions=ragged,
        rhs_group_dimensions=group,
    )
    return lambda lhs, rhs, sizes: lax.ragged_dot_general(lhs, rhs, sizes, numbers)


def _scaled(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> Any:
    return lax.scaled_dot(
        lhs.astype(jnp.float8_e4m3fn),
        rhs.astype(jnp.float8_e4m3fn),
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        preferred_element_type=jnp.float32,
    )


def _attention(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _some_groups(x: Any, rng: np.random.Generator) -> Any:
    return rng.integers(0, 3, x.shape).astype(np.int32)


CASES = [
    dot("dot_contract_open", lambda x, y: x @ y, "b, s; s, 3"),
    dot("dot_contract_static", lambda x, y: x @ y, "b, 3; 3, s"),
    dot("dot_vectors", jnp.dot, "s; s"),
    dot("dot_special", lambda x, y: x @ y, "b, s; s, 3", domains=("special",), grad=False),
    dot("dot_batched", lambda x, y: jnp.einsum("bsd,bsf->bdf", x, y), "b, s, 2; b, s, 3"),
    dot(
        "dot_two_contracted",
        lambda x, y: lax.dot_general(x, y, (((0, 2), (1, 0)), ((), ()))),
        "b, 3, s; s, b, 2",
    ),
    *(
        dot(
            f"dot_side_by_side_{name}",
            lambda x, y, numbers=numbers: lax.dot_general(x, y, numbers),
            *specs,
            domains=("mixed", "special"),
        )
        for name, specs, numbers in [
            ("first", ("b, s, 3", "b, s, 2"), (((0, 1), (0, 1)), ((), ()))),
            ("backwards", ("b, s, 3", "b, s, 2"), (((1, 0), (1, 0)), ((), ()))),
            ("crossed", ("b, s, 3", "s, b, 2"), (((0, 1), (1, 0)), ((), ()))),
            ("one_static", ("2, b, 4", "b, 4, 3"), (((1, 2), (0, 1)), ((), ()))),
            ("all_three", ("b, s, 3", "b, s, 3"), (((0, 1, 2), (0, 1, 2)), ((), ()))),
            (
                "two_runs",
                ("b, s, 2, s, 3", "s, 3, 2, b, s"),
                (((0, 1, 3, 4), (3, 4, 0, 1)), ((2,), (2,))),
            ),
            ("in_a_batch", ("2, b, s, t", "b, s, t, 2"), (((1, 2), (0, 1)), ((0, 3), (3, 2)))),
        ]
    ),
    *(
        dot(
            f"dot_changes_sides_{name}",
            lambda x, y, numbers=numbers, options=options: lax.dot_general(
                x, y, numbers, **options
            ),
            *specs,
            grad=name != "integers",
            domains=("mixed", "special"),
            sizes=SHORT,
        )
        for name, specs, numbers, options in [
            ("einsum", ("b, s, 2, 3", "b, 2, s, s"), (((1,), (3,)), ((0, 2), (0, 1))), {}),
            ("open_rows", ("b, s, 2", "b, 8, s"), (((1,), (2,)), ((0,), (0,))), {}),
            (
                "many_free",
                ("3, s, b, 2", "b, 8, 4, s"),
                (((1,), (3,)), ((2,), (0,))),
                {"precision": (lax.Precision.HIGHEST, lax.Precision.DEFAULT)},
            ),
            (
                "as_one",
                ("b, s, 2, 1", "2, 9, b, s"),
                (((0, 1), (2, 3)), ((2,), (0,))),
                {"precision": lax.Precision.HIGHEST},
            ),
            (
                "integers",
                (Arg("s, b, 2", "int8", -9, 9), Arg("b, 9, s", "int8", -9, 9)),
                (((0,), (2,)), ((1,), (0,))),
                {"preferred_element_type": jnp.int32},
            ),
        ]
    ),
    dot("dot_dense_layer", lambda w, x: jnp.tanh(x @ w), "3, 2; b, s, 3"),
    dot(
        "dot_size_expression",
        lambda x, y: jnp.concatenate([x, x]) @ jnp.concatenate([y, y]),
        "s; s, 2",
    ),
    *(
        dot(
            f"dot_{dtype}",
            lambda x, y: x @ y,
            f"{dtype}[b, s] {low}:{high}; {dtype}[s, 3] {low}:{high}",
            grad=False,
            **LOOSE if "float" in dtype else {},
        )
        for dtype, low, high in [
            ("bfloat16", 0, 0),
            ("float16", 0, 0),
            ("complex64", 0, 0),
            ("int32", -9, 9),
            ("uint8", 0, 256),
            ("bool", 0, 1),
        ]
    ),
    dot(
        "dot_preferred_type",
        lambda x, y: [
            lax.dot(x, y, preferred_element_type=jnp.int32),
            jnp.matmul(x, y, preferred_element_type=jnp.float32),
        ],
        "int8[b, s] -100:100; int8[s, 3] -100:100",
        grad=False,
    ),
    dot(
        "dot_float8",
        lambda x, y: lax.dot(
            x.astype(jnp.float8_e4m3fn),
            y.astype(jnp.float8_e5m2),
            preferred_element_type=jnp.float32,
        ),
        "b, s; s, 3",
        grad=False,
    ),
    dot(
        "dot_highest_precision",
        lambda x, y: jnp.matmul(x, y, precision="highest"),
        "b, s; s, 3",
        grad=False,
    ),
    dot("matmul_batched", jnp.matmul, "b, 2, s; b, s, 3"),
    dot("matmul_vector", lambda x, y: [x @ y, y @ x.T], "b, s; s"),
    dot("gram", lambda x: [x @ x.T, x.T @ x]),
    dot("vdot", jnp.vdot, "complex64[s]; complex64[s]", grad=False),
    dot("vdot_matrices", jnp.vdot, "b, s; b, s"),
    dot("inner", jnp.inner, "b, s; 3, s"),
    dot(
        "tensordot",
        lambda x, y: [jnp.tensordot(x, y, 2), jnp.tensordot(x, y, ((1,), (0,)))],
        "3, b, s; b, s, 2",
    ),
    case("outer_product", jnp.outer, "b; s"),
    case("kron_product", jnp.kron, "b, 2; 2, 2"),
    case("kron_open", jnp.kron, "b; s", grad=False),
    case("cross", jnp.cross, "b, 3; b, 3"),
    case("trace_of_product", lambda x: jnp.einsum("ij,ji->", x, x.T)),
    dot("einsum_three", lambda a, b, c: jnp.einsum("bi,ij,bj->b", a, b, c), "b, s; s, 4; b, 4"),
    case(
        "einsum_reduces",
        lambda x, y: [jnp.einsum("bsd,sd->b", x, y), jnp.einsum("bsd->sd", x)],
        "b, s, 2; s, 2",
    ),
    case("attention", _attention, "b, s, 2, 4; b, s, 2, 4; b, s, 2, 4", sizes=SHORT),
    case(
        "attention_of_two_lengths",
        _attention,
        "b, t, 2, 4; b, s, 2, 4; b, s, 2, 4",
        sizes=({"b": 2, "s": 5, "t": 3}, {"b": 4, "s": 8, "t": 1}),
    ),
    case(
        "jax_nn_attention",
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        "b, s, 2, 4; b, s, 2, 4; b, s, 2, 4",
        sizes=SHORT,
        grad=False,
    ),
    case(
        "cov",
        lambda x: [jnp.cov(x), jnp.corrcoef(x), jnp.cov(x, bias=True)],
        "3, s",
        sizes=({"s": 2}, {"s": 5}, {"s": 8}),
        constraints=("s >= 2",),
        rtol=1e-3,
        atol=1e-4,
        grad=False,
    ),
    case(
        "cov_of_columns",
        lambda x: jnp.cov(x, rowvar=False, ddof=0),
        "s, 3",
        rtol=1e-3,
        atol=1e-4,
        grad=False,
    ),
    case(
        "pairwise_distances",
        lambda x, y: jnp.sqrt(jnp.sum((x[:, None] - y[None]) ** 2, -1) + 1e-3),
        "b, 3; s, 3",
    ),
    ragged(
        "ragged_dot_rows",
        lax.ragged_dot,
        "b, 3; 4, 3, 2",
        Arg("4", "int32", make=_some_groups),
        buckets={"b": 8},
        grad=True,
    ),
    ragged(
        "ragged_dot_open_contraction",
        lax.ragged_dot,
        "b, s; 3, s, 2",
        Arg("3", "int32", make=_some_groups),
        grad=True,
    ),
    ragged(
        "ragged_dot_contracting",
        _ragged(([0], [0]), ([], []), [0], []),
        "s, 3; s, b",
        Arg("4", "int32", make=_some_groups),
    ),
    ragged(
        "ragged_dot_batched",
        _ragged(([2], [2]), ([0], [0]), [1], [1]),
        "b, s, 3; b, 2, 3, 4",
        Arg("b, 2", "int32", make=_some_groups),
    ),
    ragged(
        "ragged_dot_ragged_batch",
        _ragged(([2], [1]), ([0], [0]), [0], []),
        "b, 3, s; b, s, 2",
        Arg("3", "int32", make=_some_groups),
    ),
    case(
        "scaled_dot_open_blocks",
        lambda x, y, sx, sy: _scaled(x, y, jnp.exp2(jnp.round(sx)), jnp.exp2(jnp.round(sy))),
        "2, b, 32*s; 2, 32*s, 3; 2, b, s; 2, s, 3",
        covers="scaled_dot",
        sizes=SHORT,
        grad=False,
    ),
    case(
        "scaled_dot_one_scale",
        lambda x, y, sx: _scaled(x, y, jnp.exp2(jnp.round(sx)), None),
        "b, 4*s; 4*s, 3; b, s",
        covers="scaled_dot",
        sizes=SHORT,
        grad=False,
    ),
]
