from collections.abc import Callable
from typing import assert_type

import jax
import numpy as np

import bucketjit
from bucketjit import BucketedExec
from bucketjit.strategies import Linear
from bucketjit.types import DynamicAxes, Stats


def loss(weights: dict[str, jax.Array], x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return (x @ weights["w"]).mean() * scale


def count(x: np.ndarray, names: tuple[str, ...]) -> tuple[jax.Array, int]:
    return jax.numpy.sum(x), len(names)


weights = {"w": jax.numpy.ones((3,))}
x = jax.numpy.ones((5, 3))

# --- the signature and the result type are those of the function ---

bucketed = BucketedExec(loss).with_pow2(min=4).with_maxsize(8)
assert_type(bucketed(weights, x), jax.Array)
assert_type(bucketed(weights, x=x, scale=2.0), jax.Array)
bucketed(weights, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
bucketed(weights)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
bucketed(weights, x, scale="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
bucketed(weights, x, rate=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
text: str = bucketed(weights, x)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

direct = bucketjit.jit(count, static_argnames="names", buckets=[8, 64])
assert_type(direct(np.ones(3), ("a",)), tuple[jax.Array, int])


@bucketjit.jit
def plain(x: jax.Array) -> jax.Array:
    return x * 2


@bucketjit.jit(buckets={"b": "pow2", "s": Linear(8)}, dynamic_axes="b, s", overflow={"s": "extend"})
def decorated(x: jax.Array, k: int = 0) -> tuple[jax.Array, jax.Array]:
    return x, x + k


assert_type(plain(x), jax.Array)
assert_type(plain.__wrapped__(x), jax.Array)
assert_type(decorated(x, 3), tuple[jax.Array, jax.Array])
plain("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
decorated(x, "3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
function: Callable[[jax.Array], jax.Array] = plain
stats: Stats = plain.stats()


class Model:
    @bucketjit.jit(static_argnums=0)
    def apply(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        return x


assert_type(Model().apply(x, train=True), jax.Array)
Model().apply(x, train="yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

# --- texts and axes ---

axes: DynamicAxes = ({"ids": "b, s", "mask": ("b", None)}, [0, 1], None, {0: "b"})
BucketedExec(loss, fallback="error", check="poison", out="numpy", overflow="extend")
BucketedExec(loss, fallback="never")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
BucketedExec(loss, out="list")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
BucketedExec(loss, buckets="pow3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
BucketedExec(loss, dynamic_axes=1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
BucketedExec(loss, static_argnum=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
bucketed.with_overflow("grow")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

# --- the wrappers for other libraries keep them too ---

filtered = bucketjit.integrations.equinox.filter_jit(loss)
assert_type(filtered(weights, x, scale=2.0), jax.Array)
filtered(weights)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


class Module:
    @bucketjit.integrations.nnx.jit(donate_argnames="self")
    def step(self, x: jax.Array) -> jax.Array:
        return x


assert_type(Module().step(x), jax.Array)
Module().step("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
