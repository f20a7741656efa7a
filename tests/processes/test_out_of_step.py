"""Processes that do not do the same: late ones, busy ones, loops inside loops, changed batches."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit import BucketedExec
from bucketjit._processes.job import this_job
from bucketjit.errors import AgreementError
from tests.processes.launch import run_processes
from tests.processes.test_agreement import buckets_of, ones, raised, total


def quick(timeout: float = 1.5, **options: Any) -> BucketedExec[..., Any]:
    return total(**options).with_agreement(timeout=timeout)


def in_step(rank: int) -> dict[str, Any]:
    """Loops whose processes treat their batches differently."""
    found: dict[str, Any] = {}
    used = total()
    for n in (2, 4, 8, 16, 32):
        used(ones(n, 2))
    # A crop on one process: the batch has its bucket already.
    sizes = [[3, 3, 3, 30, 3, 3], [3, 3, 30, 3, 3, 3]][rank]
    for x in used.agreed([ones(n, 2) for n in sizes]):
        used(x[:16] if len(x) > 16 else x)
    found["cropped"] = buckets_of(used)
    for i, x in enumerate(used.agreed([ones(3 + rank, 2)] * 6)):
        if rank and i in (2, 3):
            used.cache_clear()
        assert float(used(x)[0]) == 3 + rank
    # Other calls of the same function come first: larger ones, and smaller ones.
    for i, x in enumerate(used.agreed([ones(3 + 4 * rank, 2)] * 8)):
        if i in (3, 5):
            assert float(used(ones(50 if i == 3 else 2, 2))[0]) == (50 if i == 3 else 2)
        assert float(used(x)[0]) == 3 + 4 * rank
    # Loops in loops, and two loops at once.
    other = total(dynamic_axes="c, _")
    for _ in range(3):
        for x in used.agreed([ones(5, 2)] * 4):
            used(x)
            for y in other.agreed([ones(3 + rank, 2)] * 3):
                assert float(other(y)[0]) == 3 + rank
        for x, y in zip(used.agreed([ones(5, 2)] * 3), other.agreed([ones(6, 2)] * 3), strict=True):
            assert (float(used(x)[0]), float(other(y)[0])) == (5, 6)
    found["keys"] = len(this_job()._store.under("bucketjit/agreement/"))
    found["threads"] = sum("agreement" in t.name for t in threading.enumerate())
    return found


def test_loops_stay_in_step_whatever_one_process_does_with_its_batches() -> None:
    first, second = [x.result for x in run_processes(in_step, 2)]
    assert first["cropped"] == second["cropped"]
    assert max(first["keys"], second["keys"]) <= 64
    assert first["threads"] == second["threads"] == 1


def late(rank: int) -> dict[str, Any]:
    """After a call that one process leaves out, the others wait; then all go on together."""
    used, began, found = quick(1.0), time.monotonic(), {}

    def wait_until(seconds: float) -> None:
        time.sleep(max(0.0, began + seconds - time.monotonic()))

    used(ones(3, 2))
    began = time.monotonic()
    for left_out in (1, 0):
        begins = time.monotonic()
        found[f"without {left_out}"] = [] if rank == left_out else raised(lambda: used(ones(3, 2)))
        began = begins
        results = []
        for i in range(4):
            wait_until(2.0 * (i + 1))
            results.append(raised(lambda: used(ones(3 + rank, 2)))[0])
        found[f"after {left_out}"] = results
    return found


def test_after_a_call_that_one_process_leaves_out_all_get_in_step_again() -> None:
    first, second = [x.result for x in run_processes(late, 2)]
    assert first["without 1"][1:3] == [[1], "did not come within 1 s"]
    assert second["without 0"][1:3] == [[0], "did not come within 1 s"]
    for left_out in (1, 0):
        assert first[f"after {left_out}"] == second[f"after {left_out}"]
        assert first[f"after {left_out}"][1:] == ["nothing"] * 3


def staggered(rank: int) -> list[str]:
    """One process gives up just before the last one comes."""
    used = quick(2.0)
    used(ones(3, 2))
    found = []
    for waits in ((0.0, 1.6, 2.4), (1.6, 0.0, 2.4), (2.4, 0.3, 0.0)):
        time.sleep(waits[(rank + 1) % 3] if waits[0] == 0 else waits[rank])
        found.append(raised(lambda: used(ones(3, 2)))[0])
        time.sleep(3)
    return found


def test_either_all_processes_run_a_call_or_none_does() -> None:
    results = [x.result for x in run_processes(staggered, 3)]
    for outcomes in zip(*results, strict=True):
        assert len(set(outcomes)) == 1


def busy(rank: int) -> dict[str, Any]:
    """One process traces and compiles for longer than the others wait."""

    def slow(x: Any) -> Any:
        if rank and isinstance(x, jax.core.Tracer):
            time.sleep(3)
        return x.sum(0)

    traced = BucketedExec(slow, dynamic_axes="b, _").with_pow2().with_agreement(timeout=1)
    found: dict[str, Any] = {"traced": float(traced(ones(3, 2))[0])}
    used = quick(1.0).with_maxsize(1)
    used(ones(3, 2)), used(ones(9, 2))
    build = used._engine.requests.masked

    def slowly(*args: Any, **options: Any) -> Any:
        request = build(*args, **options)

        def built(compile: Any) -> Any:
            time.sleep(2.5 * rank)
            return request.build(compile)

        return request._replace(build=built)

    used._engine.requests.masked = slowly  # type: ignore[method-assign]
    sizes = [3, 9, 3, 9]
    found["evicting"] = [float(used(x)[0]) for x in used.agreed([ones(n, 2) for n in sizes])]
    return found


def test_processes_that_trace_and_compile_are_waited_for() -> None:
    for outcome in run_processes(busy, 2):
        assert outcome.result == {"traced": 3.0, "evicting": [3.0, 9.0, 3.0, 9.0]}


def broken_loops(rank: int) -> dict[str, Any]:
    """Batches that cannot be had at all, and a body that raises."""

    class Broken:
        def __iter__(self) -> Any:
            if rank:
                raise OSError("no such file")
            return iter([ones(3, 2)] * 3)

    used, found = quick(2.0), {}
    used(ones(3, 2))

    def loop(batches: Any) -> None:
        for x in used.agreed(batches):
            used(x)

    found["no batches"] = raised(lambda: loop(Broken()))
    found["next loop"] = raised(lambda: loop([ones(3, 2)] * 3))

    def body() -> None:
        for i, x in enumerate(used.agreed([jnp.ones((3, 2))] * 5)):
            if rank and i == 2:
                raise ValueError("a bad row")
            used(x)

    found["body"] = raised(body)
    found["afterwards"] = raised(lambda: loop([np.ones((4, 2), np.float32)] * 3))
    return found


def test_a_loop_that_breaks_on_one_process_ends_on_all() -> None:
    first, second = [x.result for x in run_processes(broken_loops, 2)]
    assert first["no batches"][:2] == ["AgreementError", [1]]
    assert "no such file" in first["no batches"][2]
    assert second["no batches"][0] == "OSError"
    assert first["body"][:3] == [
        AgreementError.__name__,
        [1],
        "has left the loop over its batches",
    ]
    assert second["body"][0] == "ValueError"
    for name in ("next loop", "afterwards"):
        assert first[name][0] == second[name][0] == "nothing"
