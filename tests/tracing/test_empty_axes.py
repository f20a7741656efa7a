"""Axes of size 0 beside axes that vary: in the buckets of the others, as one more program."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit.errors import ArtifactError, FallbackWarning
from tests.comparison import assert_close, floats

Function = Callable[..., Any]


def graph(n: int, e: int) -> tuple[np.ndarray, ...]:
    ends = np.random.default_rng(n + e).integers(0, n, (2, e))
    return floats(n, 3), ends[0], ends[1], floats(e)


def passed(x: Any, source: Any, target: Any, weight: Any) -> Any:
    messages = jnp.tanh(x[source] * weight[:, None])
    rows = x + jax.ops.segment_sum(messages, target, num_segments=x.shape[0])
    return (rows**2).mean(), rows, jax.nn.softmax(weight), jnp.concatenate([weight, x[:, 0]])


def pair(n: int, e: int) -> tuple[np.ndarray, ...]:
    return floats(n), floats(e)


def selected(x: Any, y: Any) -> Any:
    kept, rest = y[y > 0], x[x > 0]
    return kept, rest, kept.sum() + rest.sum() + kept.shape[0]


def joined(x: Any, y: Any, both: Any) -> Any:
    return jnp.concatenate([x, y]), both @ both.T, jnp.flip(both, 0).sum(1)


def decided(x: Any, y: Any) -> Any:
    return x * 2 if y.shape[0] == 0 else x[: x.shape[0] // 2] + y.mean()


GRAPH = "n, _", "e", "e", "e"
STREAM = [(5, 0), (6, 9), (7, 0), (3, 0), (4, 2), (9, 0), (12, 0), (5, 5), (2, 0), (16, 0), (7, 7)]
# A function, its axes, its arguments, and the compiles of `STREAM`: sizes of n up to 8 and 16 with
# e = 0, and two buckets of both; under the default rule, one more before the axes have names.
CASES: dict[str, tuple[Function, Any, Function, int]] = {
    "graphs": (passed, GRAPH, graph, 4),
    "the default rule": (passed, None, graph, 5),
    "computed sizes": (selected, ("n", "e"), pair, 4),
    "expressions": (
        joined,
        ("n", "2*e + 1", "n + e, e"),
        lambda n, e: (floats(n), floats(2 * e + 1), floats(n + e, e)),
        4,
    ),
    "a decision": (decided, ("n", "e"), pair, 4),
}


def exactly(fn: Function, arguments: Any) -> Any:
    return (fn if fn is selected else jax.jit(fn))(*map(jnp.asarray, arguments))


def derived(fn: Function) -> Function:
    return jax.grad(lambda x, *rest: fn(x, *rest)[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_stream(name: str) -> None:
    fn, axes, made, compiles = CASES[name]
    executor = BucketedExec(fn, dynamic_axes=axes).with_pow2(min=8)
    with warnings.catch_warnings(action="error"):
        for sizes in STREAM:
            assert_close(executor(*made(*sizes)), exactly(fn, made(*sizes)))
    stats = executor.stats()
    assert not stats.fallback_reasons and len(stats.buckets) == compiles
    for sizes in [(8, 0), (13, 0), (3, 1)]:  # all buckets are there
        assert_close(executor(*made(*sizes)), exactly(fn, made(*sizes)))
    assert executor.stats().compiles == stats.compiles


@pytest.mark.parametrize("axes", [GRAPH, None], ids=["named", "default"])
def test_map_gradients_and_warmup(axes: Any) -> None:
    executor = BucketedExec(passed, dynamic_axes=axes).with_pow2(min=8)
    examples = [graph(*sizes) for sizes in STREAM]
    results = executor.map(*map(list, zip(*examples, strict=True)))
    for result, example in zip(results, examples, strict=True):
        assert_close(result, exactly(passed, example))
    assert not executor.stats().rows_alone
    for sizes in [(5, 0), (6, 3), (7, 0)]:
        x, *rest = graph(*sizes)
        got = derived(executor)(jnp.asarray(x), *rest)
        assert_close(got, derived(passed)(jnp.asarray(x), *rest))
    named = {"n": [8, 16], "e": [0, 8]} if axes else {"batch": [8, 16], "batch_1": [0, 8]}
    assert executor.warmup(*graph(4, 0), sizes=named).failed == ()
    before = executor.stats().compiles
    for sizes in [(8, 0), (13, 0), (3, 1), (16, 2)]:
        executor(*graph(*sizes))
    assert executor.stats().compiles == before


def test_all_open_axes_empty() -> None:
    """They run exact, but where sizes are computed, which ``jit`` cannot trace."""
    executor = BucketedExec(selected, dynamic_axes=("n", "e")).with_pow2()
    assert_close(executor(*pair(0, 0)), exactly(selected, pair(0, 0)))
    assert executor.explain(*pair(0, 0)).kind == "masked"
    executor = BucketedExec(jnp.cumsum, dynamic_axes="n").with_pow2()
    assert_close(executor(floats(0)), jnp.cumsum(floats(0)))
    assert executor.explain(floats(0)).kind == "exact"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "like, options",
    [
        ((5, 7), {"sizes": [{"n": 8, "e": 8}, {"n": 8, "e": 0}], "derivatives": 1}),
        ((5, 0), {"sizes": {"n": 8, "e": [0, 8]}, "derivatives": 1}),
        ((5, 0), {}),  # the buckets of the calls before
    ],
)
def test_a_saved_function(tmp_path: Path, like: Any, options: Any) -> None:
    executor = BucketedExec(passed, dynamic_axes=GRAPH).with_pow2(min=8)
    if not options:
        executor(*graph(8, 0)), executor(*graph(8, 8))
    executor.save(tmp_path / "f.bkt", *graph(*like), **options)
    loaded = bucketjit.load(tmp_path / "f.bkt")
    assert {"n": 8, "e": 0} in loaded.buckets
    for sizes in [(5, 0), (1, 0), (8, 0), (6, 5), (8, 1)]:
        assert_close(loaded(*graph(*sizes)), exactly(passed, graph(*sizes)))
        if "derivatives" in options:
            x, *rest = graph(*sizes)
            got = derived(loaded)(jnp.asarray(x), *rest)
            assert_close(got, derived(passed)(jnp.asarray(x), *rest))
    many = [graph(*sizes) for sizes in [(5, 0), (6, 5)]]
    with pytest.warns(FallbackWarning, match="from a file"):
        results = loaded.map(*map(list, zip(*many, strict=True)))
    for result, example in zip(results, many, strict=True):
        assert_close(result, exactly(passed, example))


def test_a_file_without_the_empty_size(tmp_path: Path) -> None:
    executor = BucketedExec(passed, dynamic_axes=GRAPH).with_pow2(min=8)
    executor.save(tmp_path / "f.bkt", *graph(5, 7))
    loaded = bucketjit.load(tmp_path / "f.bkt")
    with pytest.raises(ArtifactError, match="e is 0; save the function with such sizes"):
        loaded(*graph(5, 0))
