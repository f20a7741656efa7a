"""The first call of new sizes in a bucket that is compiled: right, and cheap."""

import gc
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, errors


def _python_calls(fn: Any, *args: Any) -> int:
    """How many functions of Python a call enters."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()  # JAX has a callback of the collector, which may come in any call
    sys.setprofile(profile)
    try:
        fn(*args)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("parameters", [0, 100])
def test_a_new_size_costs_few_python_calls(parameters: int) -> None:
    params = [jnp.ones(3) for _ in range(parameters)]
    fn = BucketedExec(lambda x, w: x.sum() + sum(p.sum() for p in w), dynamic_axes=("n, _", None))
    fn = fn.with_pow2()
    for n in (17, 20, 18):
        fn(np.ones((n, 4), np.float32), params)
    x = np.ones((23, 4), np.float32)
    assert _python_calls(fn, x, params) <= 72
    assert float(fn(x, params)) == 92 + 3 * parameters


def _cases() -> dict[str, tuple[Any, dict[str, Any], list[tuple[Any, ...]]]]:
    def ones(*shape: int) -> Any:
        return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def branch(x: Any) -> Any:
        return x.sum() if x.shape[0] > 12 else x.max()

    return {
        "guard": (branch, {"dynamic_axes": "n"}, [(ones(n),) for n in (9, 10, 13, 14, 12, 16)]),
        "static axis": (
            lambda x: x.sum(0),
            {"dynamic_axes": "n, _"},
            [(ones(n, k),) for n, k in ((9, 2), (10, 2), (11, 3), (12, 3), (13, 2))],
        ),
        "size": (
            lambda x, n: x * n,
            {"dynamic_axes": ("n", "n")},
            [(ones(n), n) for n in (9, 10, 11, 16)],
        ),
        "axes without names": (
            lambda x, y: (x.mean(), y.sum()),
            {},
            [(ones(a), ones(b)) for a, b in ((9, 9), (10, 10), (11, 12), (12, 9), (16, 16))],
        ),
        "expression": (
            lambda x: jnp.cumsum(x),
            {"dynamic_axes": "2*n"},
            [(ones(n),) for n in (18, 20, 22, 32)],
        ),
        "closed argument of another type": (
            lambda x, c: x * c,
            {"dynamic_axes": ("n", None)},
            [(ones(9), 2), (ones(10), 2), (ones(11), 2.5), (ones(12), np.int8(3)), (ones(13), 2)],
        ),
    }


@pytest.mark.parametrize("name", _cases())
def test_results_are_those_of_the_function(name: str) -> None:
    fn, options, calls = _cases()[name]
    bucketed = BucketedExec(fn, **options).with_pow2()
    for _ in range(2):
        for args in calls:
            want, got = fn(*args), bucketed(*args)
            for g, w in zip(_leaves(got), _leaves(want), strict=True):
                assert g.shape == w.shape
                np.testing.assert_allclose(g, w, rtol=1e-5)
    assert bucketed.stats().calls == 2 * len(calls)
    assert bucketed.stats().fallback_calls == 0


def _leaves(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree)]


def test_errors_are_those_of_a_first_call() -> None:
    two = BucketedExec(lambda x, y: x + y, dynamic_axes=("n", "n"), constraints=("mod(n, 2) == 0",))
    two = two.with_pow2()
    for n in (10, 12):
        two(np.ones(n), np.ones(n))
    with pytest.raises(errors.SizeMismatchError):
        two(np.ones(14), np.ones(16))
    with pytest.raises(errors.ArgumentError, match="break the constraint"):
        two(np.ones(13), np.ones(13))
    halves = BucketedExec(lambda x: x.reshape(2, -1).sum(0), dynamic_axes="n").with_pow2()
    for n in (10, 12):
        halves(np.ones(n, np.float32))
    with pytest.raises((TypeError, errors.ShapeCheckError)):
        halves(np.ones(13, np.float32))
    assert halves(np.ones(14, np.float32)).shape == (7,)


def test_an_evicted_bucket_is_compiled_again() -> None:
    fn = BucketedExec(lambda x: x.sum(), dynamic_axes="n", maxsize=1).with_pow2()
    for n in (9, 10, 3, 11, 4, 12):
        assert float(fn(np.ones(n, np.float32))) == n
    assert fn.cache_size() == 1
    assert fn.stats().compiles == 5


def test_sizes_of_two_buckets_are_told_apart() -> None:
    fn = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2()
    for n in (9, 3, 16, 4, 17, 11, 33, 32):
        assert float(fn(np.ones(n, np.float32))) == n
    assert fn.cache_size() == 4
    by_sizes = {b.sizes["n"]: b.hits for b in fn.stats().buckets}
    assert by_sizes == {16: 2, 4: 1, 32: 1, 64: 0}


def _summed(*args: Any, **named: Any) -> Any:
    return sum(jnp.sum(x) for x in jax.tree.leaves((args, named)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "make",
    [
        lambda x, i: ((), {f"x{i}": x}),
        lambda x, i: (({f"x{i}": x},), {}),
        lambda x, i: ((x,) * (i + 1), {}),
        lambda x, i: (tuple(x if i >> k & 1 else None for k in range(3)), {"x": x}),
        lambda x, i: ((x, {f"w{i}": 1.0}), {}),  # in what has no open axis
    ],
)
def test_other_structures_that_were_seen_cost_a_call_nothing(make: Any) -> None:
    """A call reads the key of few tables and tries one handler, whatever was called before it."""
    executor = bucketjit.jit(_summed, buckets="pow2")
    calls = [make(np.ones(3, np.float32), i) for i in range(8)]
    for args, named in calls * 2:
        executor(*args, **named)
    path, looks = executor._engine.memory.fast_path, []

    def counted(what: str, run: Any) -> Any:
        return lambda *given: looks.append(what) or run(*given)

    for table in path.tables:
        table.key = counted("key", table.key)
        for handler in table.handlers():
            handler.serve = counted("handler", handler.serve)
    for args, named in calls:
        looks.clear()
        np.testing.assert_allclose(executor(*args, **named), _summed(*args, **named))
        assert looks.count("handler") == 1 and looks.count("key") <= 2
    assert executor.stats().compiles == len(executor.stats().buckets)
