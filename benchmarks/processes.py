"""What it costs that several processes agree on the bucket of each step.

python -m benchmarks.processes
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sections import Column, Options, Row, Section, print_sections
from bucketjit import BucketedExec
from tests.processes.launch import run_processes

WIDTH, LAYERS, LARGEST = 256, 40, 64  # a step of some milliseconds
STEPS, QUICK_STEPS, ROUNDS = 200, 20, 3


def _model(weights: Any, x: Any) -> Any:
    for _ in range(LAYERS):
        x = jnp.tanh(x @ weights)
    return x.mean()


def _steps(step: Callable[..., Any], weights: Any, batches: Iterator[Any]) -> list[float]:
    """When each step of a loop has ended, beginning with the start."""
    ends = [time.perf_counter()]
    for x in batches:
        jax.block_until_ready(step(weights, x))
        ends.append(time.perf_counter())
    return ends


def loops(rank: int, count: int, steps: int, uneven: bool) -> dict[str, list[list[float]]]:
    """The milliseconds of each step of one process, by way and round."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    sizes = rng.integers(1, LARGEST + 1, (steps, count))
    mine = sizes[:, rank] if uneven else sizes.max(1)
    batches = [np.ones((int(n), WIDTH), np.float32) for n in mine]
    plain = BucketedExec(_model, dynamic_axes=(None, "b, _")).with_pow2(min=8)
    agreed = plain.with_agreement(timeout=60)
    # The step that is compared with runs in the agreed buckets, so that it computes as much.
    buckets = iter(())
    told = plain.with_agreement(by=lambda bucket: {"b": next(buckets)})
    every = [max(8, 1 << int(n - 1).bit_length()) for n in sizes.max(1)]
    found: dict[str, list[list[float]]] = {"alone": [], "agreed": [], "ahead": []}
    for _ in range(ROUNDS + 1):
        buckets = iter(every)
        found["alone"].append(_steps(told, weights, iter(batches)))
        found["agreed"].append(_steps(agreed, weights, iter(batches)))
        found["ahead"].append(_steps(agreed, weights, agreed.agreed(batches)))
    return {
        way: [np.diff(1e3 * np.asarray(ends)).tolist() for ends in rounds[1:]]
        for way, rounds in found.items()
    }


def agreeing(options: Options) -> list[Row]:
    """Loops of two and of four processes, each with steps of equal and of uneven sizes."""
    steps = QUICK_STEPS if options.quick else STEPS
    found = []
    for count in (2,) if options.quick else (2, 4):
        for uneven in (False, True):
            every = [
                x.result for x in run_processes(loops, count, count, steps, uneven, timeout=900)
            ]
            # One that waits for the slowest peer at each step takes as long as the slowest of them.
            alone = np.asarray([process["alone"] for process in every])
            slowest = float(np.median(alone.max(0).mean(-1)))
            row = {"processes": count, "sizes": "uneven" if uneven else "equal"}
            row |= {"alone_ms": float(np.median(alone.mean(-1))), "slowest_ms": slowest}
            for way in ("agreed", "ahead"):
                took = np.asarray([process[way] for process in every])
                row[f"{way}_ms"] = float(np.median(took.mean(-1)))
                row[f"{way}_more"] = row[f"{way}_ms"] - slowest
            found.append(row)
    return found


def one_process(options: Options) -> list[Row]:
    """Warm calls of one process, with an agreement and without."""
    x = np.ones((5, 8), np.float32)
    plain = BucketedExec(lambda x: x.sum(0), dynamic_axes="b, _").with_pow2()
    ways = {"without": plain, "with_agreement": plain.with_agreement()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(200 if options.quick else 20_000):
        for name, way in ways.items():
            began = time.perf_counter()
            way(x)
            times[name].append(1e6 * (time.perf_counter() - began))
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    return [
        {
            "way": name,
            "us": statistics.median(took),
            "ratio": None if name == "without" else statistics.median(ratios),
        }
        for name, took in times.items()
    ]


SECTIONS = (
    Section(
        "agreeing",
        "Several processes that agree on a bucket",
        "Processes of one job on this machine, each with steps of some milliseconds, in *equal* or "
        "in *uneven* sizes. *alone*: each runs the agreed buckets without an exchange. *slowest*: "
        "the slowest process of each step, as long as a loop takes that waits for it. *agreed*: "
        "`with_agreement`; *ahead*: in a loop over `agreed(batches)`; *more*: beyond the slowest. "
        "All are milliseconds a step, the median of three rounds. With more processes than cores "
        "the exchanges wait for a core.",
        (
            Column("processes", "processes"),
            Column("sizes", "sizes"),
            Column("alone_ms", "alone", ".2f"),
            Column("slowest_ms", "slowest", ".2f"),
            Column("agreed_ms", "agreed", ".2f"),
            Column("agreed_more", "more", ".2f"),
            Column("ahead_ms", "ahead", ".2f"),
            Column("ahead_more", "more", ".2f"),
        ),
        "benchmarks.processes:agreeing",
    ),
    Section(
        "agreeing-alone",
        "An agreement on one process",
        "A warm call of one process in turn with the same call `with_agreement`.",
        (
            Column("way", "way"),
            Column("us", "a call, us", ".2f"),
            Column("ratio", "ratio", ".3f"),
        ),
        "benchmarks.processes:one_process",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
