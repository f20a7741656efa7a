"""What functions compute of sizes as numbers of Python: the same as in the unpadded run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap

from bucketjit import BucketedExec, Fallback
from tests.comparison import assert_like_jit, assert_same, ramp


def kinds(executor: BucketedExec) -> set[str]:
    return {program.kind for program in executor.stats().programs}


def normal(n: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(n).normal(size=n).astype(dtype)


# Functions, and sizes at which 24 bits or 32 decide otherwise.
DECIDING: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "whole part": (lambda x: jnp.asarray(x.shape[0] * 0.29, jnp.int32) + x.sum(), (100, 200, 57)),
    "mask": (lambda x: jnp.where(jnp.arange(x.shape[0]) < x.shape[0] * 0.29, x, 0), (100, 200)),
    "comparison": (lambda x: x * (x.shape[0] * 0.1 > 0.3), (3, 5)),
    "floor": (lambda x: x + jnp.floor(x.shape[0] * 0.29), (100, 200)),
    "cond": (lambda x: jax.lax.cond(x.shape[0] * 0.1 > 0.3, lambda y: y, lambda y: -y, x), (3, 5)),
    "chosen, then its floor": (
        lambda x: jnp.floor(jnp.where(x > -1e9, x.shape[0] * 0.29 * 20, 0.0)),
        (5, 10),
    ),
    "ids": (lambda x: (jnp.arange(30) * (x.shape[0] * 0.29)).astype(jnp.int32) + 0 * x[0], (5, 10)),
    "of a branch": (
        lambda x: jnp.floor(jax.lax.cond(x[0] > -1e9, lambda: x.shape[0] * 0.29 * 20, lambda: 0.0)),
        (5, 10),
    ),
    "round a loop": (
        lambda x: (
            jax.lax.fori_loop(
                *(0, 2, lambda i, c: (c[1], jnp.floor(c[0])), (0.0, x.shape[0] * 0.29 * 20))
            )[1]
            + 0 * x[0]
        ),
        (5, 10),
    ),
    "exponent": (lambda x: x * 0.9999 ** (x.shape[0] / 2), (60_000, 50)),
    "base": (lambda x: x * abs(((x.shape[0] - 5) * 0.5) ** 2.5), (3, 6)),
    "divides next to 0": (lambda x: x / jnp.log(x.shape[0] * 0.2), (3, 5)),
    "no float32": (lambda x: x * (x.shape[0] * 1e39 / 1e39), (3, 5)),
    "whole division": (lambda x: x * (x.shape[0] // 0.1), (3, 5)),
    "remainder": (lambda x: x * (x.shape[0] % 0.1), (3, 5)),
    "power of a float": (lambda x: x * (1 - 0.999999 ** x.shape[0]), (3, 5)),
    "power": (lambda x: x * (1 / 2 ** x.shape[0]), (5, 31, 40)),
    "powers": (lambda x: x * (2 ** x.shape[0] / 2 ** (x.shape[0] - 3)), (31, 40)),
    "power and remainder": (lambda x: x * (3 ** x.shape[0] % 7), (31, 40)),
    "nearly cancel": (lambda x: x * ((x.shape[0] + 0.1) - x.shape[0]), (5, 5000)),
    "neighbours": (lambda x: x * (1 / (x.shape[0] - 1) - 1 / x.shape[0]), (100, 1000)),
    "cancel at one size": (lambda x: x * (1 - x.shape[0] * 0.1), (10, 5)),
    "root of nothing": (lambda x: x + jnp.sqrt(x.shape[0] - x.shape[0] / 3 * 3.0), (5, 9, 11)),
    "overflows on the way": (lambda x: x * (x.shape[0] * 1e30 * 1e30 / 1e55), (3, 5)),
    "in a function": (jax.jit(lambda x: x * (x.shape[0] * 0.1 > 0.3)), (3, 5)),
    "in a loop": (
        lambda x: jax.lax.scan(lambda c, y: (c + jnp.floor(x.shape[0] * 0.29), y), 0.0, x)[0],
        (100, 200),
    ),
}


@pytest.mark.sampled(4, "in a loop", "powers")
@pytest.mark.parametrize("name", DECIDING)
def test_decisions_by_numbers_are_those_of_python(name: str) -> None:
    function, sizes = DECIDING[name]
    executor = BucketedExec(function, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    for n in sizes:
        assert_like_jit(executor, function, normal(n))
    assert kinds(executor) == {"paired"}


@custom_vmap
def halved(scale: Any, x: Any) -> Any:
    return x * scale / 2


@halved.def_vmap
def _(_: int, are_mapped: Any, scale: Any, x: Any) -> Any:
    return x * scale / 2, True


# Products and quotients, which only scale data.
SCALING: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x.sum() * (1.0 / x.shape[0]),
    "share": lambda x: x / (x.shape[0] * 0.5),
    "integers": lambda x: x[: x.shape[0] * 2 // 3] * (x.shape[0] - 7),
    "no gradient": lambda x: x * jax.lax.stop_gradient(x.shape[0] * 0.29),
    "mapped in its own way": lambda x: halved(jnp.asarray(x.shape[0] * 0.29), x),
    "uniform": lambda x: (jnp.full(x.shape[0], 1 / x.shape[0]) * x)[1:].sum(),
    "in a loop": lambda x: jax.lax.scan(lambda c, y: (c + y / x.shape[0], c), 0.0, x)[0],
    "mean of jax.numpy": lambda x: (x - x.mean()) / x.std(),
    "quantile": lambda x: jnp.quantile(x, 0.29),
    "linspace": lambda x: x * jnp.linspace(0, 1, x.shape[0]),
    "numpy": lambda x: x / np.float32(3) * np.prod(x.shape),
    "by name": jax.vmap(lambda r: r - jax.lax.pmean(r / jax.lax.psum(3, "i"), "i"), axis_name="i"),
}


# What else is computed with numbers.
COMPUTING: dict[str, Callable[[Any], Any]] = {
    "smoothed": lambda x: x.sum() / (x.shape[0] * 2.0 + 1e-6),
    "root": lambda x: x * jnp.sqrt(0.5 * x.shape[0]),
    "where": lambda x: jnp.where(x > 0, x.shape[0] * 0.5, x),
    "less than one": lambda x: x * (1 - 1 / x.shape[0]),
    "centre": lambda x: jnp.arange(x.shape[0]) - (x.shape[0] / 2 - 0.5) + x,
    "first half": lambda x: jnp.where(jnp.arange(x.shape[0]) < x.shape[0] / 2, x, 0),
    "scale": lambda x: x * (2.0 / x.shape[0]) ** 0.5,
    "an array of them": lambda x: x.sum() * jnp.array([x.shape[0] * 0.5, x.shape[0] / 3]),
    "of a product": lambda x: x * (x.shape[0] * 0.5 * 0.3),
}


@pytest.mark.sampled(3, "by name")
@pytest.mark.parametrize("name", [*SCALING, *COMPUTING])
def test_a_program_with_numbers_is_traced_once_if_they_only_scale(name: str) -> None:
    function = SCALING.get(name) or COMPUTING[name]
    executor = BucketedExec(function, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    for n in (3, 5, 100, 57):
        assert_same(executor(normal(n)), jax.jit(function)(normal(n)), rtol=1e-5)
    assert kinds(executor) == {"symbolic" if name in SCALING else "paired"}


def test_numbers_of_two_sizes_are_those_of_python() -> None:
    def function(x: Any) -> Any:
        b, s = x.shape
        return x * (s * 0.1 - b * 0.3)

    def share(x: Any) -> Any:
        return x * (x.shape[0] / (x.shape[0] + x.shape[1]))

    for fn, kind in ((function, "paired"), (share, "symbolic")):
        executor = BucketedExec(fn, dynamic_axes="b, s", fallback=Fallback.ERROR).with_pow2()
        for shape in ((1, 3), (3, 9), (5, 2)):
            assert_like_jit(executor, fn, ramp(*shape))
        assert kinds(executor) == {kind}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * np.prod(x.shape),
        lambda x: x * np.array(x.shape)[0],
        lambda x: x * np.maximum(x.shape[0], 3),
        lambda x: x * (np.int32(2) * x.shape[0]),
        lambda x: x * x.shape[0],
        lambda x: x * (x.shape[0] - 2),
    ],
)
def test_narrow_integers_meet_sizes_as_without_padding(function: Any, dtype: Any) -> None:
    executor = BucketedExec(function, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    for n in (9, 5, 12):
        assert_like_jit(executor, function, np.full(n, 100, dtype))


def test_a_size_that_a_type_does_not_hold_raises_as_without_padding() -> None:
    executor = BucketedExec(lambda x: jnp.asarray(x.shape[0] - 5, x.dtype)).with_pow2()
    with pytest.raises(OverflowError):
        executor(np.ones(3, np.uint8))
    assert executor(np.ones(7, np.uint8)) == 2


@pytest.mark.parametrize(
    "divide",
    [
        lambda n: 10 // (n - 3),
        lambda n: 10 % (n - 3),
        lambda n: divmod(10, n - 3)[1],
        lambda n: 10 / (n - 3),
        lambda n: n // (n - 3),
        lambda n: n / (n - 3),
        lambda n: 1 / ((n - 3) * 0.5),
    ],
)
def test_a_division_of_sizes_by_zero_raises(divide: Callable[[Any], Any]) -> None:
    executor = BucketedExec(lambda x: x * divide(x.shape[0])).with_pow2()
    for n in (3, 5, 3):
        if n == 3:
            with pytest.raises(ZeroDivisionError):
                executor(normal(n))
        else:
            np.testing.assert_allclose(executor(normal(n)), normal(n) * divide(n), rtol=1e-6)


def test_a_guard_that_divides_by_a_size() -> None:
    def careful(x: Any) -> Any:
        n = x.shape[0]
        return x * 2 if n != 3 and 10 // (n - 3) > 2 else x * 3

    executor = BucketedExec(careful).with_pow2()
    for n in (5, 3, 9, 3, 6):
        assert_like_jit(executor, careful, normal(n))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "compute",
    [
        *(lambda n: np.ones(n).sum(), lambda n: np.sqrt(n), lambda n: np.log(n), lambda n: n**0.5),
        *(lambda n: n >> 1, lambda n: n & 1, lambda n: ~n, lambda n: round(n, 1)),
        *(lambda n: len([0] * n), lambda n: np.eye(n).sum(), lambda n: 2**n),
        *(lambda n: n // 0.5, lambda n: float(n)),
    ],
)
def test_what_sizes_cannot_do_is_not_taken_for_the_functions_own_error(
    compute: Callable[[Any], Any],
) -> None:
    def careful(x: Any) -> Any:
        try:
            found = compute(x.shape[0])
        except (TypeError, ValueError, AttributeError):
            found = -1
        return x * found

    executor = BucketedExec(careful, dynamic_axes="n").with_pow2()
    for n in (4, 6, 5):
        assert_like_jit(executor, careful, normal(n))
