"""How long calls wait for compiles: a cold stream with one warm bucket that holds all of it.

    python -m benchmarks.stalls

The bucket is called first. Then come the calls of the stream, cut to its length, most of them for
other buckets: those have been called before, or warmed up, or are compiled in the call that needs
one, or in the background, while the first bucket serves the call. Calls of a small MLP are those of
a tenth of the time, beside which a turn of Python in another thread is long.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bucketjit
from benchmarks.alone import run_alone
from benchmarks.contenders.jax_encoder import encode
from benchmarks.encoder import LARGEST_BATCH, SHORTEST, draw_sizes, draw_tokens, draw_weights
from benchmarks.measuring import HostLoad
from benchmarks.sections import Column, Options, Row, Section, print_sections
from bucketjit import BucketedExec, Fallback
from bucketjit.strategies import Linear, Pow2

CALLS, QUICK_CALLS = 1000, 4
QUICK_GROUPS = ("mlp",)
LENGTHS = (64, 128)
ROWS, MLP_WIDTH, MLP_LAYERS = 256, 256, 4
BEFORE, WARMED_UP, FIRST_RUN, IN_CALL, BACKGROUND = (
    "all called before",
    "all warmed up",
    "all warmed up, `first_run=True`",
    "compiled in the call",
    "compiled in the background",
)
WAYS = (BEFORE, WARMED_UP, FIRST_RUN, IN_CALL, BACKGROUND)


class Case(NamedTuple):
    """What is called.

    Attributes:
        executor: With its strategies.
        parameters: The first argument of every call.
        largest: The second one, in the bucket that is warm.
        every: Sizes of all that may come.
        stream: The second arguments of the stream.
    """

    executor: BucketedExec
    parameters: Any
    largest: np.ndarray
    every: dict[str, range]
    stream: Sequence[np.ndarray]


def stalls(options: Options) -> list[Row]:
    """A row for each warm bucket and each way of compiling, in its own process."""
    calls = options.calls or (QUICK_CALLS if options.quick else CALLS)
    found: list[Row] = []
    for which in QUICK_GROUPS if options.quick else GROUPS:
        for way in WAYS:
            arguments = {"which": which, "way": way, "calls": calls}
            outcome = run_alone("benchmarks.stalls:measure", arguments)
            if outcome.status != "ok":
                raise RuntimeError(f"{way}: {outcome.reason}")
            found.append({"group": GROUPS[which].name} | outcome.value)
    return found


def _encoder(length: int, calls: int) -> Case:
    """The encoder of the stream, cut to a length."""
    executor = bucketjit.jit(
        encode,
        dynamic_axes=(None, "b, s"),
        buckets={"b": Pow2(min=4), "s": Pow2(min=16)},
        fallback=Fallback.ERROR,
        out="numpy",
    )
    [largest] = draw_tokens([(LARGEST_BATCH, length)])
    return Case(
        executor,
        jax.device_put(draw_weights()),
        largest,
        {"b": range(1, LARGEST_BATCH + 1), "s": range(SHORTEST, length + 1)},
        draw_tokens([(b, min(s, length)) for b, s in draw_sizes(calls)]),
    )


def _perceptron(layers: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for weights in layers:
        x = jax.nn.gelu(x @ weights)
        x = x / (1 + jnp.abs(x).max(-1, keepdims=True))
    return x.mean(0)


def _mlp(calls: int) -> Case:
    """A small MLP and the mean of its rows."""
    rng = np.random.default_rng(0)
    shape = (MLP_WIDTH, MLP_WIDTH)
    layers = [rng.normal(0, 0.05, shape).astype(np.float32) for _ in range(MLP_LAYERS)]
    executor = bucketjit.jit(
        _perceptron,
        dynamic_axes=(None, "b, _"),
        buckets=Linear(16),
        fallback=Fallback.ERROR,
        out="numpy",
    )

    def rows(count: int) -> np.ndarray:
        return rng.standard_normal((count, MLP_WIDTH), np.float32)

    return Case(
        executor,
        jax.device_put(layers),
        rows(ROWS),
        {"b": range(1, ROWS + 1)},
        [rows(int(count)) for count in rng.integers(1, ROWS, calls, endpoint=True)],
    )


class Group(NamedTuple):
    """Rows of the table: their heading, and what they measure with so many calls."""

    name: str
    case: Callable[[int], Case]


GROUPS = {
    **{
        f"encoder {length}": Group(
            f"The bucket {LARGEST_BATCH} x {length} is warm", partial(_encoder, length)
        )
        for length in LENGTHS
    },
    "mlp": Group(f"The bucket {ROWS} of an MLP is warm, of sixteen", _mlp),
}


def measure(which: str, way: str, calls: int) -> Row:
    """The stream of a group in this process."""
    executor, parameters, largest, every, stream = GROUPS[which].case(calls)
    if way == BACKGROUND:
        executor = executor.with_background_compile()
    if way in (WARMED_UP, FIRST_RUN):
        executor.warmup(
            parameters, largest, sizes=every, progress=False, first_run=way == FIRST_RUN
        )

    def seconds(x: np.ndarray) -> float:
        began = time.perf_counter()
        executor(parameters, x)
        return time.perf_counter() - began

    for x in [largest] * 5 + (list(stream) if way == BEFORE else []):
        executor(parameters, x)
    gc.collect()
    gc.freeze()  # a full collection takes 40 ms once JAX is imported
    host = HostLoad()
    warm = [seconds(largest) for _ in range(40)]
    cold = [seconds(x) for x in stream]
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
        "stolen": host.stolen(),
    }


SECTIONS = (
    Section(
        "stalls",
        "Waiting for compiles",
        f"{CALLS:,} calls of the encoder above, cut to the length of the one bucket that is warm, "
        "and of an MLP whose calls take a tenth of the time. "
        "*Warm* is the median of that bucket before and after, *ratio* is p99 to it. XLA compiles "
        "with all cores, so a call that runs beside a compile takes longer; how much of the ratio "
        "is the machine's own, the first rows tell. What is compiled ahead still takes longer in "
        "its first run on a CPU, unless that is part of the warm-up. In the background it always "
        "is. There a thread compiles, and the warm bucket serves the calls meanwhile. *Stolen* is "
        "the CPU time that the host of a virtual machine gave to others meanwhile, of all that was "
        "wanted.",
        (
            Column("way", "way"),
            Column("warm_ms", "warm, ms", ".2f"),
            Column("p50_ms", "p50, ms", ".2f"),
            Column("p99_ms", "p99, ms", ".1f"),
            Column("longest_ms", "longest, ms", ".0f"),
            Column("ratio", "ratio", ".2f"),
            Column("compiles", "compiles", "d"),
            Column("stolen", "stolen", ".0%"),
        ),
        "benchmarks.stalls:stalls",
        group="group",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
