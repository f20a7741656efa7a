"""Primitives without a rule whose implementation compares sizes: guards, as in the function."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from bucketjit import BucketedExec


def with_none(x: Any, other: Any) -> Any:
    n = x.shape[0]
    return x + 1 if n == None or n in (None, "n") else x - x.mean()  # noqa: E711


def with_shapes(x: Any, other: Any) -> Any:
    wanted = (None, 1), (None, None)
    return x * 3 if (x.shape[0], 1) in wanted else jnp.cumsum(x)


def with_one(x: Any, other: Any) -> Any:
    return x * 10 if x.shape[0] in (1, None) else x / x.max()


def with_three(x: Any, other: Any) -> Any:
    return x * 10 if x.shape[0] != 3 else jnp.flip(x) + x.sum()


def with_two_sizes(x: Any, other: Any) -> Any:
    return x @ other * x if x.shape == other.shape else x - other.sum()


def with_an_order(x: Any, other: Any) -> Any:
    steps = min(4, x.shape[0])
    return x + steps if x.shape[0] > 5 else x - steps


def primitive(run: Callable[..., Any]) -> Callable[..., Any]:
    made = Primitive(f"opaque_{run.__name__}")
    made.def_impl(run)
    made.def_abstract_eval(lambda x, other: x)
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=False))
    return made.bind  # type: ignore[no-any-return]


# A function and the number of its programs over the sizes below.
CASES = [
    (with_none, 1),
    (with_shapes, 1),
    (with_one, 2),
    (with_three, 3),
    (with_two_sizes, 3),
    (with_an_order, 3),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run, programs", CASES, ids=[run.__name__ for run, _ in CASES])
def test_an_opaque_primitive_decides_by_sizes(run: Callable[..., Any], programs: int) -> None:
    bound = primitive(run)

    def fn(x: Any, other: Any) -> Any:
        return jnp.sin(bound(x, other)).sum(), bound(x * 2, other)

    executor = BucketedExec(fn, dynamic_axes=("n", "m")).with_pow2(min=8)
    with warnings.catch_warnings(action="error"):
        for n, m in [(5, 4), (1, 4), (6, 6), (3, 7), (2, 2), (1, 1), (7, 3), (4, 4)]:
            x, other = (np.random.default_rng(k).random(k).astype(np.float32) for k in (n, m))
            expected = jax.jit(lambda x, y: (jnp.sin(run(x, y)).sum(), run(x * 2, y)))(x, other)
            for got, wanted in zip(executor(x, other), expected, strict=True):
                assert got.shape == wanted.shape
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    stats = executor.stats()
    assert not stats.fallback_reasons and len(stats.programs) == programs
