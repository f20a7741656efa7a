"""Sizes that the program computes, and uses inside of it.

Results of computed sizes are in `tests.runtime.test_computed_sizes`.
"""

from __future__ import annotations

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
    _case("slice", lambda x: x[: jnp.sum(x > 0)].sum(), "s", grad=True),
    _case("slice_between", lambda x: x[jnp.sum(x > 1) : jnp.sum(x > 0)].sum(), "s", grad=True),
    _case("slice_of_columns", lambda x: (x[:, jnp.sum(x[0] > 0) :] ** 2).sum(), "b, s", grad=True),
    _case("parts", lambda x: jnp.concatenate([x[x > 0], x[~(x > 0)]]) * x, "s", grad=True),
    _case("second_gradient", _second_gradient, "s"),
]
