"""Chunks are served by the program of the whole, whatever the function does at their size."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Check, Fallback
from bucketjit._ir.size_constant import size_constant_p
from bucketjit.errors import FallbackError, MaskingError, SplitError
from bucketjit.types import Eviction
from tests.comparison import assert_same
from tests.runtime.test_buckets import floats


def positions(w: Any, x: Any) -> Any:
    """A layer with a table of positions by NumPy; another program at size 1."""
    length = x.shape[1]
    angles = np.arange(length)[:, None] / 100 ** (np.arange(4) / 4)
    x = x + np.sin(angles).astype(np.float32)
    scores = (x @ w) @ x.swapaxes(1, 2) / np.sqrt(length)
    return jax.nn.softmax(scores) @ x


def arguments(b: int, s: int) -> tuple[Any, Any]:
    return floats(4, 4), floats(b, s, 4)


def in_chunks(fn: Any, chunk: int, axes: Any = (None, "b, s, _"), **options: Any) -> BucketedExec:
    executor = BucketedExec(fn, dynamic_axes=axes, **options).with_pow2(min=4)
    return executor.with_buckets([chunk], "b").with_overflow("split", "b")


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("check", [Check.OFF, Check.POISON, Check.EXACT])
def test_a_table_of_positions(chunk: int, check: Check) -> None:
    executor = in_chunks(positions, chunk, check=check)
    for _ in range(2):
        for b, s in ((5, 3), (4, 7), (7, 3), (1, 4), (5, 8), (2, 6)):
            args = arguments(b, s)
            assert_same(executor(*args), jax.jit(positions)(*args), rtol=2e-5)
    assert not executor.stats().fallback_reasons


def test_few_are_compiled() -> None:
    executor = in_chunks(positions, 1)
    for b in range(2, 9):
        for s in (5, 6, 8):
            executor(*arguments(b, s))
    assert executor.stats().compiles == executor.cache_size() == 1


@pytest.mark.parametrize("chunk", [1, 2])
def test_its_gradient(chunk: int) -> None:
    def loss(fn: Any) -> Any:
        return lambda w, x: jnp.sin(fn(w, x)).sum()

    executor = in_chunks(positions, chunk)
    for b, s in ((5, 3), (4, 7)):
        args = arguments(b, s)
        got = jax.grad(loss(executor), 1)(*args)
        assert_same(got, jax.grad(loss(positions), 1)(*args), rtol=2e-4)


def otherwise_at(condition: Any) -> Any:
    def fn(x: Any) -> Any:
        x = x * np.float32(np.sqrt(x.shape[1]))
        return x + 100 if condition(x.shape[0]) else x

    return fn


@pytest.mark.parametrize(
    "condition",
    [lambda b: int(b) == 1, lambda b: int(b) > 1, lambda b: int(b) > 5, lambda b: int(b) % 2],
)
@pytest.mark.parametrize("chunk", [1, 2])
def test_a_function_that_does_something_else_at_the_size_of_a_chunk(
    condition: Any, chunk: int
) -> None:
    fn = otherwise_at(condition)
    executor = in_chunks(fn, chunk, "b, s")
    served = 0
    for _ in range(2):
        for b in (3, 1, 7, 2, 8, 1, 5, 6, 20):
            x = floats(b, 3)
            try:
                got = executor(x)
            except SplitError:  # of guards that its chunks break
                continue
            served += 1
            assert_same(got, jax.jit(fn)(x), rtol=1e-6)
    assert served >= 4


def test_a_number_of_the_axis_that_is_cut() -> None:
    def fn(x: Any) -> Any:
        return x / np.sqrt(x.shape[0])

    executor = in_chunks(fn, 1, "b, s")
    served = []
    for b in (7, 6, 7, 5):
        try:
            got = executor(floats(b, 3))
        except SplitError:  # another number for each size
            continue
        served.append(b)
        assert_same(got, jax.jit(fn)(floats(b, 3)), rtol=1e-6)
    assert served == [7, 7]


def test_what_a_part_cannot_do_the_whole_does_at_its_exact_shape() -> None:
    fn = otherwise_at(lambda b: int(b) == 1)
    executor = in_chunks(fn, 1, "b, s").with_buckets([4], "s", overflow="exact")
    for b, s in ((3, 3), (3, 9), (5, 4), (1, 9), (3, 9)):
        assert_same(executor(floats(b, s)), jax.jit(fn)(floats(b, s)), rtol=1e-6)
    assert all("beyond its largest bucket" in why for why in executor.stats().fallback_reasons)


def refuses(ctx: Any) -> Any:
    raise MaskingError("not today")


@pytest.mark.parametrize("policy", [Fallback.EXACT, Fallback.ERROR])
def test_what_cannot_be_masked_is_not_run_in_parts(policy: Fallback) -> None:
    fn = otherwise_at(lambda b: int(b) == 1)
    executor = in_chunks(fn, 1, "b, s", fallback=policy).with_rules({size_constant_p: refuses})
    for b in (3, 5, 3):
        if policy is Fallback.ERROR:
            with pytest.raises(FallbackError, match="not today"):
                executor(floats(b, 3))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(executor(floats(b, 3)), jax.jit(fn)(floats(b, 3)), rtol=1e-6)
    if policy is Fallback.EXACT:
        assert list(executor.stats().fallback_reasons) == ["size_constant: not today"]


def test_explained() -> None:
    told = in_chunks(positions, 1).explain(*arguments(5, 3))
    assert (told.kind, told.bucket) == ("paired", {"b": 1, "s": 4})


def test_after_the_cache_is_cleared() -> None:
    executor = in_chunks(positions, 1)
    for _ in range(2):
        args = arguments(3, 5)
        assert_same(executor(*args), jax.jit(positions)(*args), rtol=2e-5)
        executor.cache_clear()
    assert executor.stats().calls == 0


def test_ways_of_programs_that_are_gone_are_let_go_of() -> None:
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="b, _").with_maxsize(
        1, eviction=Eviction(hysteresis=8)
    )
    executor = executor.with_buckets([2], "b").with_overflow("split", "b")
    for width in range(1, 9):
        executor(floats(6, width))
        gc.collect()
    assert len(executor._engine.memory._of_chunks) <= 2
    assert executor.stats().calls == 3 * 8


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_warmed_up_and_by_a_manifest(chunk: int) -> None:
    executor = in_chunks(positions, chunk)
    example = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments(5, 4))
    executor.warmup(*example, sizes={"b": range(1, 12), "s": range(2, 9)})
    again = in_chunks(positions, chunk)
    report = again.warmup(executor.manifest())
    assert not report.failed and not report.stale
    for warm in (executor, again):
        with warm.forbid_compiles():
            for b in range(2, 12):
                for s in (3, 4, 7):
                    args = arguments(b, s)
                    assert_same(warm(*args), jax.jit(positions)(*args), rtol=2e-5)


def test_along_two_axes() -> None:
    def fn(x: Any) -> Any:
        scale = np.float32(np.sqrt(x.shape[2]))
        return x * scale + 100 if x.shape[0] == 1 else x * scale

    executor = BucketedExec(fn, dynamic_axes="b, c, s").with_pow2(min=4)
    executor = executor.with_buckets([1], "b", overflow="split")
    executor = executor.with_buckets([2], "c", overflow="split")
    for shape in ((3, 5, 4), (5, 3, 3), (2, 2, 7), (1, 5, 4), (3, 5, 4)):
        assert_same(executor(floats(*shape)), jax.jit(fn)(floats(*shape)), rtol=1e-6)
