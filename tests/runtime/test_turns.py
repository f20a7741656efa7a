"""Rows that take turns: one executable for any number of rows, with the results of a loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._runtime.rows import batches

F32 = np.float32
WEIGHTS = np.linspace(-1, 1, 12, dtype=F32).reshape(3, 4)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program is tried, and takes turns."""
    monkeypatch.setattr(batches, "_LEAST_FLOPS", 0)
    monkeypatch.setattr(batches, "_WORTH_TURNS", 1e9)


def attention(w: Any, x: Any) -> Any:
    h = jax.nn.softmax(x @ x.T, axis=-1) @ x @ w
    return {"mean": h.mean(0), "rows": h, "count": (h > 0).sum(), "weak": 2.0 * jnp.ones(())}


def recurrent(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, row: (jnp.tanh(c + row @ w), c.sum()), jnp.zeros(4), x)


def loops(w: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c.sum() < 40, lambda c: c + jnp.abs(x).sum(), x[0] * 0 + 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", [attention, recurrent, loops])
@pytest.mark.usefixtures("in_turn")
def test_results_are_those_of_a_loop(fn: Callable[..., Any]) -> None:
    executor = BucketedExec(fn, dynamic_axes=(None, "n, _")).with_pow2(min=4)
    rng = np.random.default_rng(0)
    for count in (1, 2, 9):
        examples = [rng.standard_normal((n, 3)).astype(F32) for n in rng.integers(1, 9, count)]
        got = executor.map(WEIGHTS, examples, in_axes=(None, 0))
        for result, x in zip(got, examples, strict=True):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                result,
                jax.jit(fn)(WEIGHTS, x),
            )
    assert set(executor._engine.takes_turns.values()) == {True}


@pytest.mark.usefixtures("in_turn")
def test_one_executable_serves_every_number_of_rows() -> None:
    executor = BucketedExec(attention, dynamic_axes=(None, "n, _")).with_pow2(min=8)
    shape = (None, 0)
    executor.map(WEIGHTS, [np.ones((7, 3), F32)] * 2, in_axes=shape)
    assert executor.stats().compiles == 2  # both ways were compiled for the comparison
    for count in (1, 3, 4, 5, 16, 33):
        executor.map(WEIGHTS, [np.ones((7, 3), F32)] * count, in_axes=shape)
    assert executor.stats().compiles == 2
    explained = executor.explain_map(WEIGHTS, [np.ones((7, 3), F32)] * 3, in_axes=shape)
    assert explained.groups[0].missing == ()
    executor.map(WEIGHTS, [np.ones((12, 3), F32)] * 3, in_axes=shape)
    assert executor.stats().compiles == 3
    executor.cache_clear()
    assert not executor._engine.takes_turns


@pytest.mark.usefixtures("in_turn")
def test_rows_that_are_not_there_are_not_computed() -> None:
    """A loop that does not end for a row of zeros ends here, and no row counts as padding."""
    executor = BucketedExec(loops, dynamic_axes=(None, "n, _")).with_pow2()
    executor.map(WEIGHTS, [np.ones((4, 3), F32)] * 2, in_axes=(None, 0))
    executor.reset_stats()
    executor.map(WEIGHTS, [np.ones((4, 3), F32)] * 3, in_axes=(None, 0))
    assert executor.stats().padding_waste == 0


@pytest.mark.usefixtures("in_turn")
def test_a_batch_of_one_row_says_nothing() -> None:
    executor = BucketedExec(attention, dynamic_axes=(None, "n, _")).with_pow2(min=8)
    for count, known in ((1, []), (2, [True])):
        executor.map(WEIGHTS, [np.ones((7, 3), F32)] * count, in_axes=(None, 0))
        assert list(executor._engine.takes_turns.values()) == known


def test_short_rows_are_not_tried() -> None:
    executor = BucketedExec(attention, dynamic_axes=(None, "n, _")).with_pow2(min=8)
    executor.map(WEIGHTS, [np.ones((7, 3), F32)] * 2, in_axes=(None, 0))
    assert executor.stats().compiles == 1 and not executor._engine.takes_turns
