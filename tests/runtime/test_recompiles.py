"""Warnings of functions that compile for each size, or beyond their buckets."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._runtime import recompiles
from bucketjit.errors import RecompileWarning, SpecError
from bucketjit.types import Event
from tests.comparison import ones


def total(x: Any) -> Any:
    return x.sum()


def told(run: Callable[[], object]) -> list[str]:
    """The texts of the warnings of recompiles."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        run()
    for warning in caught:
        assert warning.category is not RecompileWarning or warning.filename == __file__
    return [str(w.message) for w in caught if w.category is RecompileWarning]


def calls(executor: Any, *arguments: Any) -> Callable[[], object]:
    return lambda: [executor(x) for x in arguments]


def test_without_a_strategy_the_third_size_is_told_of_once() -> None:
    events: list[Event] = []
    executor = BucketedExec(total).with_on_event(events.append)
    executor.with_pow2()  # thrown away
    assert told(calls(executor, ones(3), ones(3), ones(5), ones(5))) == []
    (text,) = told(calls(executor, ones(6), ones(7), ones(8)))
    assert "axis 0 of x varied" in text and "3, 5, 6" in text
    assert "f = f.with_pow2()" in text and "with_exact" in text
    assert [e.detail for e in events if e.kind == "recompile"] == [text.removeprefix("total ")]
    executor.cache_clear()
    assert len(told(calls(executor, *(ones(n) for n in (3, 4, 5, 6))))) == 1


def test_the_third_size_of_a_static_axis_is_told_of() -> None:
    executor = BucketedExec(lambda x, y: x.sum() + y.sum(), dynamic_axes=("n", None)).with_pow2()
    assert told(calls(lambda y: executor(ones(3), y), ones(3), ones(5))) == []
    (text,) = told(calls(lambda y: executor(ones(3), y), ones(6), ones(7)))
    assert "static axis: axis 0 of y varied (static), 3 sizes" in text


def test_lists_whose_length_varies_are_told_of() -> None:
    executor = BucketedExec(lambda x: np.float32(2) * sum(x["ids"]), warn_after=3).with_pow2()
    (text,) = told(calls(executor, *({"ids": [1.5] * n} for n in range(1, 6))))
    assert "x had 4 structures or types" in text and "np.asarray" in text


def test_other_types_are_no_new_sizes() -> None:
    kinds = [np.float32, np.int32, np.float16, np.int8]
    assert told(calls(BucketedExec(total), *(np.ones(3, kind) for kind in kinds))) == []


def test_who_chose_is_not_told() -> None:
    sizes = [ones(n) for n in (3, 4, 5, 6)]
    assert told(calls(BucketedExec(total).with_exact(), *sizes)) == []
    assert told(calls(BucketedExec(total, warn_after=0), *sizes)) == []
    assert told(calls(BucketedExec(total, warn_after=4), *sizes)) == []
    warmed = BucketedExec(total)
    for x in sizes:
        warmed.warmup(x, progress=False)
    assert told(calls(warmed, *sizes)) == []


def test_more_executables_than_wanted_are_told_of_once() -> None:
    executor = BucketedExec(total, dynamic_axes="n, _", warn_after=3).with_pow2()
    (text,) = told(calls(executor, *(ones(2, m) for m in range(3, 9))))
    assert text.startswith("total has compiled 4 executables: axis 1 of x varied (static)")
    assert "4 sizes: 3, 4, 5, 6" in text and "axis 0" not in text
    exact = BucketedExec(total, warn_after=1).with_exact()
    assert len(told(calls(exact, *(ones(n) for n in (3, 4, 5))))) == 1


def test_by_default_the_buckets_are_not_counted() -> None:
    def shape(executor: Any, shapes: list[tuple[int, ...]]) -> list[str]:
        with jax.disable_jit(False):
            return told(calls(executor, *(ones(*s) for s in shapes)))

    every = [(n,) for n in range(1, 24)]
    assert shape(BucketedExec(total).with_linear(1), every) == []  # 23 buckets
    static = BucketedExec(total, dynamic_axes="n, _").with_pow2()
    assert shape(static, [(3, m) for m in range(1, 12)]) == []
    (text,) = shape(static, [(3, m) for m in range(12, 30)])
    assert "axis 1 of x varied (static)" in text


@pytest.mark.parametrize(
    "options",
    [
        {"dynamic_axes": "n", "buckets": [1, 2], "overflow": "exact"},
        {"dynamic_axes": "n, m", "buckets": {"m": "pow2"}},
    ],
)
def test_sizes_without_a_bucket_are_no_buckets(options: Any) -> None:
    of_one = len(options["dynamic_axes"]) == 1
    arrays = [ones(n) if of_one else ones(n, 2) for n in range(3, 25)]
    (text,) = told(calls(BucketedExec(total, **options), *arrays))
    assert "axis 0 of x varied, 2" in text


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "many"])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(SpecError, match="warn_after must be a number"):
        BucketedExec(total, warn_after=wrong)


def batch(rows: int, columns: int) -> dict[str, Any]:
    return {"input_ids": ones(rows, columns), "attention_mask": ones(rows, columns), "scale": 2}


def test_static_values_that_vary_are_named() -> None:
    scaled = BucketedExec(lambda x, rate: x.sum() * rate, static_argnames="rate").with_pow2()
    (text,) = told(lambda: [scaled(ones(4), rate=0.5 * i) for i in range(20)])
    assert "the static argument rate had 20 values: 0.0, 0.5, 1.0" in text
    assert "has compiled 20 executables" in text  # 18 above the one bucket


def test_the_argument_of_a_static_number_is_named() -> None:
    def scaled(x: Any, scale: Any) -> Any:
        return x * (scale["by"] if isinstance(scale, dict) else scale)

    by_position = BucketedExec(scaled, static_argnums=1, warn_after=2).with_pow2()
    (text,) = told(lambda: [by_position(ones(3), 0.5 * i) for i in range(4)])
    assert "the static argument scale had 3 values: 0.0, 0.5, 1.0" in text
    trees = BucketedExec(scaled, warn_after=2).with_pow2()
    (text,) = told(lambda: [trees(ones(3), {"by": 2.0, str(i): 1.0}) for i in range(4)])
    assert "scale had 3 structures or types, with static values in it" in text


@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_axis_beside_a_filled_one_is_not_told_of(empty: int) -> None:
    both = BucketedExec(lambda x, y: x.sum() + y.sum(), dynamic_axes=("e", "n"), warn_after=1)
    both = both.with_pow2()
    (text,) = told(lambda: [both(ones(empty), ones(n)) for n in (1, 2, 4)])
    assert "size 0" not in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("bounds", "cure"),
    [
        ({"maxsize": 2}, "maxsize=2 would have to be 4 or more"),
        ({"maxsize": None, "max_bytes": 8}, "max_bytes=8 would have to be "),
        ({"maxsize": 1, "max_bytes": 10**9}, "maxsize=1 would have to be 4 or more. Or"),
    ],
)
def test_a_cache_that_is_too_small_is_told_of(bounds: Any, cure: str) -> None:
    executor = BucketedExec(total, dynamic_axes="n").with_pow2().with_maxsize(**bounds)
    (text,) = told(lambda: [executor(ones(n)) for n in (1, 2, 3, 8) * 6])
    assert cure in text and "19 of them again, as the cache had evicted them" in text
    assert "dynamic_axes" not in text
    large = BucketedExec(total, dynamic_axes="n").with_pow2().with_maxsize(4)
    assert told(lambda: [large(ones(n)) for n in (1, 2, 3, 8) * 6]) == []


def test_other_numbers_of_evictions_are_told_of() -> None:
    executor = BucketedExec(total, dynamic_axes="n", warn_after=2).with_pow2().with_maxsize(1)
    (text,) = told(lambda: [executor(ones(n)) for n in (2, 3) * 4])
    assert text.startswith("total has compiled 3 executables: axis 0 of x varied")
    executor = BucketedExec(total, dynamic_axes="n").with_pow2().with_maxsize(4)
    both = executor, jax.grad(executor)
    for text in told(lambda: [f(jnp.ones(n)) for n in (3, 5, 9) * 8 for f in both]):
        assert "maxsize=4 would have to be " in text and "be 4 or" not in text
    executor = BucketedExec(total, dynamic_axes="n", warn_after=0).with_pow2().with_maxsize(1)
    assert told(lambda: [executor(ones(n)) for n in (2, 3) * 12]) == []


@pytest.mark.parametrize("first", [0, 40])
def test_seconds_of_compiling_are_told_of(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count once some calls were served; then few executables may take most of the time."""
    monkeypatch.setattr(recompiles, "_LONG", 1e-3)
    monkeypatch.setattr(recompiles, "monotonic", lambda: 0.0)  # all else takes no time
    scaled = BucketedExec(lambda x, by: x.sum() * by, static_argnums=1).with_pow2()
    for _ in range(first):
        scaled(ones(4), 0)
    found = told(lambda: [scaled(ones(4), by) for by in range(1, 6)])
    if first:
        assert "executables; that took" in found[0] and "seconds since call 4" in found[0]
        assert "the static argument by had 5 values" in found[0]
    assert len(found) == bool(first)
