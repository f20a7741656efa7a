"""Several processes run their calls in the same bucket, or none of them runs its call."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._processes.job import ROOT, this_job
from bucketjit.errors import AgreementError, ArgumentError, SpecError
from tests.comparison import ones
from tests.processes.launch import run_processes


def total(timeout: float = 20, **options: Any) -> BucketedExec[..., Any]:
    options = {"dynamic_axes": "b, _", "buckets": "pow2", **options}

    def summed(x: Any) -> Any:
        return x.sum(0)

    return BucketedExec(summed, **options).with_agreement(timeout=timeout)


def buckets_of(function: BucketedExec[..., Any]) -> list[Any]:
    """The buckets and their hits."""
    return sorted((tuple(b.sizes.values()), b.hits) for b in function.stats().buckets)


def raised(call: Callable[[], object]) -> list[Any]:
    """The type of an error, the processes that it names, and what they did."""
    try:
        call()
    except Exception as error:
        acts = getattr(error, "processes", {})
        return [type(error).__name__, sorted(acts), " | ".join(acts.values()), str(error)]
    return ["nothing", [], "", ""]


# --- checks: each runs on all processes of one job, and returns what it found ------------------


def random_steps(rank: int) -> dict[str, Any]:
    every = np.random.default_rng(0).integers(1, 200, (60, 8))
    used = total()
    for sizes in every:
        n = int(sizes[rank])
        assert used(ones(n, 2)).tolist() == [n, n]
    largest = every[:, : jax.process_count()].max(1)
    expected = sorted({1 << int(n - 1).bit_length() for n in largest})
    assert [bucket for (bucket,), _ in buckets_of(used)] == expected
    assert (used.stats().calls, used.stats().compiles) == (60, len(expected))
    # Those of the last meetings: older ones are deleted.
    assert len(this_job()._store.under(f"{ROOT}/")) <= 20 * jax.process_count()
    return {"buckets": buckets_of(used)}


def local_choices(rank: int) -> dict[str, Any]:
    """What a process would decide by itself: evictions, larger buckets meanwhile, budgets."""
    variants = {
        "evicting": total().with_maxsize(2),
        "in the background": total().with_background_compile(),
        "several axes": total(dynamic_axes="b, s"),
        "cleared by one": total(),
    }
    every = np.random.default_rng(1).integers(1, 60, (40, 2))
    found: dict[str, Any] = {}
    for name, used in variants.items():
        for i, sizes in enumerate(every):
            n = int(sizes[rank])
            if rank and i in (20, 30) and name == "cleared by one":
                used.cache_clear()
            width = 2 + n % 5 if name == "several axes" else 2
            assert used(ones(n, width)).tolist() == [n] * width
        found[name] = [bucket for bucket, _ in buckets_of(used)]
    del found["cleared by one"]  # its counts are those since then
    # The budget of one process is spent, so none runs the call.
    budgeted = total(compile_budget=None if rank == 0 else 1)
    budgeted(ones(3, 2))
    found["budget"] = raised(lambda: budgeted(ones(9, 2)))
    assert float(budgeted(ones(4, 2))[0]) == 4
    return found


def other_types(rank: int) -> dict[str, Any]:
    """All processes change the type of an argument, and only one knows the shapes by then."""

    def scaled(weights: Any, x: Any, step: Any) -> Any:
        return jax.tree.map(lambda w: x.sum(0) * w + step, weights)

    used = BucketedExec(scaled, dynamic_axes=(None, "b, _", None)).with_pow2()
    used = used.with_agreement(timeout=5)
    for sizes in ((3, 3), (3, 4), (9, 5), (3, 2)):
        for kind in (np.float32, np.float16, np.int32):
            for step in (1, 2.0):
                n = sizes[rank]
                (result,) = used([np.ones(2, kind)], ones(n, 2), step)
                assert result.tolist() == [n + step] * 2
    return {"buckets": [bucket for bucket, _ in buckets_of(used)]}


def calls_that_differ(rank: int) -> dict[str, Any]:
    used, found = total(), {}
    found["not an array"] = raised(lambda: used("text" if rank else ones(3, 2)))
    found["dtype"] = raised(lambda: used(ones(3, 2).astype(np.float16 if rank else np.int32)))
    found["static axis"] = raised(lambda: used(ones(3, 2 + rank)))
    function = BucketedExec(jnp.sin if rank else jnp.cos, dynamic_axes="b")
    function = function.with_pow2().with_agreement()
    found["function"] = raised(lambda: function(ones(3)))
    strategy = total(buckets="pow2" if rank else [4, 8])
    found["strategy"] = raised(lambda: strategy(ones(3, 2)))
    listed = total(buckets=[4, 8])
    found["overflow"] = raised(lambda: listed(ones(30 if rank else 3, 2)))
    beyond = total(buckets=[4, 8], overflow="exact")
    found["beyond"] = raised(lambda: beyond(ones(30 if rank else 3, 2)))
    found["empty"] = raised(lambda: used(ones(0 if rank else 3, 2)))
    weights = BucketedExec(jnp.dot, dynamic_axes=("b, _", None), static_argnames="precision")
    weights = weights.with_pow2().with_agreement()
    half = ones(2).astype(np.float16 if rank else np.float32)
    found["weights"] = raised(lambda: weights(ones(3, 2), half))
    precision = "high" if rank else "highest"
    found["static"] = raised(lambda: weights(ones(3, 2), ones(2), precision=precision))
    order = (total(), total(dynamic_axes="c, _"))
    for i, one in enumerate(order if rank else reversed(order)):
        found[f"order {i}"] = raised(lambda one=one: one(ones(3, 2)))

    # A program that cannot be masked on one process only.
    def refuse(ctx: Any, *operands: Any) -> Any:
        ctx.refuse("it is refused here", "mend it")

    rules = {jax.lax.sin_p: refuse} if rank else {}
    unmasked = BucketedExec(jnp.sin, dynamic_axes="b").with_pow2().with_rules(rules)
    unmasked = unmasked.with_agreement()
    found["build"] = raised(lambda: unmasked(ones(3)))
    found["refused"] = raised(lambda: unmasked(ones(3)))
    static = BucketedExec(jnp.sin).with_agreement()
    assert float(static(np.float32(1))) == pytest.approx(np.sin(1))
    assert float(used(ones(3 + rank, 2))[0]) == 3 + rank
    return found


def left_out(rank: int) -> dict[str, Any]:
    """After a call that one process leaves out, all go on together."""
    used, found = total(timeout=1), {}
    used(ones(3, 2))
    for absent in (1, 0):
        began = time.monotonic()
        if rank != absent:
            found[f"without {absent}"] = raised(lambda: used(ones(3, 2)))
        for i in range(4):
            time.sleep(max(0.0, began + 2.0 * (i + 1) - time.monotonic()))
            after = raised(lambda: used(ones(3 + rank, 2)))[0]
            found[f"after {absent}, {i}"] = after
    return found


CHECKS = random_steps, local_choices, other_types, calls_that_differ, left_out


def checks(rank: int) -> dict[str, Any]:
    return {check.__name__: check(rank) for check in CHECKS}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What two processes found."""
    return [x.result for x in run_processes(checks, 2, timeout=300)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["random_steps", "local_choices", "other_types"])
def test_processes_with_sizes_of_their_own_take_the_same_buckets(found: Any, name: str) -> None:
    first, second = found
    assert first[name] == second[name]
    if name == "local_choices":
        assert first[name]["budget"][:2] == ["AgreementError", [1]]
        assert "CompileBudgetError" in first[name]["budget"][2]


DIFFERENCES = {  # what process 0 did, and what process 1 did
    "not an array": ("calls summed(float32[b, 2])", "raised ArgumentError"),
    "dtype": ("int32[b, 2]", "float16[b, 2]"),
    "static axis": ("float32[b, 2]", "float32[b, 3]"),
    "function": ("cos", "sin"),
    "strategy": ("4", "Pow2()"),
    "overflow": ("calls summed(float32[b, 2])", "cannot pad it: BucketOverflowError"),
    "beyond": ("calls summed(float32[b, 2])", "cannot run at its exact shape"),
    "empty": ("calls summed(float32[b, 2])", "size 0"),
    "weights": ("b: float32[2]", "b: float16[2]"),
    "static": ("precision: 'highest'", "precision: 'high'"),
    "order 0": ("float32[c, 2]", "float32[b, 2]"),
    "order 1": ("float32[b, 2]", "float32[c, 2]"),
    "refused": ("calls sin(float32[b])", "it is refused here"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_calls_that_differ_run_nowhere_and_both_are_named(found: Any, name: str) -> None:
    first, second = (x["calls_that_differ"][name] for x in found)
    assert first[:2] == ["AgreementError", [0, 1]]
    for mine, act in zip(DIFFERENCES[name], first[2].split(" | "), strict=True):
        assert mine in act and act in first[3]
    if name == "not an array":
        assert second[0] == "ArgumentError"
    else:
        assert second[:3] == first[:3]  # the message begins with the function of each


def test_an_executable_that_one_process_cannot_build_runs_nowhere(found: Any) -> None:
    first, second = (x["calls_that_differ"]["build"] for x in found)
    assert first == second and first[:2] == ["AgreementError", [1]]
    assert "it is refused here" in first[2]


def test_after_a_call_that_one_process_leaves_out_all_get_in_step_again(found: Any) -> None:
    first, second = (x["left_out"] for x in found)
    assert first.pop("without 1")[1:3] == [[1], "did not come within 1 s"]
    assert second.pop("without 0")[1:3] == [[0], "did not come within 1 s"]
    assert first == second
    assert [first[f"after {n}, {i}"] for n in (1, 0) for i in (1, 2, 3)] == ["nothing"] * 6


def of_three(rank: int) -> list[str]:
    """One process gives up just before the last one comes."""
    random_steps(rank)
    used, found = total(timeout=2), []
    used(ones(3, 2))
    for waits in ((1.6, 0.0, 2.4), (2.4, 0.3, 0.0)):
        time.sleep(waits[rank])
        found.append(raised(lambda: used(ones(3, 2)))[0])
        time.sleep(3)
    return found


def test_either_all_processes_run_a_call_or_none_does() -> None:
    results = [x.result for x in run_processes(of_three, 3)]
    for outcomes in zip(*results, strict=True):
        assert len(set(outcomes)) == 1


def killed(rank: int) -> None:
    used = total(timeout=2)
    used(ones(3 + rank, 2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    found = raised(lambda: used(ones(3, 2)))
    assert time.monotonic() - began < 4
    os.write(1, repr(found).encode())
    os._exit(0)  # the shutdown of the job would wait for the process that is gone


def test_a_process_that_is_gone_is_named() -> None:
    first, _ = run_processes(killed, 2, all_succeed=False)
    assert first.code == 0, first.stderr
    assert "process 1 did not come within 2 s" in first.stdout and "AgreementError" in first.stdout


# --- one process ---


@pytest.mark.parametrize("timeout", [0, -1, "x", True, float("inf"), float("nan"), None])
def test_a_timeout_that_is_no_number_is_refused(timeout: Any) -> None:
    with pytest.raises(SpecError, match="timeout must be a positive number"):
        total().with_agreement(timeout=timeout)


def test_one_process_takes_the_fast_path() -> None:
    used = total()
    used(ones(3, 2))
    [table] = used._fast_path.tables
    [handler] = table.by_key[table.key((ones(3, 2),), {})]
    assert handler is not None and handler.is_alive


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
    used = BucketedExec(lambda weights, x: x @ weights, dynamic_axes=(None, "b, _")).with_pow2()
    used = used.with_agreement(by=lambda bucket: bucket)
    for weights in (ones(2), ones(2), ones(2).astype(np.int32), ones(2, 3), ones(2)):
        for n in (3, 3, 4):
            result = used(weights, ones(n, 2))
            assert result.shape == (n, *weights.shape[1:])
            assert float(result.sum()) == 2 * result.size
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
