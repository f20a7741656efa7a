"""What it costs that several processes agree on the bucket of each step.

python -m benchmarks.processes
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bucketjit
from benchmarks.sections import Column, Options, Row, Section, print_sections
from tests.processes.launch import run_processes

WIDTH, LARGEST = 256, 64
# A step computes for some milliseconds, or it waits for them, as for an accelerator.
LAYERS = {"computes": 40, "waits": 2, "is short": 2}
WAIT = 0.007
STEPS, QUICK_STEPS, ROUNDS = 120, 20, 3


def _model(layers: int) -> Callable[..., Any]:
    def model(weights: Any, x: Any) -> Any:
        for _ in range(layers):
            x = jnp.tanh(x @ weights)
        return x.mean()

    return model


def _steps(step: Callable[..., Any], weights: Any, batches: Iterable[Any], wait: float) -> Any:
    """The milliseconds of each step of a loop."""
    ends = [time.perf_counter()]
    for x in batches:
        jax.block_until_ready(step(weights, x))
        time.sleep(wait)
        ends.append(time.perf_counter())
    return np.diff(1e3 * np.asarray(ends)).tolist()


def loops(
    rank: int, count: int, steps: int, kind: str, uneven: bool
) -> dict[str, list[list[float]]]:
    """The milliseconds of each step of one process, by way and round."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    sizes = rng.integers(1, LARGEST + 1, (steps, count))
    mine = sizes[:, rank] if uneven else sizes.max(1)
    batches = [np.ones((int(n), WIDTH), np.float32) for n in mine]
    plain = bucketjit.jit(
        _model(LAYERS[kind]), dynamic_axes=(None, "b, _"), buckets=bucketjit.strategies.Pow2(min=8)
    )
    agreed = plain.with_agreement(timeout=60)
    # The step that is compared with runs in the agreed buckets, so that it computes as much.
    buckets: Iterator[int] = iter(())
    told = plain.with_agreement(by=lambda bucket: {"b": next(buckets)})
    every = [max(8, 1 << int(n - 1).bit_length()) for n in sizes.max(1)]
    wait = WAIT if kind == "waits" else 0.0
    found: dict[str, list[list[float]]] = {"alone": [], "agreed": []}
    for _ in range(ROUNDS + 1):
        buckets = iter(every)
        found["alone"].append(_steps(told, weights, batches, wait))
        found["agreed"].append(_steps(agreed, weights, batches, wait))
    return {way: rounds[1:] for way, rounds in found.items()}


def agreeing(options: Options) -> list[Row]:
    """Loops of two and of four processes, each with steps of equal and of uneven sizes."""
    steps = QUICK_STEPS if options.quick else STEPS
    found = []
    for count in (2,) if options.quick else (2, 4):
        for kind in LAYERS:
            for uneven in (False,) if options.quick else (False, True):
                arguments = (count, steps, kind, uneven)
                outcomes = run_processes(loops, count, *arguments, timeout=900)
                every = [outcome.result for outcome in outcomes]
                # One that waits for the slowest at each step takes as long as the slowest of them.
                alone = np.asarray([process["alone"] for process in every])
                slowest = float(np.median(alone.max(0)))
                row = {"processes": count, "step": kind, "sizes": "uneven" if uneven else "equal"}
                row |= {"alone_ms": float(np.median(alone)), "slowest_ms": slowest}
                row["agreed_ms"] = float(np.median([process["agreed"] for process in every]))
                row["more"] = row["agreed_ms"] - slowest
                found.append(row)
    return found


def one_process(options: Options) -> list[Row]:
    """Warm calls of one process, with an agreement and without."""
    x = np.ones((5, 8), np.float32)
    plain = bucketjit.jit(lambda x: x.sum(0), dynamic_axes="b, _", buckets="pow2")
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
        "Processes of one job on this machine, with steps in *equal* or in *uneven* sizes. A step "
        "*computes* for some milliseconds, with all cores, or it *waits* for 7 ms, as for an "
        "accelerator, or it *is short*. *alone*: each runs the agreed buckets without an exchange. "
        "*slowest*: the slowest process of each step, as long as a step takes that waits for it. "
        "*agreed*: "
        "`with_agreement`; *more*: beyond the slowest. "
        "All are milliseconds a step, medians of three rounds. Where the cores are busy, or fewer "
        "than the processes, the exchanges wait for a core.",
        (
            Column("processes", "processes"),
            Column("step", "a step"),
            Column("sizes", "sizes"),
            Column("alone_ms", "alone", ".2f"),
            Column("slowest_ms", "slowest", ".2f"),
            Column("agreed_ms", "agreed", ".2f"),
            Column("more", "more", ".2f"),
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
