"""What a function prints while it is traced is shown once."""

import contextlib
import io
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from tests.comparison import ones


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_shape_is_printed_once_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any) -> Any:
        print(x.shape)
        print(f"rows: {x.shape[0]}")
        return (x * 2).sum()

    executor = bucketjit.jit(fn)
    for n in (5, 6, 7, 5):
        assert float(executor(ones(n, 3))) == 6 * n
    # A trace at 6 was made, unheard, to find how the first program depends on its sizes.
    assert lines(capsys) == [text for n in (5, 7) for text in (f"({n}, 3)", f"rows: {n}")]
    assert executor.cache_size() == 1


def test_decisions_on_sizes_print_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any) -> Any:
        print("traced")
        n = x.shape[0]
        return x.sum() * ((n > 4) + (n % 2 == 0) + (n != 6))

    executor = bucketjit.jit(fn)
    executor(ones(7))
    assert lines(capsys) == ["traced"]


def test_what_is_shown_once_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[int] = []

    def fn(x: Any) -> Any:
        if not shown:
            shown.append(1)
            print("first")
        return x.sum() if x.shape[0] > 4 else x.max()

    bucketjit.jit(fn)(ones(7))
    assert lines(capsys) == ["first"]


def test_output_before_an_error_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any) -> Any:
        print("before", x.shape)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        bucketjit.jit(fn)(ones(5))
    assert lines(capsys) == ["before (5,)"]


def test_warnings_that_the_function_collects_are_its_own() -> None:
    def fn(x: Any) -> Any:
        with warnings.catch_warnings(record=True, action="always") as caught:
            warnings.warn("inner", UserWarning, stacklevel=1)
        return x.sum() * len(caught)

    assert float(bucketjit.jit(fn)(ones(5))) == 5


def test_an_exact_run_prints_its_sizes_once(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any) -> Any:
        print(x.shape)
        return jnp.stack([x[i] * i for i in range(int(x.shape[0]))])

    executor = bucketjit.jit(fn)
    with pytest.warns(bucketjit.errors.FallbackWarning):
        executor(ones(5))
    assert lines(capsys) == ["(5,)"]
    BucketedExec(fn)(ones(5))
    assert lines(capsys) == ["(5,)"]


def test_output_goes_where_it_goes_when_it_is_shown() -> None:
    def fn(x: Any) -> Any:
        print("traced", x.shape)
        return x * np.ones(int(x.shape[0]), np.float32) + x.sum()

    executor, told = BucketedExec(fn).with_pow2(), []
    for n in (5, 6, 7):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            executor(np.ones(n, np.float32))
        told.append(stream.getvalue())
        stream.close()
    assert told == ["traced (5,)\n", "", "traced (7,)\n"]
    assert executor.stats().compiles == 1
