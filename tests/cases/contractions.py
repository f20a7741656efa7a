"""Contractions, and what users build from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, cases, family

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


TABLE = {
    "dot_contract_open": dot(lambda x, y: x @ y, "b, s; s, 3"),
    "dot_contract_static": dot(lambda x, y: x @ y, "b, 3; 3, s"),
    "dot_vectors": dot(jnp.dot, "s; s"),
    "dot_special": dot(lambda x, y: x @ y, "b, s; s, 3", domains=("special",), grad=False),
    "dot_batched": dot(lambda x, y: jnp.einsum("bsd,bsf->bdf", x, y), "b, s, 2; b, s, 3"),
    "dot_two_contracted": dot(
        lambda x, y: lax.dot_general(x, y, (((0, 2), (1, 0)), ((), ()))), "b, 3, s; s, b, 2"
    ),
    **{
        f"dot_side_by_side_{name}": dot(
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
    },
    **{
        f"dot_changes_sides_{name}": dot(
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
    },
    "dot_dense_layer": dot(lambda w, x: jnp.tanh(x @ w), "3, 2; b, s, 3"),
    "dot_doubled": dot(lambda x, y: jnp.concatenate([x, x]) @ jnp.concatenate([y, y]), "s; s, 2"),
    **{
        f"dot_{dtype}": dot(
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
    },
    "dot_preferred_type": dot(
        lambda x, y: [
            lax.dot(x, y, preferred_element_type=jnp.int32),
            jnp.matmul(x, y, preferred_element_type=jnp.float32),
        ],
        "int8[b, s] -100:100; int8[s, 3] -100:100",
        grad=False,
    ),
    "dot_float8": dot(
        lambda x, y: lax.dot(
            x.astype(jnp.float8_e4m3fn),
            y.astype(jnp.float8_e5m2),
            preferred_element_type=jnp.float32,
        ),
        "b, s; s, 3",
        grad=False,
    ),
    "dot_highest_precision": dot(
        lambda x, y: jnp.matmul(x, y, precision="highest"), "b, s; s, 3", grad=False
    ),
    "matmul_batched": dot(jnp.matmul, "b, 2, s; b, s, 3"),
    "matmul_vector": dot(lambda x, y: [x @ y, y @ x.T], "b, s; s"),
    "gram": dot(lambda x: [x @ x.T, x.T @ x]),
    "vdot": dot(jnp.vdot, "complex64[s]; complex64[s]", grad=False),
    "vdot_matrices": dot(jnp.vdot, "b, s; b, s"),
    "inner": dot(jnp.inner, "b, s; 3, s"),
    "tensordot": dot(
        lambda x, y: [jnp.tensordot(x, y, 2), jnp.tensordot(x, y, ((1,), (0,)))], "3, b, s; b, s, 2"
    ),
    "outer_product": case(jnp.outer, "b; s"),
    "kron_product": case(jnp.kron, "b, 2; 2, 2"),
    "kron_open": case(jnp.kron, "b; s", grad=False),
    "cross": case(jnp.cross, "b, 3; b, 3"),
    "trace_of_product": case(lambda x: jnp.einsum("ij,ji->", x, x.T)),
    "einsum_three": dot(lambda a, b, c: jnp.einsum("bi,ij,bj->b", a, b, c), "b, s; s, 4; b, 4"),
    "einsum_reduces": case(
        lambda x, y: [jnp.einsum("bsd,sd->b", x, y), jnp.einsum("bsd->sd", x)], "b, s, 2; s, 2"
    ),
    "attention": case(_attention, "b, s, 2, 4; b, s, 2, 4; b, s, 2, 4", sizes=SHORT),
    "attention_of_two_lengths": case(
        _attention,
        "b, t, 2, 4; b, s, 2, 4; b, s, 2, 4",
        sizes=({"b": 2, "s": 5, "t": 3}, {"b": 4, "s": 8, "t": 1}),
    ),
    "jax_nn_attention": case(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        "b, s, 2, 4; b, s, 2, 4; b, s, 2, 4",
        sizes=SHORT,
        grad=False,
    ),
    "cov": case(
        lambda x: [jnp.cov(x), jnp.corrcoef(x), jnp.cov(x, bias=True)],
        "3, s",
        sizes=({"s": 2}, {"s": 5}, {"s": 8}),
        constraints=("s >= 2",),
        rtol=1e-3,
        atol=1e-4,
        grad=False,
    ),
    "cov_of_columns": case(
        lambda x: jnp.cov(x, rowvar=False, ddof=0), "s, 3", rtol=1e-3, atol=1e-4, grad=False
    ),
    "pairwise_distances": case(
        lambda x, y: jnp.sqrt(jnp.sum((x[:, None] - y[None]) ** 2, -1) + 1e-3), "b, 3; s, 3"
    ),
    "ragged_dot_rows": ragged(
        lax.ragged_dot,
        "b, 3; 4, 3, 2",
        Arg("4", "int32", make=_some_groups),
        buckets={"b": 8},
        grad=True,
    ),
    "ragged_dot_open_contraction": ragged(
        lax.ragged_dot, "b, s; 3, s, 2", Arg("3", "int32", make=_some_groups), grad=True
    ),
    "ragged_dot_contracting": ragged(
        _ragged(([0], [0]), ([], []), [0], []), "s, 3; s, b", Arg("4", "int32", make=_some_groups)
    ),
    "ragged_dot_batched": ragged(
        _ragged(([2], [2]), ([0], [0]), [1], [1]),
        "b, s, 3; b, 2, 3, 4",
        Arg("b, 2", "int32", make=_some_groups),
    ),
    "ragged_dot_ragged_batch": ragged(
        _ragged(([2], [1]), ([0], [0]), [0], []),
        "b, 3, s; b, s, 2",
        Arg("3", "int32", make=_some_groups),
    ),
    "scaled_dot_open_blocks": case(
        lambda x, y, sx, sy: _scaled(x, y, jnp.exp2(jnp.round(sx)), jnp.exp2(jnp.round(sy))),
        "2, b, 32*s; 2, 32*s, 3; 2, b, s; 2, s, 3",
        covers="scaled_dot",
        sizes=SHORT,
        grad=False,
    ),
    "scaled_dot_one_scale": case(
        lambda x, y, sx: _scaled(x, y, jnp.exp2(jnp.round(sx)), None),
        "b, 4*s; 4*s, 3; b, s",
        covers="scaled_dot",
        sizes=SHORT,
        grad=False,
    ),
}
CASES = cases(TABLE)
