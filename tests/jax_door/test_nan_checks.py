"""``jax_debug_nans`` holds in a thread that traced and lowered a bucketed function."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bucketjit
from tests.comparison import ramp

USES: dict[str, Callable[[Any], object]] = {
    "call": lambda e: e(ramp(5)),
    "lower": lambda e: e.lower(ramp(5)).compile(),
    "background": lambda e: e.with_background_compile()(ramp(5)),
    "map": lambda e: e.map([ramp(5), ramp(3)]),
}


def check_of_nans(name: str, shape: tuple[int, ...]) -> None:
    def sums(x: Any) -> Any:
        return (jax.lax.scan(lambda c, a: (c + a, c), 0.0, x)[1] + jnp.sort(x)).reshape(shape)

    divided = jax.jit(lambda x: x / x)
    divided(ramp(3) + 1)
    jax.config.update("jax_debug_nans", True)
    try:
        with contextlib.suppress(TypeError):
            USES[name](bucketjit.jit(sums, dynamic_axes="b", buckets="pow2"))
        divided(ramp(3) + 1)
        with pytest.raises(FloatingPointError):
            divided(0 * ramp(3))
    finally:
        jax.config.update("jax_debug_nans", False)


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("shape", [(-1,), (100, 3)], ids=["returns", "raises"])
def test_nans_are_looked_for_after_a_trace(name: str, shape: tuple[int, ...]) -> None:
    with ThreadPoolExecutor(1) as pool:  # an eager `jnp.std` has ended the check in this one
        pool.submit(check_of_nans, name, shape).result()
