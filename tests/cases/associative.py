"""``lax.associative_scan`` over open axes, and what JAX itself builds on it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, cases, family


def scan(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *elems: lax.associative_scan(fn, elems if len(elems) > 1 else elems[0], **options)


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

    return lax.associative_scan(lambda left, right: left + right + jnp.tanh(w) * left * right, x)


def resetting(x: Any, reset: Any) -> Any:
    """Sums that start over where ``reset`` says."""

    def combine(left: Any, right: Any) -> Any:
        (a, ra), (b, rb) = left, right
        return jnp.where(rb, b, a + b), ra | rb

    return lax.associative_scan(combine, (x, reset))[0]


def scaled(x: Any, rng: np.random.Generator) -> Any:
    return (x / np.sqrt(max(1, x.shape[-1]))).astype(x.dtype)


def place(x: Any) -> Any:
    """A position among three, of floats."""
    return (10 * jnp.abs(x[..., 0])).astype(int) % 3


SIZES = ({"s": 1, "b": 4, "f": 2}, {"s": 5, "b": 1, "f": 3}, {"s": 8, "b": 3, "f": 4})
FEW = ({"s": 3, "b": 4}, {"s": 4, "b": 2})
USUAL: dict[str, Any] = {
    **{"prefix": "associative_", "rtol": 1e-3, "atol": 1e-4},
    **{"domains": ("mixed",), "sizes": SIZES, "grad": True},
}
# Derivatives of derivatives, and large programs for each of the steps, are slow.
case, slow = (family("associative_scan", **USUAL, slow=is_slow) for is_slow in (False, True))


def invertible(x: Any, rng: np.random.Generator) -> Any:
    return (2 * np.eye(x.shape[-1]) + scaled(x, rng) / 4).astype(x.dtype)


def near_one(x: Any, rng: np.random.Generator) -> Any:
    return (1 + x / 8).astype(x.dtype)


TABLE = {
    "sum": case(scan(lax.add), "s"),
    "sum_rows": case(scan(lax.add, axis=1)),
    "sum_reverse": case(scan(lax.add, axis=1, reverse=True)),
    "sum_int": case(scan(lax.add), "int32[s, b]", grad=False),
    "sum_seven": case(scan(lax.add), "s", buckets={"s": 7}, sizes=({"s": 2}, {"s": 7})),
    "max_special": case(scan(jnp.maximum), "s, 2", domains=("mixed", "special"), grad=False),
    "product": case(scan(lax.mul), Arg("s, 2", make=near_one)),
    "matrices": case(scan(jnp.matmul), Arg("s, 3, 3", make=scaled)),
    "matrices_of_open_size": slow(
        scan(lambda a, b: jnp.einsum("nij,njk->nik", b, a), reverse=True),
        Arg("s, f, f", make=scaled),
    ),
    "recurrence": case(scan(recurrence, axis=1), Arg("b, s", make=near_one), "b, s"),
    "state_space": case(state_space, "b, s, 2; b, s, 3; 2, 3"),
    "closed_over": case(closed_over, Arg("s, 2", make=scaled), "2"),
    "closed_over_open": case(closed_over, Arg("s, b", make=scaled), "b"),
    "resetting_vmap": case(jax.vmap(resetting), "b, s; bool[b, s]"),
    "resetting": case(resetting, "s; bool[s]"),
    "vmap": case(jax.vmap(scan(recurrence)), Arg("b, s", make=near_one), "b, s"),
    "vmap_closed": slow(jax.vmap(closed_over, in_axes=(None, 0)), Arg("s, 2", make=scaled), "b, 2"),
    "per_example_gradient": case(
        jax.vmap(jax.grad(lambda w, x: jnp.sum(closed_over(x, w) ** 2)), in_axes=(None, 0)),
        "2; b, s, 2",
        buckets={"s": 4},
        sizes=FEW,
        grad=False,
    ),
    "tangent": slow(
        lambda a, b: jax.jvp(scan(recurrence), (a, b), (b, a)), Arg("s", make=near_one), "s"
    ),
    "hessian": slow(
        jax.hessian(lambda x: jnp.sum(jnp.sin(jnp.cumprod(x)))),
        Arg("s", make=near_one),
        buckets={"s": 4},
        sizes=FEW,
        grad=False,
    ),
    "linear_transpose": case(
        lambda x, t: jax.linear_transpose(
            jax.vjp(scan(lax.mul), x)[1], jax.ShapeDtypeStruct(x.shape, x.dtype)
        )((t,)),
        Arg("s", make=near_one),
        "s",
    ),
    "second_order_closed": slow(
        lambda x, w: jax.hessian(lambda w: jnp.sum(closed_over(x, w) ** 2))(w),
        Arg("s, 2", make=scaled),
        "2",
        buckets={"s": 4},
        sizes=FEW,
        grad=False,
    ),
    "in_scan": case(lambda x: lax.scan(lambda c, r: (c + 1, scan(lax.add)(r * c)), 1.0, x)[1]),
    "remat": case(jax.checkpoint(scan(lax.mul)), Arg("s", make=near_one)),
    # gathers and scatters that have the scanned axis for a batch axis; in steps of 0 elements too
    **{
        name: slow(fn, Arg("s, 3, 3", make=invertible), buckets={"s": 4}, sizes=FEW, grad=grad)
        for name, fn, grad in (
            ("inverse", scan(lambda a, b: jnp.linalg.inv(a) @ b + b), True),
            ("solve", scan(lambda a, b: jnp.linalg.solve(a, b) + b), False),
        )
    },
    **{
        f"row_{name}": made(scan(fn), "s, 3", buckets={"s": 6}, sizes=({"s": 5},), grad=grad)
        for made, name, fn, grad in (
            (case, "sorted", lambda a, b: a + jnp.take_along_axis(b, jnp.argsort(b, -1), -1), True),
            (case, "read", jax.vmap(lambda a, b: b + a[place(b)] / 9), False),
            (case, "filled", jax.vmap(lambda a, b: b + a.at[place(b) + 1].get(mode="fill")), False),
            (case, "set", jax.vmap(lambda a, b: b.at[place(a)].set(a[0] / 9)), False),
            (slow, "added", jax.vmap(lambda a, b: b.at[place(jnp.stack([a, b]))].add(a[:2])), True),
        )
    },
    # what JAX builds on it
    "cumprod_gradient": case(
        jax.grad(lambda x: jnp.sum(jnp.sin(jnp.cumprod(x)))), Arg("s", make=near_one), grad=False
    ),
    "cummax_gradient": case(jax.grad(lambda x: jnp.sum(jnp.sin(lax.cummax(x)))), "s", grad=False),
    "cumlogsumexp_gradient": slow(
        jax.grad(lambda x: jnp.sum(jnp.sin(lax.cumlogsumexp(x, axis=1, reverse=True)))), grad=False
    ),
}
CASES = cases(TABLE)
