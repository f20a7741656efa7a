"""Whether calls run in chunks or whole is measured by one of them, and right either way."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, CompileBudget
from bucketjit._api.chunked_log import chunked_log
from bucketjit._api.whole_calls import whole_calls
from bucketjit._precompile import trial
from bucketjit.errors import SpecError
from bucketjit.types import Event
from tests.comparison import assert_same

WIDTH = 512
WEIGHTS = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
LOG = {"b": [4, 2, 8, 4], "s": [20, 30, 10, 16]}


def layer(w: Any, x: Any) -> Any:
    """Enough work for a measurement, with its rows independent of each other."""
    return jax.nn.softmax(jnp.tanh(x @ w).mean(1), -1)


def small(w: Any, x: Any) -> Any:
    return (x * w[0]).sum(1)


def rows(b: int, s: int) -> np.ndarray:
    return np.random.default_rng(b * s).standard_normal((b, s, WIDTH)).astype(np.float32)


def planned(
    told: list[Event], fn: Callable[..., Any] = layer, k: int = 2, **options: Any
) -> BucketedExec[Any, Any]:
    executor = BucketedExec(fn, dynamic_axes=(None, "b, s, _"))
    executor = executor.with_fitted_plan(LOG, k, split="b", **options)
    return executor.with_on_event(told.append)


def details(told: list[Event], kind: str) -> list[str]:
    return [event.detail for event in told if event.kind == kind]


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], list[int]]:
    """Let both ways run, and say that they took so long in chunks and whole."""

    def taking(chunks: float, whole: float) -> list[int]:
        times, measured = trial._times, list[int]()

        def said(*given: Any) -> tuple[float, float]:
            seconds = times(*given)
            measured.append(given[1][1].shape[0])
            assert all(0 < x < 60 for x in seconds)
            return chunks, whole

        monkeypatch.setattr(trial, "_times", said)
        return measured

    return taking


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_the_faster_way_serves_calls(take: Any, whole: bool, ahead: bool) -> None:
    measured, told = take(*((2.0, 1.0) if whole else (1.0, 2.0))), list[Event]()
    executor = planned(told, ahead=ahead)
    assert_same(executor(WEIGHTS, rows(4, 18)), jax.jit(layer)(WEIGHTS, rows(4, 18)), rtol=1e-4)
    (why,) = details(told, "plan")
    assert why.startswith(f"calls run {'whole' if whole else 'in chunks'}: this one takes ")
    # What was compiled for the measurement alone is gone.
    kept = [dict(bucket.sizes) for bucket in executor.stats().buckets]
    assert len(kept) == (2 if ahead else 1)
    assert all((sizes["b"] > 1) is whole for sizes in kept)
    for b, s in ((2, 25), (8, 10), (1, 3), (4, 18), (9, 40)):
        assert_same(executor(WEIGHTS, rows(b, s)), jax.jit(layer)(WEIGHTS, rows(b, s)), rtol=1e-4)
    assert measured == [4]
    assert executor.wait_for_compiles(60)
    kept = [dict(bucket.sizes) for bucket in executor.stats().buckets]
    assert all((sizes["b"] > 1) is whole for sizes in kept)
    assert len(kept) <= 3  # one is for the call beyond the plan


@pytest.mark.parametrize("whole", [False, True])
def test_runs_that_measure_are_not_counted(take: Any, whole: bool) -> None:
    take(*((2.0, 1.0) if whole else (1.0, 2.0)))
    executor = planned([])
    executor(WEIGHTS, rows(4, 18))
    stats = executor.stats()
    assert (stats.calls, stats.hits, stats.misses) == (4, 3, 2)  # four chunks of one call
    executor(WEIGHTS, rows(4, 18))
    chunks, after = 1 if whole else 4, executor.stats()
    compiled = after.misses - stats.misses
    assert after.calls - stats.calls == chunks
    assert after.hits - stats.hits == chunks - compiled


def test_a_call_of_usual_size_is_measured(take: Any) -> None:
    measured, told = take(1.0, 2.0), list[Event]()
    executor = planned(told)
    executor(WEIGHTS, rows(2, 4))
    assert measured == []
    executor(WEIGHTS, rows(3, 20))
    executor(WEIGHTS, rows(8, 10))
    assert measured == [3]


def test_an_unusual_call_is_measured_if_no_other_comes(take: Any) -> None:
    measured = take(1.0, 2.0)
    executor = planned([])
    for s in range(1, trial._PATIENCE + 3):
        executor(WEIGHTS, rows(2, s))
    assert measured == [2]


@pytest.mark.parametrize(
    ("fn", "options"), [(small, {}), (layer, {"measure": False})], ids=["small", "by choice"]
)
def test_what_is_not_measured_runs_in_chunks(fn: Any, options: Any) -> None:
    told: list[Event] = []
    executor = planned(told, fn, ahead=True, **options)
    assert_same(executor(WEIGHTS, rows(4, 18)), jax.jit(fn)(WEIGHTS, rows(4, 18)), rtol=1e-4)
    assert details(told, "plan") == []
    stats = executor.stats()
    assert stats.compiles == len(stats.buckets) == 2
    assert all(bucket.sizes["b"] == 1 for bucket in stats.buckets)


def test_other_buckets_of_chunks_are_left_alone() -> None:
    told: list[Event] = []
    executor = planned(told).with_buckets([2], "b")
    executor(WEIGHTS, rows(4, 18))
    assert details(told, "plan") == []


def test_without_a_compile_for_it_calls_run_in_chunks() -> None:
    told: list[Event] = []
    executor = BucketedExec(
        layer, dynamic_axes=(None, "b, s, _"), compile_budget=CompileBudget(compiles=1)
    )
    executor = executor.with_fitted_plan(LOG, 1, split="b").with_on_event(told.append)
    assert_same(executor(WEIGHTS, rows(4, 18)), jax.jit(layer)(WEIGHTS, rows(4, 18)), rtol=1e-4)
    (why,) = details(told, "plan")
    assert why.startswith("calls run in chunks: CompileBudgetError: ")
    executor(WEIGHTS, rows(3, 30))
    assert [dict(bucket.sizes) for bucket in executor.stats().buckets] == [{"b": 1, "s": 30}]


@pytest.mark.parametrize(
    ("k", "cost", "in_chunks", "at_once"),
    [
        (1, None, 18 * 30, 4 * 8 * 30),
        (9, None, 4 * 20 + 2 * 30 + 8 * 10 + 4 * 16, 4 * 20 + 2 * 30 + 8 * 10 + 4 * 16),
        (1, lambda s: s * s, 18 * 900, 4 * 8 * 900),
    ],
)
def test_what_the_log_costs(k: int, cost: Any, in_chunks: float, at_once: float) -> None:
    executor = BucketedExec(layer, dynamic_axes=(None, "b, s, _"))
    executor = executor.with_fitted_plan(LOG, k, split="b", cost=cost)
    whole = whole_calls(executor._config, chunked_log(LOG, "b"), k, cost)
    assert whole is not None
    assert (whole.chunks_cost, whole.whole_cost) == (in_chunks, at_once)


def test_calls_of_one_chunk_have_no_other_way() -> None:
    executor = BucketedExec(layer, dynamic_axes=(None, "b, s, _"))
    executor = executor.with_fitted_plan({"b": [1, 1], "s": [3, 9]}, 2, split="b")
    assert executor._config.whole is None


def test_measure_is_a_flag() -> None:
    with pytest.raises(SpecError, match="measure must be True or False, got 'b'"):
        planned([], measure="b")
