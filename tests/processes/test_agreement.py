"""Several processes run their calls in the same bucket, or none of them runs its call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit._processes.job import this_job
from bucketjit.errors import AgreementError, ArgumentError, SpecError
from tests.processes.launch import run_processes


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def total(**options: Any) -> BucketedExec[..., Any]:
    def summed(x: Any) -> Any:
        return x.sum(0)

    options = {"dynamic_axes": "b, _", "buckets": "pow2", **options}
    return BucketedExec(summed, **options).with_agreement(timeout=20)


def buckets_of(function: BucketedExec[..., Any]) -> list[Any]:
    """The buckets and their hits."""
    return sorted((tuple(b.sizes.values()), b.hits) for b in function.stats().buckets)


def raised(call: Callable[[], object]) -> list[Any]:
    """The type of an error, the processes that it names, and what they did."""
    try:
        call()
    except Exception as error:
        told = getattr(error, "processes", {})
        return [type(error).__name__, sorted(told), " | ".join(told.values()), str(error)]
    return ["nothing", [], "", ""]


# --- the same bucket everywhere ---


def random_steps(rank: int, steps: int) -> dict[str, Any]:
    every = np.random.default_rng(0).integers(1, 200, (steps, 8))
    used = total()
    for sizes in every:
        n = int(sizes[rank])
        assert used(ones(n, 2)).tolist() == [n, n]
    stats = used.stats()
    keys = this_job()._store.under("bucketjit/agreement/")
    largest = every[:, : jax.process_count()].max(1)
    return {
        "buckets": buckets_of(used),
        "expected": sorted({1 << int(n - 1).bit_length() for n in largest}),
        "compiles": stats.compiles,
        "calls": stats.calls,
        "keys": len(keys),
    }


@pytest.mark.parametrize(("count", "steps"), [(2, 1000), (4, 100)])
def test_random_steps_take_the_same_buckets_on_all_processes(count: int, steps: int) -> None:
    first, *others = [x.result for x in run_processes(random_steps, count, steps)]
    assert all(other["buckets"] == first["buckets"] for other in others)
    assert [bucket for (bucket,), _ in first["buckets"]] == first["expected"]
    assert first["compiles"] == len(first["expected"])
    assert first["calls"] == steps
    assert first["keys"] <= 20 * count  # those of the last exchanges: older ones are deleted


def local_choices(rank: int) -> dict[str, Any]:
    """What a process would decide by itself: evictions, stand-ins, budgets."""
    variants = {
        "evicting": total().with_maxsize(2),
        "patient": total().with_maxsize(2, eviction=bucketjit.types.Eviction("lfu", 2)),
        "in the background": total().with_background_compile(),
        "several axes": total(dynamic_axes="b, s"),
    }
    every = np.random.default_rng(1).integers(1, 60, (40, 2))
    found: dict[str, Any] = {}
    for name, used in variants.items():
        for sizes in every:
            n = int(sizes[rank])
            width = 2 + n % 5 if name == "several axes" else 2
            assert used(ones(n, width)).tolist() == [n] * width
        found[name] = [buckets_of(used), used.stats().evictions > 0]
    # The budget of one process is spent, so none runs the call.
    budgeted = total(compile_budget=None if rank == 0 else 1)
    budgeted(ones(3, 2))
    found["budget"] = raised(lambda: budgeted(ones(9, 2)))
    found["after it"] = float(budgeted(ones(4, 2))[0])
    return found


def test_what_one_process_knows_decides_nothing() -> None:
    first, second = [x.result for x in run_processes(local_choices, 2)]
    for name in ("evicting", "patient", "in the background", "several axes"):
        assert first[name] == second[name]
    assert first["evicting"][1] and first["patient"][1]
    assert first["budget"][:2] == ["AgreementError", [1]]
    assert "CompileBudgetError" in first["budget"][2]
    assert second["budget"] == first["budget"]
    assert (first["after it"], second["after it"]) == (4, 4)


# --- calls that differ ---


def calls_that_differ(rank: int) -> dict[str, Any]:
    used, found = total(), {}
    found["not an array"] = raised(lambda: used("text" if rank else ones(3, 2)))
    found["afterwards"] = raised(lambda: used(ones(3 + rank, 2)))
    found["dtype"] = raised(lambda: used(ones(3, 2).astype(np.float16 if rank else np.int32)))
    found["static axis"] = raised(lambda: used(ones(3, 2 + rank)))
    function = BucketedExec(jnp.sin if rank else jnp.cos, dynamic_axes="b")
    function = function.with_pow2().with_agreement()
    found["function"] = raised(lambda: function(ones(3)))
    strategy = total(buckets="pow2" if rank else [4, 8])
    found["strategy"] = raised(lambda: strategy(ones(3, 2)))
    listed = total(buckets=[4, 8])
    found["overflow"] = raised(lambda: listed(ones(30 if rank else 3, 2)))
    found["empty"] = raised(lambda: used(ones(0 if rank else 3, 2)))
    weights = BucketedExec(jnp.dot, dynamic_axes=("b, _", None), static_argnames="precision")
    weights = weights.with_pow2().with_agreement()
    half = ones(2).astype(np.float16 if rank else np.float32)
    found["weights"] = raised(lambda: weights(ones(3, 2), half))
    precision = "high" if rank else "highest"
    found["static"] = raised(lambda: weights(ones(3, 2), ones(2), precision=precision))
    order = (total(), total(dynamic_axes="c, _"))
    for one in order if rank else reversed(order):
        found.setdefault("order", []).append(raised(lambda one=one: one(ones(3, 2))))

    # A program that cannot be masked on one process only.
    def refuse(ctx: Any, *operands: Any) -> Any:
        ctx.refuse("it is refused here", "mend it")

    rules = {jax.lax.sin_p: refuse} if rank else {}
    unmasked = BucketedExec(jnp.sin, dynamic_axes="b").with_pow2().with_rules(rules)
    unmasked = unmasked.with_agreement()
    found["build"] = raised(lambda: unmasked(ones(3)))
    found["refused"] = raised(lambda: unmasked(ones(3)))
    static = BucketedExec(jnp.sin, dynamic_axes=None if rank < 9 else "b").with_agreement()
    found["no open axis"] = raised(lambda: static(np.float32(1)))
    return found


def test_calls_that_differ_run_nowhere_and_name_the_process() -> None:
    first, second = [x.result for x in run_processes(calls_that_differ, 2)]
    assert first["not an array"][:2] == ["AgreementError", [1]]
    assert "ArgumentError" in first["not an array"][2]
    assert second["not an array"][0] == "ArgumentError"
    for name, told in {
        "dtype": "float16[b, 2]",
        "static axis": "float32[b, 3]",
        "function": "sin",
        "strategy": "Pow2()",
        "weights": "b: float16[2]",
        "static": "precision: 'high'",
    }.items():
        assert first[name][:3] == second[name][:3]
        assert first[name][:2] == ["AgreementError", [0, 1]]
        assert told in first[name][2]
    for name, told in {"overflow": "BucketOverflowError", "empty": "size 0"}.items():
        assert first[name] == second[name]
        assert first[name][:2] == ["AgreementError", [1]]
        assert told in first[name][2]
    assert [x[0] for x in (*first["order"], *second["order"])] == ["AgreementError"] * 4
    assert first["build"][:2] == ["AgreementError", [1]]
    assert "it is refused here" in first["build"][2]
    assert first["build"] == second["build"]
    assert first["refused"] == second["refused"]
    assert first["refused"][:2] == ["AgreementError", [1]]
    for name in ("afterwards", "no open axis"):
        assert first[name][0] == second[name][0] == "nothing"


def gone(rank: int, how: str) -> None:
    used = total().with_agreement(timeout=2 if how == "killed" else 60)
    used(ones(3 + rank, 2))
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "raised":
        raise ValueError("a bad row")
    found = raised(lambda: used(ones(3, 2)))
    os.write(1, repr(found).encode())
    os._exit(0)  # the shutdown of the job would wait for the process that is gone


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("killed", "did not come within 2 s"),
        ("raised", "has ended with ValueError: a bad row"),
    ],
)
def test_a_process_that_is_gone_is_named(how: str, told: str) -> None:
    first, _ = run_processes(gone, 2, how, all_succeed=False)
    assert first.code == 0, first.stderr
    assert told in first.stdout and "AgreementError" in first.stdout


def skipping(rank: int) -> list[Any]:
    used = total().with_agreement(timeout=1)
    used(ones(3, 2))
    return raised(lambda: used(ones(3, 2))) if rank == 0 else []


def test_a_call_that_one_process_skips_is_an_error_with_its_number() -> None:
    first, _ = [x.result for x in run_processes(skipping, 2)]
    assert first[:2] == ["AgreementError", [1]]
    assert "call 2" in first[3] and "did not come within 1 s" in first[3]


# --- one batch ahead ---


def batches_ahead(rank: int) -> dict[str, Any]:
    def scored(weights: Any, batch: Any, scale: Any = 1.0) -> Any:
        return (batch["x"] @ weights).sum() * scale, batch["x"] * 2

    axes = (None, {"x": "b, _", "y": "b"}, None)
    used = BucketedExec(scored, dynamic_axes=axes).with_pow2().with_agreement(timeout=20)
    sizes = [[3, 9, 5, 17, 2, 2], [4, 2, 30, 1, 2, 7]][rank]
    weights, got = ones(2), []
    for batch in used.agreed({"x": ones(n, 2), "y": ones(n)} for n in sizes):
        result, rows = used(weights, batch, scale=2.0)
        got.append([float(result), *rows.shape])
    found: dict[str, Any] = {"results": got == [[4.0 * n, n, 2] for n in sizes]}
    found["buckets"] = [b for (b,), _ in buckets_of(used)]
    found["exchanges"] = this_job().calls._done
    # Batches that are changed on their way: each call is agreed on when it is made.
    other = total()
    found["changed"] = [float(other(x + 1)[0]) for x in other.agreed(ones(n, 2) for n in sizes)]
    found["changed"] = found["changed"] == [2.0 * n for n in sizes]

    def uneven() -> None:
        for x in other.agreed([ones(5, 2)] * (3 + rank)):
            other(x)

    def broken_source() -> Any:
        yield ones(5, 2)
        if rank:
            raise ValueError("a bad row")
        yield ones(5, 2)
        yield ones(5, 2)

    def broken() -> None:
        for x in other.agreed(broken_source()):
            other(x)

    def leaving() -> None:
        for i, x in enumerate(other.agreed([ones(5, 2)] * 6)):
            other(x)
            if rank and i == 1:
                return

    def left_by_all() -> None:
        for x in other.agreed([ones(5, 2)] * 6):
            other(x)
            break

    def wrong_batch() -> None:
        for x in other.agreed([ones(5, 2), ones(5, 2), ones(5, 2 + rank), ones(5, 2)]):
            other(x)

    found["uneven"] = raised(uneven)
    found["broken"] = raised(broken)
    found["left by all"] = raised(left_by_all)
    found["wrong batch"] = raised(wrong_batch)
    found["still"] = raised(lambda: other(ones(4, 2)))
    found["leaving"] = raised(leaving)
    return found


def test_batches_are_agreed_on_one_ahead() -> None:
    first, second = [x.result for x in run_processes(batches_ahead, 2)]
    for found in (first, second):
        assert found["results"] and found["changed"]
        assert found["still"][0] == found["left by all"][0] == "nothing"
    assert first["buckets"] == second["buckets"] == [2, 4, 8, 16, 32]
    # Two calls before the loop has seen one, then the confirmations of new buckets only.
    assert first["exchanges"] == 2 + len(first["buckets"])
    assert first["uneven"] == second["uneven"]
    assert first["uneven"][1:3] == [[0], "has no further batch"]
    assert first["broken"][:2] == ["AgreementError", [1]] and "a bad row" in first["broken"][2]
    assert second["broken"][0] == "ValueError"
    assert first["wrong batch"][0] == second["wrong batch"][0] == "AgreementError"
    assert first["leaving"][1:3] == [[1], "has left the loop over its batches"]
    assert second["leaving"][0] == "nothing"


# --- one process ---


@pytest.mark.parametrize("timeout", [0, -1, "x", True, float("inf"), float("nan"), None])
def test_a_timeout_that_is_no_number_is_refused(timeout: Any) -> None:
    with pytest.raises(SpecError, match="timeout must be a positive number"):
        total().with_agreement(timeout=timeout)


def test_other_ways_to_agree_are_refused() -> None:
    with pytest.raises(SpecError, match="by must be 'kv' or a function"):
        total().with_agreement(by="mpi")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="add .with_agreement"):
        BucketedExec(jnp.sin).with_pow2().agreed([])


def test_one_process_takes_the_fast_path() -> None:
    used = total()
    used(ones(3, 2))
    handler = used._fast_path.find((ones(3, 2),), {})
    assert handler is not None and handler.is_alive
    assert [used(x).tolist() for x in used.agreed([ones(3, 2)])] == [[3, 3]]


def test_a_function_may_know_the_bucket_of_all_processes() -> None:
    asked: list[dict[str, int]] = []

    def know(bucket: dict[str, int]) -> dict[str, int]:
        asked.append(bucket)
        return {v: 4 * n for v, n in bucket.items()}

    used = total().with_agreement(by=know)
    assert [used(ones(n, 2)).tolist()[0] for n in (3, 4, 5)] == [3, 4, 5]
    assert asked == [{"b": 4}, {"b": 4}, {"b": 8}]
    assert [dict(b.sizes) for b in used.stats().buckets] == [{"b": 16}, {"b": 32}]
    with pytest.raises(SpecError, match="do not agree on the batches of a map"):
        used.map([ones(3, 2)])
    with pytest.raises(ArgumentError):
        used("text")


def test_arguments_without_open_axes_may_change_their_types() -> None:
    def product(weights: Any, x: Any) -> Any:
        return x @ weights

    used = BucketedExec(product, dynamic_axes=(None, "b, _")).with_pow2()
    used = used.with_agreement(by=lambda bucket: bucket)
    for weights in (ones(2), ones(2), ones(2).astype(np.int32), ones(2, 3), ones(2)):
        for n in (3, 3, 4):
            result = used(weights, ones(n, 2))
            assert (
                result.shape == (n, *weights.shape[1:]) and float(result.sum()) == 2 * result.size
            )
    assert used.stats().compiles == 3


@pytest.mark.parametrize("wrong", [{}, {"b": 2}, None, {"c": 8}, {"b": "many"}])
def test_a_function_that_tells_no_bucket_is_an_error(wrong: Any) -> None:
    used = total().with_agreement(by=lambda bucket: wrong)
    with pytest.raises(AgreementError, match="must return a dict of the same variables"):
        used(ones(3, 2))


def test_checks_that_need_an_exact_run_are_refused() -> None:
    poisoned, exact = (
        total(check=check).with_agreement(by=lambda bucket: bucket) for check in ("poison", "exact")
    )
    assert poisoned(ones(3, 2)).tolist() == [3, 3]
    with pytest.raises(SpecError, match="check='poison'"):
        exact(ones(3, 2))
