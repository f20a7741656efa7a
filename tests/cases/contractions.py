"""Contractions, and what users build from them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, Case

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
    *(
        Case(
            f"dot_side_by_side_{name}",
            lambda x, y, numbers=numbers: lax.dot_general(x, y, numbers),
            specs,
            ("dot_general",),
            grad=True,
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
        Case(
            f"dot_changes_sides_{name}",
            lambda x, y, numbers=numbers, options=options: lax.dot_general(
                x, y, numbers, **options
            ),
            specs,
            ("dot_general",),
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
    *(
        Case(
            f"dot_{dtype}",
            lambda x, y: x @ y,
            (Arg("b, s", dtype, low, high), Arg("s, 3", dtype, low, high)),
            ("dot_general",),
            **(LOOSE if "float" in dtype else {}),
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
    Case(
        "dot_float8",
        lambda x, y: lax.dot(
            x.astype(jnp.float8_e4m3fn),
            y.astype(jnp.float8_e5m2),
            preferred_element_type=jnp.float32,
        ),
        ("b, s", "s, 3"),
        ("dot_general",),
    ),
    Case("vdot", jnp.vdot, (Arg("s", "complex64"), Arg("s", "complex64")), ("dot_general",)),
    Case(
        "ragged_dot_rows",
        lax.ragged_dot,
        ("b, 3", "4, 3, 2", Arg("4", "int32", make=_some_groups)),
        ("ragged_dot_general",),
        buckets={"b": 8},
        grad=True,
    ),
    Case(
        "ragged_dot_open_contraction",
        lax.ragged_dot,
        ("b, s", "3, s, 2", Arg("3", "int32", make=_some_groups)),
        ("ragged_dot_general",),
        grad=True,
    ),
    Case(
        "ragged_dot_contracting",
        _ragged(([0], [0]), ([], []), [0], []),
        ("s, 3", "s, b", Arg("4", "int32", make=_some_groups)),
        ("ragged_dot_general",),
    ),
    Case(
        "ragged_dot_batched",
        _ragged(([2], [2]), ([0], [0]), [1], [1]),
        ("b, s, 3", "b, 2, 3, 4", Arg("b, 2", "int32", make=_some_groups)),
        ("ragged_dot_general",),
    ),
    Case(
        "scaled_dot_open_blocks",
        lambda x, y, sx, sy: _scaled(x, y, jnp.exp2(jnp.round(sx)), jnp.exp2(jnp.round(sy))),
        ("2, b, 32*s", "2, 32*s, 3", "2, b, s", "2, s, 3"),
        ("scaled_dot",),
        sizes=SHORT,
    ),
    Case(
        "scaled_dot_one_scale",
        lambda x, y, sx: _scaled(x, y, jnp.exp2(jnp.round(sx)), None),
        ("b, 4*s", "4*s, 3", "b, s"),
        ("scaled_dot",),
        sizes=SHORT,
    ),
]
