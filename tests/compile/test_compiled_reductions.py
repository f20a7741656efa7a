"""What XLA's library gets wrong is found in what was compiled, and compiled again without it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Fallback
from bucketjit._compile.workarounds import has_wrong_reductions
from tests.comparison import ramp

Function = Callable[[Any], Any]

WIDTH = 256
SHARES = np.full((WIDTH, WIDTH), 1 / WIDTH, np.float32)
WEIGHTS = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 16

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a library of XLA on CPU")


def squares(x: Any) -> Any:
    return (x**2).sum(-1)


def in_a_loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, y: y / 2 + squares(jnp.tanh(y @ SHARES))[:, None], x)


def layers(x: Any) -> Any:
    weights = jnp.ones((3, WIDTH, WIDTH)) / WIDTH
    return lax.scan(lambda y, w: (y / 2 + squares(y @ w)[:, None], None), x, weights)[0]


# Programs that do not show by themselves what XLA makes of them.
WRONG: dict[str, Function] = {
    "in a loop": in_a_loop,
    "layers": layers,
    "made by another jit": lambda x: squares(x @ jax.jit(lambda: jnp.ones((WIDTH, WIDTH)))()),
    "split": lambda x: sum(
        squares(x @ w) for w in jnp.split(jnp.ones((WIDTH, 2 * WIDTH)), 2, axis=1)
    ),
    "repeated": lambda x: squares(x @ jnp.repeat(x[0][:, None], WIDTH, axis=1)),
    "written": lambda x: squares(x @ jnp.zeros((WIDTH, WIDTH)).at[:].set(0.5)),
    "rows": lambda x: squares(
        x @ jnp.where(jnp.arange(WIDTH)[:, None] < 9, jnp.ones((WIDTH, WIDTH)), 0)
    ),
    "small integers": lambda x: (x * 10).astype(jnp.int8).astype(jnp.float32).sum(-1),
    "unsigned": lambda x: jnp.abs(x * 10).astype(jnp.uint8).astype(jnp.float32).sum(-1),
    "convolution": lambda x: squares(
        lax.conv_general_dilated(
            x[:, None, None],
            np.ones((1, 1, WIDTH, WIDTH), np.float32),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    ),
}

RIGHT: dict[str, Function] = {
    "weights": lambda x: squares(x @ WEIGHTS),
    "layers of weights": lambda x: squares(jnp.tanh(jnp.tanh(x @ WEIGHTS) @ WEIGHTS)),
    "softmax": lambda x: jax.nn.softmax(x @ WEIGHTS),
    "variance": lambda x: (x @ WEIGHTS).var(-1),
    "integers": lambda x: (x * 10).astype(int).astype(jnp.float32).sum(-1),
    "gradient": jax.grad(lambda x: squares(jnp.tanh(x @ WEIGHTS)).sum()),
}


def made(executor: BucketedExec) -> str:
    (entry,) = [slot.entry for _, slot in executor._engine.cache.slots()]
    assert entry is not None
    return str(entry.compiled.as_text())


@pytest.mark.sampled(4)
@on_cpu
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_compiled_without_the_library(name: str) -> None:
    fn = WRONG[name]
    executor = BucketedExec(fn, dynamic_axes="b, _", fallback=Fallback.ERROR).with_pow2(min=16)
    for n in (10, 1, 15):
        x = np.random.default_rng(n).standard_normal((n, WIDTH)).astype(np.float32)
        want = jax.jit(fn)(x)
        np.testing.assert_allclose(executor(x), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    assert executor.stats().compiles == 1
    assert not has_wrong_reductions(made(executor))
    x = ramp(16, WIDTH)
    assert has_wrong_reductions(jax.jit(fn).lower(x).compile().as_text())


@on_cpu
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_left_to_the_library(name: str) -> None:
    fn = RIGHT[name]
    executor = BucketedExec(fn, dynamic_axes="b, _", fallback=Fallback.ERROR).with_pow2(min=16)
    x = np.random.default_rng(0).standard_normal((10, WIDTH)).astype(np.float32)
    np.testing.assert_allclose(executor(x), jax.jit(fn)(x), rtol=1e-4, atol=1e-4)
    assert "__ynn_fusion" in made(executor)


@on_cpu
def test_other_buckets_of_the_program_are_compiled_once(xla_compiles: Callable[[], int]) -> None:
    fn = WRONG["made by another jit"]
    executor = BucketedExec(fn, dynamic_axes="b, _").with_pow2(min=16)
    executor(ramp(10, WIDTH))
    before = xla_compiles()
    executor(ramp(20, WIDTH))
    executor(ramp(40, WIDTH))
    assert xla_compiles() - before == 2


@on_cpu
def test_what_comes_from_a_file_has_been_looked_at(tmp_path: Any) -> None:
    fn = WRONG["rows"]
    x = np.random.default_rng(0).standard_normal((10, WIDTH)).astype(np.float32)
    for loads in (0, 1):
        executor = BucketedExec(fn, dynamic_axes="b, _").with_pow2(min=16)
        executor = executor.with_persistence(tmp_path)
        np.testing.assert_allclose(executor(x), jax.jit(fn)(x), rtol=1e-4, atol=1e-2)
        assert executor.stats().loads == loads


def test_nothing_is_read_into_other_programs() -> None:
    assert not has_wrong_reductions("") and not has_wrong_reductions(
        "HloModule m\nENTRY %main () {\n}\n"
    )
