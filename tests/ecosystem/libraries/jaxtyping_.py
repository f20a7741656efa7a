"""Jaxtyping: shapes as annotations, checked at run time by beartype, while tracing."""

# No postponed annotations: the checker reads them where they stand, and names are axes.
# ruff: noqa: F722

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ecosystem.model import Model, flags, floats, ints

jaxtyping = pytest.importorskip("jaxtyping", reason="jaxtyping is not installed")
beartype = pytest.importorskip("beartype", reason="beartype is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

from jaxtyping import Array, Bool, Float, Int, PyTree, jaxtyped  # noqa: E402

checked = jaxtyped(typechecker=beartype.beartype)


def weights(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


@checked
def scores(q: Float[Array, "b q d"], k: Float[Array, "b k d"]) -> Float[Array, "b q k"]:
    return jnp.einsum("bqd,bkd->bqk", q, k) / jnp.sqrt(q.shape[-1])


@checked
def attend(
    q: Float[Array, "b q d"], x: Float[Array, "b k d"], valid: Bool[Array, "b k"]
) -> Float[Array, "b q d"]:
    masked = jnp.where(valid[:, None], scores(q, x), -jnp.inf)
    return jax.nn.softmax(masked, axis=-1) @ x


@checked
def loss(
    params: PyTree[Float[Array, "..."]], x: Float[Array, "batch f"], y: Int[Array, " batch"]
) -> Float[Array, ""]:
    logits: Float[Array, "batch 4"] = jnp.tanh(x @ params["w"]) @ params["v"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@checked
def shifted(x: Float[Array, "b s d"]) -> Float[Array, "b s-1 d"]:
    return x[:, 1:] - x[:, :-1]


@checked
def doubled(x: Float[Array, "*batch s d"]) -> Float[Array, "*batch 2*s d"]:
    return jnp.concatenate([x, -x], axis=-2)


def by_annotation(x):
    """A function that asks for what it was given."""
    if isinstance(x, Float[Array, "b s"]):
        return x.sum(axis=1)
    assert isinstance(x, Float[Array, "b s d"])
    return x.sum(axis=(1, 2))


MODELS = [
    Model(
        "cross attention with a mask",
        lambda: (attend,),
        (floats("b, t, 6"), floats("b, s, 6"), flags("b, s")),
        ({"b": 3, "t": 5, "s": 6}, {"b": 4, "t": 8, "s": 8}, {"b": 1, "t": 2, "s": 11}),
    ),
    Model(
        "two layers, gradient",
        lambda: (jax.value_and_grad(loss), {"w": weights(6, 8), "v": weights(8, 4)}),
        (floats("b, 6"), ints("b", 4)),
    ),
    Model("differences (s-1)", lambda: (shifted,), (floats("b, s, 3"),)),
    Model("variadic axes (2*s)", lambda: (doubled,), (floats("b, s, 3"),)),
    Model("isinstance of annotations", lambda: (by_annotation,), (floats("b, s, 3"),)),
]
