"""What draws need beyond the cases: 64-bit words, generators of the user's."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import random
from jax.extend.random import define_prng_impl, threefry_2x32

from bucketjit.errors import MaskingError
from tests.harness import Arg, Case, check


@pytest.mark.parametrize("partitionable", [True, False])
def test_64_bit_draws(partitionable: bool) -> None:
    def fn(key: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        return random.bits(key, x.shape, jnp.uint64), random.normal(key, x.shape, jnp.float64)

    case = Case("x64", fn, (Arg("", "key"), "b, s"), sizes=({"b": 3, "s": 5},), domains=("mixed",))
    with jax.enable_x64(True), jax.threefry_partitionable(partitionable):
        check(case)


def _user_generator(name: str, traceable: bool) -> jax.Array:
    def bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        size = math.prod(shape) if traceable else int(math.prod(shape))
        counts = jnp.arange(size, dtype=jnp.uint32)
        return threefry_2x32(key, jnp.concatenate([counts, counts]))[:size].reshape(shape)

    impl = define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.stack([seed, seed]).astype(jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
        random_bits=bits,
        fold_in=lambda key, data: key + data.astype(jnp.uint32),
        name=name,
    )
    return random.key(3, impl=impl)


def test_generator_of_the_user() -> None:
    key = _user_generator("traceable", True)

    def fn(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return random.bits(key, x.shape), random.key_data(random.split(key, x.shape[0]))

    check(Case("user", fn, ("b, s",), domains=("mixed",)))


def test_generator_that_cannot_be_traced() -> None:
    key = _user_generator("untraceable", False)
    with pytest.raises(MaskingError, match="random_bits: the generator cannot be traced"):
        check(Case("user", lambda x: random.bits(key, x.shape), ("b, s",), domains=("mixed",)))
