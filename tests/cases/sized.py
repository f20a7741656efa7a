"""Sizes that the program computes, and uses inside of it.

Results of computed sizes are in `tests.runtime.test_computed_sizes`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.harness import Case

ALL = ("mixed", "negative", "positive", "special")


def _case(name: str, fn: Callable[..., Any], *shapes: str, grad: bool = False) -> Case:
    domains = ("mixed", "positive") if grad else ALL
    covers = ("sized",)
    return Case(f"sized_{name}", fn, shapes, covers, grad=grad, domains=domains, eager=True)


def _second_gradient(x: Any) -> Any:
    first = jax.grad(lambda y: jnp.sum(y[y > 0] ** 3))
    return jax.grad(lambda y: jnp.sum(first(y)))(x)


CASES = [
    _case("mean", lambda x: jnp.nan_to_num(x[x > 0].mean()), "s"),
    _case("sum_of_squares", lambda x: jnp.sum(x[x > 0] ** 2), "s", grad=True),
    _case("rows", lambda x: x[x[:, 0] > 0].sum(0), "b, s", grad=True),
    _case("columns", lambda x: x[:, x[0] > 0].sum(1), "b, s"),
    _case("elements", lambda x: jnp.sort(x, 1)[x > 0].sum(), "b, s"),
    _case("positions", lambda x: [i.sum() for i in jnp.where(x > 0)], "b, s"),
    _case("all_pairs", lambda x: jnp.sum(x[x > 0][:, None] * x[x <= 0]), "s", grad=True),
    _case("then_again", lambda x: jnp.sum(x[x > 0] * 2 + x[x > 0]), "s", grad=True),
    _case("joined", lambda x: jnp.concatenate([x[x > 0], -x[x <= 0]]).sum(), "s"),
    _case("number_alone", lambda x: jnp.sum(x > 1) / jnp.float32(1 + jnp.size(x[x > 0])), "s"),
    _case("unique", lambda x: jnp.unique(jnp.round(x)).sum(), "s"),
    _case("set", lambda x: x.at[x > 0].set(-x[x > 0]).at[x > 1].add(1), "s"),
    _case("slice", lambda x: x[: jnp.sum(x > 0)].sum(), "s", grad=True),
    _case("slice_between", lambda x: x[jnp.sum(x > 1) : jnp.sum(x > 0)].sum(), "s", grad=True),
    _case("slice_of_columns", lambda x: (x[:, jnp.sum(x[0] > 0) :] ** 2).sum(), "b, s", grad=True),
    _case(
        "set_slice_to_values", lambda x: x.at[: jnp.sum(x > 0)].set(x[x > 0] ** 2), "s", grad=True
    ),
    _case("repeated", lambda x: (x.repeat(jnp.where(x > 1, 2, 1)) ** 2).sum(), "s", grad=True),
    _case("counted", lambda x: jnp.arange(jnp.sum(x > 0)).sum() + x, "s"),
    _case("parts", lambda x: jnp.concatenate([x[x > 0], x[~(x > 0)]]) * x, "s", grad=True),
    _case("second_gradient", _second_gradient, "s"),
    _case(
        "in_a_branch",
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: y.sum(), lambda y: y.mean() * 0, x[x < 50]),
        "s",
    ),
]
