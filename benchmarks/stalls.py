"""How long calls wait for compiles: a cold stream with one warm bucket that holds all of it.

    python -m benchmarks.stalls

The bucket is called first. Then come the calls of the stream, cut to its length, most of them for
other buckets: those have been called before, or warmed up, or are compiled in the call that needs
one, or in the background, while the first bucket serves the call.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import jax
import numpy as np

from benchmarks.alone import run_alone
from benchmarks.contenders.jax_encoder import encode
from benchmarks.encoder import LARGEST_BATCH, SHORTEST, draw_sizes, draw_tokens, draw_weights
from benchmarks.sections import Column, Options, Row, Section, print_sections
from bucketjit import BucketedExec, Fallback

CALLS, QUICK_CALLS = 1000, 10
LENGTHS = (64, 128)
BEFORE, WARMED_UP, FIRST_RUN, IN_CALL, BACKGROUND, SAME_PROCESS = (
    "all called before",
    "all warmed up",
    "all warmed up, `first_run=True`",
    "compiled in the call",
    "compiled in the background",
    "in the background, `process=False`",
)


def stalls(options: Options) -> list[Row]:
    """A row for each length of the warm bucket and each way of compiling, in its own process."""
    calls = options.calls or (QUICK_CALLS if options.quick else CALLS)
    found: list[Row] = []
    for length in LENGTHS:
        for way in (BEFORE, WARMED_UP, FIRST_RUN, IN_CALL, BACKGROUND, SAME_PROCESS):
            arguments = {"way": way, "length": length, "calls": calls}
            outcome = run_alone("benchmarks.stalls:measure", arguments)
            if outcome.status != "ok":
                raise RuntimeError(f"{way}: {outcome.reason}")
            found.append(
                {"group": f"The bucket {LARGEST_BATCH} x {length} is warm"} | outcome.value
            )
    return found


def measure(way: str, length: int, calls: int) -> Row:
    """The stream in this process."""
    weights = jax.device_put(draw_weights())
    executor = BucketedExec(
        encode, dynamic_axes=(None, "b, s"), fallback=Fallback.ERROR, out="numpy"
    )
    executor = executor.with_pow2("b", min=4).with_pow2("s", min=16)
    if way in (BACKGROUND, SAME_PROCESS):
        executor = executor.with_background_compile(process=way == BACKGROUND)
    [largest] = draw_tokens([(LARGEST_BATCH, length)])
    stream = draw_tokens([(b, min(s, length)) for b, s in draw_sizes(calls)])
    if way in (WARMED_UP, FIRST_RUN):
        every = {"b": range(1, LARGEST_BATCH + 1), "s": range(SHORTEST, length + 1)}
        executor.warmup(weights, largest, sizes=every, progress=False, first_run=way == FIRST_RUN)

    def seconds(tokens: Any) -> float:
        began = time.perf_counter()
        executor(weights, tokens)
        return time.perf_counter() - began

    for tokens in [largest] * 5 + (stream if way == BEFORE else []):
        executor(weights, tokens)
    gc.collect()
    gc.freeze()  # a full collection takes 40 ms once JAX is imported
    warm = [seconds(largest) for _ in range(40)]
    cold = [seconds(tokens) for tokens in stream]
    executor.wait_for_compiles()
    warm += [seconds(largest) for _ in range(40)]  # the machine may have changed its speed
    alone = np.median(warm)
    p50, p99, longest = np.percentile(cold, (50, 99, 100))
    return {
        "way": way,
        "warm_ms": alone * 1e3,
        "p50_ms": p50 * 1e3,
        "p99_ms": p99 * 1e3,
        "longest_ms": longest * 1e3,
        "ratio": p99 / alone,
        "compiles": executor.stats().compiles,
    }


SECTIONS = (
    Section(
        "stalls",
        "Waiting for compiles",
        f"{CALLS:,} calls of the encoder above, cut to the length of the one bucket that is warm. "
        "*Warm* is the median of that bucket before and after, *ratio* is p99 to it. XLA compiles "
        "with all cores, so a call that runs beside a compile takes longer; how much of the ratio "
        "is the machine's own, the first rows tell. What is compiled ahead still takes longer in "
        "its first run on a CPU, unless that is part of the warm-up. In the background it always "
        "is. There another process compiles, which stands back for the calls, so that the warm "
        "bucket serves more of them.",
        (
            Column("way", "way"),
            Column("warm_ms", "warm, ms", ".1f"),
            Column("p50_ms", "p50, ms", ".1f"),
            Column("p99_ms", "p99, ms", ".0f"),
            Column("longest_ms", "longest, ms", ".0f"),
            Column("ratio", "ratio", ".2f"),
            Column("compiles", "compiles", "d"),
        ),
        "benchmarks.stalls:stalls",
        group="group",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
