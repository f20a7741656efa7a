"""Executables that are run once before calls need them, and those that must not be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._compile import executable as executables
from tests.comparison import assert_like_jit, ramp

W = ramp(3, 5)


def dense(w: Any, x: Any) -> Any:
    return jax.nn.softmax(x @ w), (x @ w).mean(0)


def newton(w: Any, x: Any) -> Any:
    """Does not end on zeros."""
    return jax.lax.while_loop(lambda y: abs(y[0, 0]) < 1, lambda y: y * 2, x @ w)


def calls_back(w: Any, x: Any) -> Any:
    shape = jax.ShapeDtypeStruct((), x.dtype)
    return x @ w + jax.pure_callback(lambda v: v + 1, shape, w[0, 0])


def prints(w: Any, x: Any) -> Any:
    jax.debug.print("{}", w[0, 0])
    return x @ w


def recurrent(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, row: (jnp.tanh(h + row @ w), h), jnp.zeros(5), x)


def long_loop(w: Any, x: Any) -> Any:
    """A billion steps on zeros, none on what it is for: XLA counts one."""

    def loop(y: Any) -> Any:
        return jax.lax.fori_loop(0, 10**9, lambda _, z: jnp.tanh(z @ w.T @ w), y)

    return jax.lax.cond(x[0, 0] == 0, loop, lambda y: y, x @ w)


def inverse(w: Any, x: Any) -> Any:
    return x @ jnp.linalg.inv(w @ w.T + jnp.eye(3))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], Any]]:
    """The arguments of each first run, and its error."""
    found: list[tuple[list[Any], Any]] = []
    run_once = executables.run_once

    def recorded(compiled: Any, argument: Callable[[int, Any], Any]) -> None:
        args: list[Any] = []

        def made(i: int, aval: Any) -> Any:
            args.append(argument(i, aval))
            return args[-1]

        try:
            run_once(compiled, made)
        except Exception as error:
            found.append((args, error))
            raise
        found.append((args, None))

    monkeypatch.setattr(executables, "run_once", recorded)
    return found


def warmed_up(fn: Callable[..., Any], w: Any = W, **options: Any) -> BucketedExec:
    executor = BucketedExec(fn, dynamic_axes=(None, "b, _"), **options).with_pow2()
    like = jax.ShapeDtypeStruct((5, 3), np.float32)
    report = executor.warmup(w, like, sizes={"b": [3, 8]}, progress=False, first_run=True)
    assert len(report.compiled) == 2
    return executor


@pytest.mark.parametrize("fn", [dense, recurrent])
def test_a_warm_up_runs_each_executable_once(fn: Any, runs: Any, xla_compiles: Any) -> None:
    executor = warmed_up(fn)
    assert len(runs) == 2
    for (sizes, w, x), error in runs:
        assert error is None
        assert sizes.tolist() == [1] and not w.any() and not x.any()
        assert w.shape == W.shape and x.ctypes.data % 64 == w.ctypes.data % 64 == 0
    assert sorted(x.shape for (_, _, x), _ in runs) == [(4, 3), (8, 3)]
    before = xla_compiles()
    for n in (3, 4, 7):
        executor(jax.device_put(W), ramp(n, 3))
        executor(W, ramp(n, 3))
    assert xla_compiles() == before and executor.stats().compiles == 2
    assert executor.stats().calls == 6  # nobody called for a first run
    assert_like_jit(executor, fn, W, ramp(3, 3))


def test_without_being_asked_a_warm_up_runs_nothing(runs: list[Any]) -> None:
    executor = BucketedExec(dense, dynamic_axes=(None, "b, _")).with_pow2()
    executor.warmup(W, ramp(5, 3), progress=False)
    executor(W, ramp(2, 3))
    assert not runs and executor.cache_size() == 2


@pytest.mark.parametrize("fn", [newton, calls_back, prints, long_loop, inverse])
def test_what_must_not_run_on_zeros(fn: Any, runs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    executor = warmed_up(fn)
    assert not runs and capfd.readouterr().out == ""
    assert_like_jit(executor, fn, W + 1, ramp(3, 3) + 1)


@pytest.mark.parametrize(
    ("fn", "width", "largest"),
    [(lambda x: x @ x.T @ x, 4096, 2048), (lambda x: x[:, 0][:, None] * x[:, 0], 1, 2**15)],
    ids=["long", "much memory"],
)
def test_what_takes_too_much_does_not_run(fn: Any, width: int, largest: int, runs: Any) -> None:
    executor = BucketedExec(fn, dynamic_axes="b, _").with_pow2()
    like = jax.ShapeDtypeStruct((1, width), np.float32)
    executor.warmup(like, sizes={"b": [16, largest]}, progress=False, first_run=True)
    assert [x.shape for args, _ in runs for x in args if x.ndim == 2] == [(16, width)]


def test_at_an_exact_shape_nothing_runs(runs: list[Any]) -> None:
    executor = BucketedExec(dense, dynamic_axes=(None, "b, _"))
    executor.warmup(W, ramp(5, 3), progress=False, first_run=True)
    assert not runs and executor.cache_size() == 1


def test_in_the_background_it_comes_before_anybody_gets_the_executable(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = BucketedExec(dense, dynamic_axes=(None, "b, _")).with_pow2()
    executor = executor.with_background_compile()
    executor(W, ramp(8, 3))
    assert not runs  # the call itself is the first run
    stored: list[int] = []
    recorded = executables.run_once

    def watched(*args: Any) -> None:
        stored.append(executor.cache_size())
        recorded(*args)

    monkeypatch.setattr(executables, "run_once", watched)
    executor(W, ramp(3, 3))
    executor.wait_for_compiles()
    assert stored == [1] and executor.cache_size() == 2
    assert [error for _, error in runs] == [None]
    assert_like_jit(executor, dense, W, ramp(3, 3))


def test_an_executable_from_a_file_runs_first_too(runs: list[Any], tmp_path: Path) -> None:
    executor = BucketedExec(dense, dynamic_axes=(None, "b, _")).with_pow2()
    executor.with_persistence(tmp_path).warmup(W, ramp(5, 3), progress=False)
    assert not runs
    again = executor.with_persistence(tmp_path)
    again.warmup(W, ramp(5, 3), progress=False, first_run=True)
    assert [error for _, error in runs] == [None]
    assert again.stats().compiles == 0
    assert_like_jit(again, dense, W, ramp(5, 3))
