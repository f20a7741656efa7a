"""`map(..., reduce=)`: sums and means equal those of a loop, and take the memory of one result."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Check
from bucketjit.errors import ArgumentError, FallbackWarning
from tests.comparison import assert_close

RANDOM = np.random.default_rng(3)
D = 5
WEIGHTS = {"w": RANDOM.standard_normal((D, D)).astype(np.float32), "b": np.ones(D, np.float32)}
LENGTHS = [3, 8, 1, 5, 12, 7, 3, 9, 2, 16, 4]


def examples(lengths: list[int] = LENGTHS) -> list[np.ndarray]:
    return [RANDOM.standard_normal((n, D)).astype(np.float32) for n in lengths]


def loss(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean(jax.nn.softmax(hidden @ hidden.T, -1) @ hidden)


def recurrent(params: Any, x: Any) -> Any:
    state, _ = jax.lax.scan(
        lambda h, a: (jnp.tanh(h @ params["w"] + a), None), jnp.zeros(D), x + params["b"]
    )
    return (state**2).sum()


def loop(fn: Any, given: list[np.ndarray], mean: bool) -> Any:
    results = [*map(functools.partial(jax.jit(fn), WEIGHTS), given)]
    total = jax.tree_util.tree_map(lambda *parts: sum(parts[1:], parts[0]), *results)
    return jax.tree_util.tree_map(lambda x: x / len(given), total) if mean else total


@pytest.mark.parametrize(("fn", "reduce"), [(loss, "mean"), (recurrent, "sum")])
def test_gradients_equal_the_loop(fn: Any, reduce: str) -> None:
    step = jax.value_and_grad(fn)
    executor = BucketedExec(step, dynamic_axes=(None, "n, _"), check=Check.POISON).with_pow2(min=4)
    given = examples()
    for form in (given, iter(given)):
        assert_close(
            executor.map(WEIGHTS, form, reduce=reduce), loop(step, given, reduce == "mean")
        )
    assert executor.stats().rows == 2 * len(given) and not executor.stats().fallback_calls


def test_the_exact_run_agrees() -> None:
    executor = BucketedExec(loss, dynamic_axes=(None, "n, _"), check=Check.EXACT_ALWAYS)
    assert executor.with_pow2(min=4).map(WEIGHTS, examples([3, 4]), reduce="sum").shape == ()


def test_other_dtypes() -> None:
    def fn(x: Any) -> Any:
        return {
            "half": x.astype(jnp.bfloat16).max(),
            "int": jnp.argmax(x),
            "bool": x.sum() > 2,
            "complex": x.sum() * 1j,
        }

    executor = BucketedExec(fn, dynamic_axes="n", check=Check.POISON).with_pow2()
    given = [np.eye(1, n, n - 1, dtype=np.float32)[0] * 3 for n in (3, 5, 1, 5)]
    total = executor.map(given, reduce="sum")
    assert total["half"].dtype == jnp.bfloat16 and float(total["half"]) == 12
    assert total["int"].dtype == jnp.int32 and int(total["int"]) == 2 + 4 + 0 + 4
    assert int(total["bool"]) == 4 and complex(total["complex"]) == 12j
    mean = executor.map(given, reduce="mean", out="numpy")
    assert mean["half"].dtype == jnp.bfloat16 and float(mean["int"]) == 2.5
    assert float(mean["bool"]) == 1.0 and isinstance(mean["int"], np.ndarray)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "bool", "float16"])
def test_small_types_are_added_in_larger_ones(dtype: str) -> None:
    executor = BucketedExec(lambda x: x.max(), dynamic_axes="n").with_pow2(min=8)
    rows = [np.full(3, 100, dtype)] * 400
    one = float(np.ones((), dtype).astype(bool)) if dtype == "bool" else 100.0
    assert float(executor.map(rows, reduce="mean")) == one
    if dtype != "float16":
        assert int(executor.map(rows, reduce="sum")) == 400 * one


def test_rows_that_are_padding_add_nothing() -> None:
    executor = BucketedExec(lambda x: x.sum() / 0 * 0 + 1, dynamic_axes="n").with_pow2()
    assert np.isnan(executor.map([np.ones(3, np.float32)], reduce="sum"))
    ones = BucketedExec(lambda x: jnp.ones(()) + 0 * x[0], dynamic_axes="n").with_pow2()
    for n in range(1, 12):
        assert float(ones.map([np.ones(2, np.float32)] * n, reduce="sum")) == n


def test_examples_that_run_alone_are_added_too() -> None:
    def fn(x: Any) -> Any:
        jax.debug.callback(lambda _: None, x.sum())
        return x.sum()

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    with pytest.warns(FallbackWarning, match="one example at a time"):
        assert float(executor.map([np.ones(n, np.float32) for n in (2, 3)], reduce="mean")) == 2.5


def test_inside_of_a_transformation() -> None:
    executor = BucketedExec(lambda w, x: (w * x).sum(), dynamic_axes=(None, "n")).with_pow2()
    given = [np.ones(n, np.float32) for n in (2, 3)]
    for reduce, want in [("sum", 5.0), ("mean", 2.5)]:
        got = jax.grad(lambda w, how=reduce: executor.map(w, given, reduce=how))(1.0)
        assert float(got) == want


def test_what_cannot_be_added() -> None:
    given = [np.ones(n, np.float32) for n in (2, 3)]
    double = BucketedExec(lambda x: {"y": x * 2}, dynamic_axes="n").with_pow2()
    with pytest.raises(ArgumentError, match=r"result\['y'\] is float32\[n\], so it differs"):
        double.map(given, reduce="sum")
    assert double.stats().compiles == 0
    total = BucketedExec(jnp.sum, dynamic_axes="n").with_pow2()
    with pytest.raises(ArgumentError, match="no examples to reduce"):
        total.map([], reduce="mean")
    keys = BucketedExec(lambda x: jax.random.key(0), dynamic_axes="n").with_pow2()
    with pytest.raises(ArgumentError, match="cannot be added"):
        keys.map(given, reduce="sum")
    branching = BucketedExec(lambda x: x.sum() if x.shape[0] > 2 else x[:1] * 1.0, dynamic_axes="n")
    branching = branching.with_pow2(min=1)
    with pytest.raises(ArgumentError, match="results that differ between examples"):
        branching.map(given, reduce="sum")
