"""Bounds of integers while they are traced, and which values are equal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from bucketjit._ir.bounds import is_never_negative
from bucketjit._ir.expressions import evaluate
from bucketjit._ir.ranges import Range, is_at_most, quotient, range_of_array, times
from bucketjit._tracing.computed.values import Bounds, ValueNumbers


def whole(x: Any) -> Any:
    return jnp.round(3 * x).astype(jnp.int32)


# Functions of an array of size n, each with the bounds of its values.
FOUND: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (lambda x: jnp.int32(7), "7 to 7"),
    "array": (lambda x: jnp.array([3, -2, 5]), "-2 to 5"),
    "mask": (lambda x: x > 0, "0 to 1"),
    "byte": (lambda x: whole(x).astype(jnp.uint8), "0 to 255"),
    "unsigned": (lambda x: whole(x).astype(jnp.uint32), "0 to None"),
    "unknown": (whole, "None to None"),
    "size": (lambda x: jnp.asarray(x.shape[0]), "n to n"),
    "sum_of_mask": (lambda x: jnp.sum(x > 0), "0 to n"),
    "sum_of_matrix": (lambda x: jnp.sum(x[:, None] > x), "0 to n^2"),
    "last_of_cumsum": (lambda x: jnp.cumsum(x > 0)[-1], "0 to n"),
    "argmax": (jnp.argmax, "0 to n - 1"),
    "rest_after_argmax": (lambda x: x.shape[0] - 1 - jnp.argmax(x), "0 to n - 1"),
    "argsort": (jnp.argsort, "0 to n - 1"),
    "iota": (lambda x: jnp.arange(x.shape[0])[::-1], "0 to n - 1"),
    "sigmoid": (lambda x: (jax.nn.sigmoid(x) * 4).astype(int), "0 to 4"),
    "tanh": (lambda x: (jnp.tanh(x) * 2 + 2).astype(int), "0 to 4"),
    "sin_and_cos": (lambda x: (jnp.sin(x) * 2 - jnp.cos(x)).astype(int), "-3 to 3"),
    "decay": (lambda x: (3 * jnp.exp(-jnp.abs(x))).astype(int), "0 to 3"),
    "softmax": (lambda x: (jax.nn.softmax(x) * 4).astype(int), "0 to 4"),
    "other_share": (
        lambda x: ((y := jnp.outer(x, x) ** 2) / y.sum(0)[:, None]).astype(int),
        "None to None",
    ),
    "least": (lambda x: jnp.minimum(whole(x), 5), "None to 5"),
    "most": (lambda x: jnp.maximum(whole(x), 5), "5 to None"),
    "clip": (lambda x: jnp.clip(whole(x), 1, 4), "1 to 4"),
    "clamp": (lambda x: lax.clamp(1, whole(x), 4), "1 to 4"),
    "clip_to_size": (lambda x: jnp.clip(whole(x), 0, x.shape[0]), "0 to n"),
    "least_of_both": (lambda x: jnp.minimum(jnp.sum(x > 0), 5), "0 to min(n, 5)"),
    "absolute": (lambda x: jnp.abs(whole(x)), "None to None"),
    "absolute_of_clip": (lambda x: jnp.abs(jnp.clip(whole(x), -3, 2)), "0 to 3"),
    "negative": (lambda x: -jnp.clip(whole(x), -3, 2), "-2 to 3"),
    "product": (lambda x: jnp.clip(whole(x), -3, 2) * 2, "-6 to 4"),
    "negative_product": (lambda x: jnp.sum(x > 0) * -2, "- 2*n to 0"),
    "corners": (lambda x: jnp.clip(whole(x), -3, 2) * jnp.clip(whole(x), -1, 4), "-12 to 8"),
    "square": (lambda x: jnp.clip(whole(x), -3, 2) ** 2, "None to None"),
    "half": (lambda x: jnp.sum(x > 0) // 2, "0 to floordiv(n, 2)"),
    "half_of_negative": (lambda x: jnp.clip(whole(x), -3, 3) // 2, "-2 to 1"),
    "rest": (lambda x: whole(x) % 4, "0 to 3"),
    "where": (lambda x: jnp.where(x > 0, 3, jnp.argmin(x)), "0 to max(n - 1, 3)"),
    "joined": (lambda x: jnp.concatenate([jnp.arange(3), jnp.array([7])]), "0 to 7"),
    "filled": (lambda x: lax.pad(jnp.arange(3), -2, [(1, 1, 0)]), "-2 to 2"),
    "taken": (lambda x: jnp.array([4, 9]).at[whole(x)].get(mode="clip"), "4 to 9"),
    "taken_or_filled": (
        lambda x: jnp.array([4, 9]).at[whole(x)].get(mode="fill"),
        f"{(-(2**31))} to 9",
    ),
    "set": (lambda x: jnp.zeros(4, int).at[whole(x)].set(3), "0 to 3"),
    "counted": (lambda x: jnp.bincount(whole(x), length=5), "0 to n"),
    "largest": (lambda x: jnp.max(jnp.clip(whole(x), 1, 4)), "1 to 4"),
    "largest_of_some": (lambda x: jnp.max(jnp.clip(whole(x), 1, 4)[: x.shape[0] - 1]), "None to 4"),
    "smallest": (lambda x: jnp.min(jnp.clip(whole(x), 1, 4)), "1 to 4"),
    "float": (lambda x: jnp.clip(x, 0.5, 2.5), "0 to 3"),
    "random": (lambda x: jax.random.randint(jax.random.key(0), (), 0, 7), "0 to 7"),
    "branch": (lambda x: lax.cond(x[0] > 0, lambda: 3, lambda: jnp.sum(x > 0)), "0 to max(n, 3)"),
    "scan": (lambda x: lax.scan(lambda c, a: (jnp.minimum(c + 1, 9), a > 0), 0, x)[0], "0 to 9"),
    "stacked": (lambda x: lax.scan(lambda c, a: (c, jnp.int32(a > 0)), 0, x)[1], "0 to 1"),
    "searched": (lambda x: jnp.searchsorted(jnp.arange(5.0), x), "0 to 5"),
    "functions_of_users": (
        lambda x: searchsorted(x, 0) + floor_divide(jnp.sum(x > 0), 2),
        "1 to 5*n + 1",
    ),
    "of_unsigned": (lambda x: bits(x).astype(jnp.int32), "None to None"),
    "rest_of_unsigned": (lambda x: lax.rem(bits(x).astype(jnp.int32), 3), "-2 to 2"),
    "of_wrapped": (
        lambda x: (jnp.sum(x > 0).astype(jnp.uint32) - np.uint32(4)).astype(jnp.int32),
        "None to None",
    ),
    "unsigned_size": (lambda x: jnp.sum(x > 0).astype(jnp.uint32).astype(jnp.int32), "0 to n"),
    "hundred_times": (lambda x: jnp.sum(x > 0) * 100, "0 to 100*n"),
    "wrapping_product": (lambda x: x.shape[0] * jnp.int32(1103515245), "None to None"),
    "wrapping_sum": (lambda x: jnp.sum(x > 0) + jnp.int32(2**31 - 1), "None to None"),
    "wrapping_unknown_sum": (lambda x: jnp.maximum(whole(x), 5) + 1, "None to None"),
    "difference_of_most": (lambda x: jnp.sum(x > 0) - jnp.maximum(whole(x), 0), "None to n"),
    "wrapping_byte": (lambda x: jnp.sum(x > 0, dtype=np.uint8) + np.uint8(250), "0 to 255"),
    "nan_to_integer": (lambda x: jnp.clip(jnp.sum(x) * jnp.nan, -9, -5).astype(int), "-9 to 0"),
    "to_bfloat16": (lambda x: jnp.sum(x > 0).astype(jnp.bfloat16), "0 to None"),
    "to_float16": (lambda x: jnp.sum(x > 0).astype(jnp.float16), "0 to None"),
    "number_to_bfloat16": (
        lambda x: jnp.clip(whole(x), 257, 259).astype(jnp.bfloat16),
        "256 to 260",
    ),
    "to_float32": (lambda x: jnp.floor(jnp.sum(x > 0).astype(jnp.float32) * 0.5) + 1, "1 to None"),
    "sum_of_bfloat16": (lambda x: bfloat16_sum(x > 0), "None to None"),
    "reduced_precision": (
        lambda x: lax.reduce_precision(jnp.clip(x, 0, 255), 8, 4),
        "None to None",
    ),
    "behind_barrier": (lambda x: lax.optimization_barrier((x, jnp.sum(x > 0)))[1], "0 to n"),
    "put": (lambda x: jax.device_put((x, jnp.sum(x > 0)))[1], "0 to n"),
    "of_a_key": (
        lambda x: jax.random.randint(jax.random.key(0), (), 0, x.shape[0]),
        "0 to min(2147483647, n)",
    ),
}


@jax.jit
def searchsorted(a: Any, v: Any) -> Any:
    return jnp.sum(a > v) * 3


@jax.jit
def floor_divide(a: Any, b: Any) -> Any:
    return a * b + 1


@jax.jit
def bfloat16_sum(mask: Any) -> Any:
    return lax.reduce(mask.astype(jnp.bfloat16), np.zeros((), jnp.bfloat16), lax.add, (0,))


def bits(x: Any) -> Any:
    return jax.random.bits(jax.random.key(x.shape[0]))


@pytest.mark.sampled(
    *(9, "square", "to_float32", "half_of_negative", "taken_or_filled", "to_float16"),
    *("sum_of_bfloat16", "decay", "last_of_cumsum", "searched", "scan", "set", "clamp", "taken"),
)
@pytest.mark.parametrize("name", FOUND)
def test_bounds_are_found_and_hold(name: str) -> None:
    fn, told = FOUND[name]
    (n,) = export.symbolic_shape("n", constraints=["n >= 2"])
    found: list[Range] = []

    def traced(x: Any) -> Any:
        result = fn(x)
        found.append(Bounds().of(result))
        return result

    jax.make_jaxpr(traced)(jax.ShapeDtypeStruct((n,), np.float32))
    (bounds,) = found
    assert f"{bounds.low} to {bounds.high}" == told
    rng = np.random.default_rng(0)
    real = jax.jit(fn)
    for size in (2, 8):
        for scale in (0.1, 1, 10):
            values = np.asarray(real(jnp.asarray(rng.standard_normal(size) * scale, jnp.float32)))
            if bounds.low is not None:
                assert values.min() >= evaluate(bounds.low, {"n": size})
            if bounds.high is not None:
                assert values.max() <= evaluate(bounds.high, {"n": size})


def test_which_bound_is_larger() -> None:
    n, m = export.symbolic_shape("n, m")
    assert is_at_most(n - 1, n) and is_at_most(0, n - 1) and is_at_most(n, n + m)
    assert not is_at_most(n, m) and not is_at_most(n, 5) and not is_at_most(None, n)
    assert is_at_most(n // 2, n) and not is_at_most((n - 5) // 2, n - 5)
    least = Range(n, n) | Range(m, m)
    assert is_at_most(least.low, n) and is_at_most(least.low, m) and is_at_most(m, least.high)
    assert not is_at_most(n, least.low) and not is_at_most(least.high, n)


def test_bounds_of_variables_decide_more() -> None:
    n, size_1, size_2 = export.symbolic_shape("n, size_1, size_2")
    most_of = (("size_1", str(n + 1)), ("size_2", str(size_1)))

    def at_most(one: Any, other: Any) -> bool:
        return is_never_negative(str(other - one), most_of)

    assert not is_at_most(size_1 - 1, n) and at_most(size_1 - 1, n)
    assert at_most(0, n - size_1 + 1) and at_most(size_2 - 1, n)
    assert at_most(size_1 + size_2 - 2, 2 * n)
    assert not at_most(size_1, n) and not at_most(n, size_1)
    assert not at_most(size_1**2 - 1, n)


def test_ranges_of_arithmetic_and_of_keys() -> None:
    n, m = export.symbolic_shape("n, m")
    assert Range(0, n) * Range(2, m) == Range(0, n * m)
    assert Range(-n, n) * Range(3, 3) == Range(-3 * n, 3 * n)
    assert Range(-n, n) * Range(-n, n) == Range()
    assert quotient(Range(0, n), Range(2, None)) == Range(0, n)
    assert quotient(Range(-5, 5), Range(0, 2)) == Range()
    assert times(Range(1, 2), n, also_one=True) == Range(1, 2 * n)
    assert times(Range(-1, 2), n, also_one=False) == Range(-n, 2 * n)
    assert range_of_array(jax.random.key(0)) == Range()


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
