"""Sizes that the program computes, and uses inside of it.

Results of computed sizes are in `tests.runtime.test_computed_sizes`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tests.harness import family

USUAL: dict[str, Any] = {"prefix": "sized_", "eager": True}
case = family("sized", **USUAL, domains=("mixed", "negative", "positive", "special"))
smooth = family("sized", **USUAL, domains=("mixed", "positive"), grad=True)


def _second_gradient(x: Any) -> Any:
    first = jax.grad(lambda y: jnp.sum(y[y > 0] ** 3))
    return jax.grad(lambda y: jnp.sum(first(y)))(x)


CASES = [
    case("mean", lambda x: jnp.nan_to_num(x[x > 0].mean()), "s"),
    smooth("sum_of_squares", lambda x: jnp.sum(x[x > 0] ** 2), "s"),
    smooth("rows", lambda x: x[x[:, 0] > 0].sum(0)),
    case("columns", lambda x: x[:, x[0] > 0].sum(1)),
    case("elements", lambda x: jnp.sort(x, 1)[x > 0].sum()),
    case("positions", lambda x: [i.sum() for i in jnp.where(x > 0)]),
    smooth("all_pairs", lambda x: jnp.sum(x[x > 0][:, None] * x[x <= 0]), "s"),
    smooth("then_again", lambda x: jnp.sum(x[x > 0] * 2 + x[x > 0]), "s"),
    case("joined", lambda x: jnp.concatenate([x[x > 0], -x[x <= 0]]).sum(), "s"),
    case("number_alone", lambda x: jnp.sum(x > 1) / jnp.float32(1 + jnp.size(x[x > 0])), "s"),
    case("unique", lambda x: jnp.unique(jnp.round(x)).sum(), "s"),
    case("set", lambda x: x.at[x > 0].set(-x[x > 0]).at[x > 1].add(1), "s"),
    smooth("slice", lambda x: x[: jnp.sum(x > 0)].sum(), "s"),
    smooth("slice_between", lambda x: x[jnp.sum(x > 1) : jnp.sum(x > 0)].sum(), "s"),
    smooth("slice_of_columns", lambda x: (x[:, jnp.sum(x[0] > 0) :] ** 2).sum()),
    smooth("set_slice_to_values", lambda x: x.at[: jnp.sum(x > 0)].set(x[x > 0] ** 2), "s"),
    smooth("repeated", lambda x: (x.repeat(jnp.where(x > 1, 2, 1)) ** 2).sum(), "s"),
    case("counted", lambda x: jnp.arange(jnp.sum(x > 0)).sum() + x, "s"),
    smooth("parts", lambda x: jnp.concatenate([x[x > 0], x[~(x > 0)]]) * x, "s"),
    case("second_gradient", _second_gradient, "s"),
    case(
        "in_a_branch",
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: y.sum(), lambda y: y.mean() * 0, x[x < 50]),
        "s",
    ),
]
