"""The line that says what bucketing has saved."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._runtime import statistics


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def total(x: jax.Array, times: int = 1) -> jax.Array:
    return jnp.exp(x).sum() * times


def test_a_stream() -> None:
    executor = BucketedExec(total).with_pow2()
    assert executor.stats().summary == "no calls yet"
    for n in (5, 6, 7, 8, 5, 5, 9):
        executor(ones(n))
    stats = executor.stats()
    assert stats.shapes == 5
    saved = 3 * min(b.compile_seconds for b in stats.buckets)
    told = re.fullmatch(
        r"5 shapes, 2 executables: 3 compiles, about ([\d.]+) (m?)s, saved; padding (\d+) %",
        stats.summary,
    )
    assert told and float(told[1]) * (1e-3 if told[2] else 1) == pytest.approx(saved, rel=0.5)
    assert int(told[3]) == round(100 * stats.padding_waste) == 30
    assert str(executor.report()).splitlines()[0] == stats.summary


def test_shapes_are_those_that_jit_compiles_for() -> None:
    """Combinations of the sizes of all variables, other axes, types and static arguments."""
    fn = BucketedExec(total, dynamic_axes=("b, s, _",), static_argnames="times").with_pow2()
    plain = jax.jit(total, static_argnames="times")
    for dtype, width, times in (
        (np.float32, 2, 1),
        (np.float32, 3, 1),
        (np.int32, 2, 1),
        (np.float32, 2, 2),
    ):
        for b, s in ((3, 5), (3, 6), (4, 5), (4, 6), (3, 5)):
            fn(ones(b, s, width, dtype=dtype), times=times)
            plain(ones(b, s, width, dtype=dtype), times=times)
    stats = fn.stats()
    assert stats.shapes == plain._cache_size() == 16
    assert stats.summary.startswith("16 shapes, 4 executables: 12 compiles, about ")


def test_examples_of_map() -> None:
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_pow2()
    executor.map([ones(n, 2) for n in (3, 4, 3, 7)])
    assert executor.stats().shapes == 3
    executor(ones(7, 2))
    assert executor.stats().shapes == 3


def test_nothing_saved() -> None:
    same = BucketedExec(total).with_pow2()
    for _ in range(3):
        same(ones(4))
    assert same.stats().summary == "1 shape, 1 executable: no compile saved yet; padding 0 %"
    exact = BucketedExec(total)
    for n in (3, 4):
        exact(ones(n))
    assert exact.stats().summary == "2 shapes, 2 executables: no compile saved yet; padding 0 %"
    warm = BucketedExec(total).with_pow2()
    warm.warmup(ones(1), sizes={"batch": [2, 4, 8]}, progress=False)
    assert warm.stats().summary == "no calls yet, 3 executables ready"
    warm(ones(3))
    assert warm.stats().summary == ("1 shape, 3 executables: no compile saved yet; padding 25 %")


def test_compiles_that_wait_in_the_background_save_no_more_time() -> None:
    seconds = (1.5, 29.5, 1.4, 20.4)
    stats: dict[str, Any] = dict(calls=50, shapes=16, compiles=4, loads=0, fallback_calls=0)
    stats |= dict(padding_waste=0.5, compile_seconds=sum(seconds))
    stats["buckets"] = [{"compile_seconds": s} for s in seconds]
    assert statistics.summary_of(stats) == (
        "16 shapes, 4 executables: 12 compiles, about 18 s, saved; padding 50 %"
    )
