"""``lax.associative_scan`` over open axes, and what JAX itself builds on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, Case

SCAN = ("associative_scan",)


def scan(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *elems: lax.associative_scan(
        fn, elems if len(elems) > 1 else elems[0], **options
    )


def recurrence(left: Any, right: Any) -> Any:
    """``h' = a h + b``, the linear recurrence of state space models."""
    (a, b), (c, d) = left, right
    return a * c, b * c + d


def state_space(a: Any, x: Any, w: Any) -> Any:
    """A gated linear layer with its parameters outside of the scan."""
    gate = jax.nn.sigmoid(a @ w)
    return lax.associative_scan(recurrence, (gate, x), axis=-2)[1]


def closed_over(x: Any, w: Any) -> Any:
    """A function that closes over what is differentiated too."""

    def combine(left: Any, right: Any) -> Any:
        return left + right * jnp.tanh(w) - jnp.tanh(w) * right + jnp.tanh(w).sum() * 0.1

    return lax.associative_scan(combine, x)


def resetting(x: Any, reset: Any) -> Any:
    """Sums that start over where ``reset`` says."""

    def combine(left: Any, right: Any) -> Any:
        (a, ra), (b, rb) = left, right
        return jnp.where(rb, b, a + b), ra | rb

    return lax.associative_scan(combine, (x, reset))[0]


def first_real(x: Any, rng: np.random.Generator) -> Any:
    return (x / np.sqrt(max(1, x.shape[-1]))).astype(x.dtype)


def second_order(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    inner = jax.grad(lambda x: jnp.sum(jnp.sin(fn(x))))
    return jax.grad(lambda x: jnp.sum(inner(x) ** 2))


def _case(name: str, fn: Any, *args: Any, **options: Any) -> Case:
    options.setdefault("rtol", 1e-3)
    options.setdefault("atol", 1e-4)
    return Case(f"associative_{name}", fn, args, options.pop("covers", SCAN), **options)


def near_one(x: Any, rng: np.random.Generator) -> Any:
    return (1 + x / 8).astype(x.dtype)


CASES = [
    _case("sum", scan(lax.add), "s", grad=True),
    _case("sum_rows", scan(lax.add, axis=1), "b, s", grad=True),
    _case("sum_reverse", scan(lax.add, axis=-1, reverse=True), "b, s", grad=True),
    _case("sum_int", scan(lax.add), Arg("s, b", "int32")),
    _case("sum_seven", scan(lax.add), "s", buckets={"s": 7}, grad=True),
    _case("max_special", scan(jnp.maximum), "s, 2", domains=("mixed", "special")),
    _case("product", scan(lax.mul), Arg("s, 2", make=near_one), grad=True),
    _case("matrices", scan(jnp.matmul), Arg("s, 3, 3", make=first_real), grad=True),
    _case(
        "matrices_of_open_size",
        scan(lambda a, b: jnp.einsum("nij,njk->nik", b, a), reverse=True),
        Arg("s, f, f", make=first_real),
        grad=True,
    ),
    _case(
        "recurrence",
        scan(recurrence, axis=1),
        Arg("b, s", make=near_one),
        "b, s",
        grad=True,
    ),
    _case("state_space", state_space, "b, s, 2", "b, s, 3", "2, 3", grad=True),
    _case("closed_over", closed_over, "s, 2", "2", grad=True),
    _case("closed_over_open", closed_over, "s, b", "b", grad=True),
    _case("resetting", resetting, "s", Arg("s", "bool"), grad=True),
    _case("vmap", jax.vmap(scan(recurrence)), Arg("b, s", make=near_one), "b, s", grad=True),
    _case(
        "vmap_closed",
        jax.vmap(closed_over, in_axes=(None, 0)),
        "s, 2",
        "b, 2",
        grad=True,
    ),
    _case(
        "per_example_gradient",
        jax.vmap(jax.grad(lambda w, x: jnp.sum(closed_over(x, w) ** 2)), in_axes=(None, 0)),
        "2",
        "b, s, 2",
    ),
    _case(
        "tangent",
        lambda a, b: jax.jvp(scan(recurrence), (a, b), (b, a)),
        Arg("s", make=near_one),
        "s",
        grad=True,
    ),
    _case("second_order", second_order(scan(lax.mul)), Arg("s", make=near_one)),
    _case(
        "second_order_closed",
        lambda x, w: jax.hessian(lambda w: jnp.sum(closed_over(x, w) ** 2))(w),
        "s, 2",
        "2",
    ),
    _case("in_scan", lambda x: lax.scan(lambda c, r: (c + 1, scan(lax.add)(r * c)), 1.0, x)[1],
          "b, s", grad=True),
    _case("remat", jax.checkpoint(scan(lax.mul)), Arg("s", make=near_one), grad=True),
    # what JAX builds on it
    _case("cumprod_gradient", jax.grad(lambda x: jnp.sum(jnp.sin(jnp.cumprod(x)))),
          Arg("s", make=near_one)),
    _case("cummax_gradient", jax.grad(lambda x: jnp.sum(jnp.sin(lax.cummax(x)))), "s"),
    _case("cumlogsumexp_gradient",
          jax.grad(lambda x: jnp.sum(jnp.sin(lax.cumlogsumexp(x, axis=1, reverse=True)))), "b, s"),
]
