"""Learnt buckets beside powers of two, and beside the best buckets in hindsight, from a cold start.

    python -m benchmarks.auto

Each contender has a process of its own. The best buckets in hindsight are found by replay: the
stream is gone through with the costs that the run of powers of two has measured, and buckets are
added, exchanged and dropped as long as the sum of compiling and running falls.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import Any

import jax
import numpy as np

import bucketjit
from benchmarks.alone import run_alone
from benchmarks.contenders.jax_encoder import encode
from benchmarks.encoder import LONGEST, draw_sizes, draw_tokens, draw_weights
from benchmarks.measuring import HostLoad
from benchmarks.sections import Column, Options, Row, Section, print_sections
from benchmarks.training import STREAMS, TASKS, plain_step
from bucketjit._runtime.learning.learner import fitted_line

CALLS, QUICK_CALLS = 1000, 12
AFTER = 300  # calls after which padding is counted
CANDIDATES = 32  # of one variable
MOST = 20

Bucket = tuple[int, ...]


class Plan:
    """An executor for each bucket, of which the smallest that holds a call serves it."""

    def __init__(self, fn: Any, axes: Any, dims: Sequence[str], buckets: Sequence[Bucket]) -> None:
        self._executors = {
            tuple(bucket): bucketjit.jit(
                fn, dynamic_axes=axes, buckets={d: [n] for d, n in zip(dims, bucket, strict=True)}
            )
            for bucket in sorted(buckets, key=math.prod)
        }

    def trace(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Trace before the clock runs what one executor would trace once."""
        for args in calls:
            self.of(args).trace(*args)

    def of(self, args: tuple[Any, ...]) -> Any:
        """The executor that serves a call."""
        for bucket, executor in self._executors.items():
            if all(n <= m for n, m in zip(args[1].shape, bucket, strict=False)):
                return executor
        raise ValueError(f"no bucket holds {args[1].shape}")


def _lengths(calls: int, kind: str) -> list[int]:
    rng = np.random.default_rng(3)
    if kind == "drift":
        first, then = (np.exp(rng.normal(np.log(m), 0.4, calls // 2)) for m in (40, 200))
        drawn = np.concatenate([first, then])
    elif kind == "two peaks":
        drawn = np.where(
            rng.random(calls) < 0.5, rng.normal(70, 5, calls), rng.normal(300, 10, calls)
        )
    else:
        drawn = np.full(calls, 100)
    return [int(n) for n in drawn.round().clip(4, LONGEST)]


def _encoder(sizes: list[tuple[int, int]], dims: str) -> tuple[Any, str, list[tuple[Any, ...]]]:
    weights = jax.device_put(draw_weights())
    if dims == "b, s":
        calls = [(weights, tokens) for tokens in draw_tokens(sizes)]
        return encode, dims, calls
    calls = [(weights, tokens[0]) for tokens in draw_tokens(sizes)]
    return lambda w, tokens: encode(w, tokens[None])[0], dims, calls


def stream(kind: str, calls: int) -> tuple[Any, Any, list[tuple[Any, ...]]]:
    """A function, its open axes, and the arguments of its calls."""
    if kind == "encoder":
        fn, dims, given = _encoder(draw_sizes(calls), "b, s")
        return fn, (None, dims), given
    if kind == "CNN training":
        task = TASKS["CNN"]
        params = task.params()
        draw, _, _ = STREAMS["random batches of 1 to 256"]
        return (
            plain_step(task),
            (None, "b, ...", "b"),
            [(params, *one) for one in draw(task, calls)],
        )
    fn, dims, given = _encoder([(1, n) for n in _lengths(calls, kind)], "s")
    return fn, (None, dims), given


KINDS = ("encoder", "CNN training", "drift", "two peaks", "one size")


def start(kind: str, calls: int, how: str, buckets: Sequence[Bucket] = ()) -> dict[str, Any]:
    """Run a stream in a process that has done nothing else.

    Args:
        kind: The stream.
        calls: How many calls.
        how: ``"auto"``, ``"pow2"`` or ``"plan"``.
        buckets: Those of the plan.

    Returns:
        The seconds of all calls, and what they were for.
    """
    fn, axes, given = stream(kind, calls)
    if how == "plan":
        dims = {"encoder": ("b", "s"), "CNN training": ("b",)}.get(kind, ("s",))
        plan = Plan(fn, axes, dims, buckets)
        plan.trace(given)
        executor_of = plan.of
    else:
        every = bucketjit.jit(fn, dynamic_axes=axes, buckets=how)
        executor_of = lambda args: every  # noqa: E731
    host, seconds, sizes, chosen, compiled = HostLoad(), [], [], [], []
    padded = real = 0
    counts = 0
    for number, args in enumerate(given):
        executor = executor_of(args)
        compiles, before = executor.stats().compiles, executor.stats().compile_seconds
        began = time.perf_counter()
        jax.block_until_ready(executor(*args))
        seconds.append(time.perf_counter() - began)
        stats = executor.stats()
        compiled.append(stats.compile_seconds - before if stats.compiles > compiles else 0.0)
        counts += stats.compiles - compiles
        used = max(stats.buckets, key=lambda b: b.last_used).sizes
        at = args[1].shape[: len(used)]
        sizes.append(at)
        chosen.append(tuple(used.values()))
        if number >= min(AFTER, calls // 2):
            padded, real = padded + math.prod(chosen[-1]), real + math.prod(at)
    return {
        "total_s": sum(seconds),
        "compiles": counts,
        "padding": 1 - real / padded,
        "stolen": host.stolen(),
        "sizes": sizes,
        "chosen": chosen,
        "seconds": seconds,
        "compiled": compiled,
    }


def in_hindsight(
    sizes: Sequence[Bucket], price: float, seconds: Callable[[Any], Any]
) -> list[Bucket]:
    """The buckets for which compiling and running cost least together."""
    counts = Counter(map(tuple, sizes))
    points = np.array(list(counts))
    calls = np.array(list(counts.values()), float)
    axes = []
    for column in points.T:
        shares = np.linspace(0, 1, CANDIDATES + 1)[1:]
        every = np.repeat(column, calls.astype(int))
        axes.append(sorted({int(n) for n in np.quantile(every, shares, method="higher")}))
    candidates = np.array(list(itertools.product(*axes)))
    holds = (candidates[:, None, :] >= points[None]).all(-1)
    costs = np.where(holds, seconds(np.prod(candidates, 1))[:, None], np.inf)

    def best_beside(others: list[int]) -> list[int]:
        """These, and the one that saves most beside them, if one saves anything."""
        gains = np.maximum(costs[others].min(0) - costs, 0) @ calls - price
        at = int(gains.argmax())
        return [*others, at] if gains[at] > 0 and len(others) < MOST else others

    def total(chosen: list[int]) -> float:
        return price * len(chosen) + float(costs[chosen].min(0) @ calls)

    chosen = [int(np.argmax(np.prod(candidates, 1)))]  # it holds all calls
    while len(more := best_beside(chosen)) > len(chosen):
        chosen = more
    before = math.inf
    while total(chosen) < before - 1e-9:
        before = total(chosen)
        for at in chosen[1:]:
            other = best_beside([i for i in chosen if i != at])
            chosen = min(chosen, other, key=total)
    return [tuple(map(int, candidates[i])) for i in chosen]


def run(kind: str, calls: int, name: str, **given: Any) -> dict[str, Any]:
    """What a contender has done, in a process of its own."""
    arguments = {"kind": kind, "calls": calls, **given}
    outcome = run_alone("benchmarks.auto:start", arguments)
    if outcome.status != "ok":
        raise RuntimeError(f"{kind}, {name}: {outcome.reason}")
    print(f"{kind}, {name}: {outcome.value['total_s']:.1f} s", file=sys.stderr)
    return outcome.value


def best_plan(told: Mapping[str, Any]) -> list[Bucket]:
    """The best buckets in hindsight, by what a run has measured."""
    warm: dict[int, list[float]] = {}
    calls = zip(told["chosen"], told["seconds"], told["compiled"], strict=True)
    for bucket, taken, compiled in calls:
        if not compiled:
            warm.setdefault(math.prod(bucket), []).append(taken)
    line = fitted_line({volume: median(taken) for volume, taken in warm.items()})
    return in_hindsight(told["sizes"], mean(x for x in told["compiled"] if x), line.at)


def cold(options: Options) -> list[Row]:
    """A row for each stream and contender."""
    calls = options.calls or (QUICK_CALLS if options.quick else CALLS)
    rows: list[Row] = []
    for kind in KINDS:
        pow2 = run(kind, calls, "pow2", how="pow2")
        best = run(kind, calls, "best in hindsight", how="plan", buckets=best_plan(pow2))
        found = {
            "pow2": pow2,
            "best in hindsight": best,
            "auto": run(kind, calls, "auto", how="auto"),
        }
        rows += [
            {
                "stream": kind,
                "contender": name,
                "of_pow2": one["total_s"] / pow2["total_s"],
                "of_best": one["total_s"] / best["total_s"],
                **{k: one[k] for k in ("total_s", "compiles", "padding", "stolen")},
            }
            for name, one in found.items()
        ]
    return rows


SECTIONS = (
    Section(
        "auto",
        "Learnt buckets, cold",
        f"{CALLS:,} calls from a cold start, compiles included: the encoder of the ragged stream; "
        "the training step of a CNN with batches of 1 to 256; the encoder of one sentence whose "
        "lengths drift half-way (about 40, then about 200), have two peaks (70 and 300), or are "
        "all 100. Each contender has a process of its own. *Best in hindsight* are the buckets "
        "for which compiling and running cost least together, found by replay with the costs that "
        f"the run of powers of two measured. *Padding* is that of the calls from the {AFTER}th on.",
        (
            Column("contender", "contender"),
            Column("total_s", "total, s", ".1f"),
            Column("of_pow2", "of pow2", ".2f"),
            Column("of_best", "of the best", ".2f"),
            Column("compiles", "compiles", "d"),
            Column("padding", "padding", ".0%"),
            Column("stolen", "stolen", ".0%"),
        ),
        "benchmarks.auto:cold",
        "stream",
    ),
)


if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
