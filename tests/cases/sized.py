"""Sizes that the program computes, and uses inside of it.

Results of computed sizes are in `tests.tracing.computed.test_computed_sizes`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tests.harness import cases, family

USUAL: dict[str, Any] = {"prefix": "sized_", "eager": True}
case = family("sized", **USUAL, domains=("mixed", "negative", "positive", "special"))
smooth = family("sized", **USUAL, domains=("mixed", "positive"), grad=True)


def _second_gradient(x: Any) -> Any:
    first = jax.grad(lambda y: jnp.sum(y[y > 0] ** 3))
    return jax.grad(lambda y: jnp.sum(first(y)))(x)


TABLE = {
    "mean": case(lambda x: jnp.nan_to_num(x[x > 0].mean()), "s"),
    "sum_of_squares": smooth(lambda x: jnp.sum(x[x > 0] ** 2), "s"),
    "rows": smooth(lambda x: x[x[:, 0] > 0].sum(0)),
    "columns": case(lambda x: x[:, x[0] > 0].sum(1)),
    "elements": case(lambda x: jnp.sort(x, 1)[x > 0].sum()),
    "positions": case(lambda x: [i.sum() for i in jnp.where(x > 0)]),
    "all_pairs": smooth(lambda x: jnp.sum(x[x > 0][:, None] * x[x <= 0]), "s"),
    "then_again": smooth(lambda x: jnp.sum(x[x > 0] * 2 + x[x > 0]), "s"),
    "joined": case(lambda x: jnp.concatenate([x[x > 0], -x[x <= 0]]).sum(), "s"),
    "number_alone": case(lambda x: jnp.sum(x > 1) / jnp.float32(1 + jnp.size(x[x > 0])), "s"),
    "unique": case(lambda x: jnp.unique(jnp.round(x)).sum(), "s"),
    "set": case(lambda x: x.at[x > 0].set(-x[x > 0]).at[x > 1].add(1), "s"),
    "slice": smooth(lambda x: x[: jnp.sum(x > 0)].sum(), "s"),
    "slice_between": smooth(lambda x: x[jnp.sum(x > 1) : jnp.sum(x > 0)].sum(), "s"),
    "slice_of_columns": smooth(lambda x: (x[:, jnp.sum(x[0] > 0) :] ** 2).sum()),
    "set_slice_to_values": smooth(lambda x: x.at[: jnp.sum(x > 0)].set(x[x > 0] ** 2), "s"),
    "repeated": smooth(lambda x: (x.repeat(jnp.where(x > 1, 2, 1)) ** 2).sum(), "s"),
    "counted": case(lambda x: jnp.arange(jnp.sum(x > 0)).sum() + x, "s"),
    "parts": smooth(lambda x: jnp.concatenate([x[x > 0], x[~(x > 0)]]) * x, "s"),
    "second_gradient": case(_second_gradient, "s"),
    "in_a_branch": case(
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: y.sum(), lambda y: y.mean() * 0, x[x < 50]),
        "s",
    ),
}
CASES = cases(TABLE)
