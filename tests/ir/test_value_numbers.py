"""Which values of a trace are found to be equal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit._ir.value_numbers import ValueNumbers


@jax.jit
def double(x: Any) -> Any:
    return x * 2, x + 1


def noisy(x: Any) -> Any:
    jax.debug.print("{}", x[0])
    return x.sum()


PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], bool]] = {
    "same": (lambda x: x > 0, lambda x: x > 0, True),
    "other_number": (lambda x: x > 0, lambda x: x > 1, False),
    "other_operation": (lambda x: x > 0, lambda x: x >= 0, False),
    "other_type": (lambda x: x.astype(int), lambda x: x.astype(jnp.int8), False),
    "under_jit": (lambda x: jnp.clip(x, 0, 1), lambda x: jnp.clip(x, 0, 1), True),
    "under_jit_other": (lambda x: jnp.clip(x, 0, 1), lambda x: jnp.clip(x, 0, 2), False),
    "inlined": (lambda x: double(x)[0], lambda x: x * 2, True),
    "result_of_jit": (lambda x: double(x)[0], lambda x: double(x)[1], False),
    "count": (lambda x: jnp.count_nonzero(x > 0), lambda x: jnp.sum(x > 0), True),
    "count_of_negated": (lambda x: jnp.count_nonzero(x > 0), lambda x: jnp.sum(x <= 0), False),
    "effect": (jax.jit(noisy), jax.jit(noisy), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equal_values_have_equal_numbers(name: str) -> None:
    one, other, are_equal = PAIRS[name]
    found: list[bool] = []

    def fn(x: Any) -> Any:
        numbers = ValueNumbers()
        found.append(numbers.of(one(x)) == numbers.of(other(x)))
        return x

    jax.make_jaxpr(fn)(np.ones(3, np.float32))
    assert found == [are_equal]


def test_an_integer_has_one_number_in_all_types_that_hold_every_size() -> None:
    def fn(x: Any) -> Any:
        numbers, k = ValueNumbers(), jnp.sum(x > 0)
        assert numbers.of_integer(k.astype(np.uint32)) == numbers.of_integer(k)
        assert numbers.of_integer(k.astype(np.int8)) != numbers.of_integer(k)
        assert numbers.of_integer(k.astype(np.float32)) != numbers.of_integer(k)
        return k

    jax.make_jaxpr(fn)(np.ones(3, np.float32))
