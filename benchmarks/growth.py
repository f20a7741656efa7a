"""What grows with what: dispatch, memory and live executables.

    python -m benchmarks.growth
    python -m benchmarks.growth growth-calls --calls 1000000

Memory and executables are counted in a process for each section.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bucketjit
from benchmarks.measuring import in_turn, paired_ratio, rss_mib
from benchmarks.sections import Column, Options, Row, Section, print_sections

WIDTH, SIZE, BUCKET = 64, 5, 8
ROUNDS, QUICK_ROUNDS = 3000, 10
CALLS, QUICK_CALLS = 100_000, 100
SAMPLES = 10

Call = Callable[[int], Any]


def tiny(x: Any) -> Any:
    return jnp.sin(x) + 1


def _call(fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> Call:
    """``fn`` of the inputs in turn: the number of the round picks them."""
    return lambda i: jax.block_until_ready(fn(*inputs[i % len(inputs)]))


def _timed(calls: dict[str, Call], rounds: int, warmup: int) -> dict[str, list[float]]:
    in_turn(calls, [(i,) for i in range(warmup)])  # compiles
    return in_turn(calls, [(i,) for i in range(rounds)])


def _dispatch(executors: dict[int, Call], rounds: int, warmup: int) -> list[Row]:
    """A row for each, with its ratio to the first."""
    calls = {str(count): call for count, call in executors.items()}
    times = _timed(calls, rounds, warmup)
    first = next(iter(calls))
    return [
        {
            "count": int(count),
            "us": median(times[count]) * 1e6,
            "ratio": paired_ratio(times, count, first),
        }
        for count in calls
    ]


def _beside(reference: Call, ours: Call, rounds: int) -> Row:
    """The medians of both, and of their ratio."""
    times = _timed({"reference": reference, "ours": ours}, rounds, warmup=3)
    return {
        "reference_us": median(times["reference"]) * 1e6,
        "us": median(times["ours"]) * 1e6,
        "ratio": paired_ratio(times, "ours", "reference"),
    }


def _ones(*sizes: int) -> list[tuple[np.ndarray]]:
    return [(np.ones((n, WIDTH), np.float32),) for n in sizes]


def by_entries(options: Options) -> list[Row]:
    """Calls of 8 buckets among ever more entries.

    10,000 real executables exhaust what a process may map. Those that are not called are keys of
    their own with the executable of another: the cache does not know the difference.
    """
    inputs = _ones(1, 2, 3, 5, 9, 17, 33, 65)

    def filled(entries: int) -> Call:
        executor = bucketjit.jit(tiny, buckets="pow2").with_maxsize(entries)
        for (x,) in inputs:
            executor(x)
        (program, _), entry = executor._engine.cache.items()[0]
        for i in range(entries - executor.cache_size()):
            executor._engine.cache.get_or_compile((program, (-i,)), lambda: entry)
        assert executor.cache_size() == entries
        return _call(executor, inputs)

    counts = (10, 100) if options.quick else (10, 100, 1000, 10_000)
    return _dispatch(
        {n: filled(n) for n in counts}, QUICK_ROUNDS if options.quick else ROUNDS, len(inputs)
    )


def by_programs(options: Options) -> list[Row]:
    """Calls of ever more programs, one after the other: static axes of their own."""

    def executor(programs: int) -> Call:
        inputs = [(np.ones((SIZE, 8 + i), np.float32),) for i in range(programs)]
        return _call(bucketjit.jit(tiny, dynamic_axes="b, _", buckets="pow2"), inputs)

    counts = (1, 3) if options.quick else (1, 3, 10, 30, 100)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    return _dispatch({n: executor(n) for n in counts}, rounds, max(counts))


def by_leaves(options: Options) -> list[Row]:
    """A step with ever more parameters, beside ``jax.jit`` at the bucket's shape."""

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p: p + 1e-6, params), x.sum()

    found: list[Row] = []
    for leaves in (1, 10) if options.quick else (1, 10, 100, 400):
        params = {f"p{i}": jnp.ones(4) for i in range(leaves)}
        jitted, executor = jax.jit(step), bucketjit.jit(step, buckets="pow2")
        row = _beside(
            _call(jitted, [(params, *_ones(BUCKET)[0])]),
            _call(executor, [(params, *_ones(SIZE)[0])]),
            QUICK_ROUNDS if options.quick else ROUNDS // 3,
        )
        found.append({"count": leaves, **row})
    return found


def by_arguments(options: Options) -> list[Row]:
    """Ever more arguments of open size, beside what an expert writes by hand.

    The function needs no mask and does next to nothing, which leaves the cost of the arguments.
    """

    def corners(*xs: Any) -> Any:
        return sum(x[0, 0] for x in xs)

    jitted = jax.jit(corners)

    def by_hand(*xs: np.ndarray) -> Any:
        padded = []
        for x in xs:
            padded.append(np.zeros((BUCKET, WIDTH), np.float32))
            padded[-1][:SIZE] = x
        return jitted(*padded)

    found: list[Row] = []
    for arguments in (1, 2) if options.quick else (1, 2, 4, 8, 16, 32):
        xs = [tuple(x for (x,) in _ones(*[SIZE] * arguments))]
        row = _beside(
            _call(by_hand, xs),
            _call(bucketjit.jit(corners, buckets="pow2"), xs),
            QUICK_ROUNDS if options.quick else ROUNDS,
        )
        found.append({"count": arguments, **row})
    return found


def _layers(x: Any) -> Any:
    for _ in range(4):
        h = jnp.tanh(x @ jnp.ones((WIDTH, WIDTH)))
        x = h - h.mean(0)
    return x


def _held() -> Row:
    """What the process holds: memory, executables, arrays."""
    gc.collect()
    return {
        "rss_mib": rss_mib(),
        "executables": len(jax.devices()[0].client.live_executables()),
        "arrays": len(jax.live_arrays()),
    }


def by_buckets(options: Options) -> list[Row]:
    """Memory and executables by the number of buckets that have been used."""
    executor = bucketjit.jit(_layers, buckets=bucketjit.strategies.Linear(2)).with_maxsize(None)
    executor(*_ones(2)[0])
    before = _held()
    found: list[Row] = []
    for buckets in (1, 4) if options.quick else (1, 16, 32, 64, 128):
        while executor.cache_size() < buckets:
            executor(*_ones(2 * executor.cache_size() + 1)[0])
        held = _held()
        if buckets > 1:
            held["mib_each"] = (held["rss_mib"] - before["rss_mib"]) / (buckets - 1)
        found.append({"count": buckets, **held})
    return found


def by_calls(options: Options) -> list[Row]:
    """Memory, executables and arrays over warm calls of all sizes."""
    calls = options.calls or (QUICK_CALLS if options.quick else CALLS)
    executor = bucketjit.jit(_layers, buckets="pow2")
    inputs = [x for (x,) in _ones(*range(1, BUCKET + 1))]
    for x in inputs:
        executor(x)
    found: list[Row] = [{"count": 0, **_held()}]
    every = -(-calls // SAMPLES)
    for done in range(1, calls + 1):
        executor(inputs[done % len(inputs)])
        if done % every == 0 or done == calls:
            found.append({"count": done, **_held()})
    return found


def by_eviction(options: Options) -> list[Row]:
    """Executables alive when more buckets are used than the cache holds."""
    found: list[Row] = []
    for maxsize in (2, 4) if options.quick else (4, 16, 64):
        used = 2 * maxsize
        executor = bucketjit.jit(tiny, buckets=bucketjit.strategies.Linear(1)).with_maxsize(maxsize)
        before = _held()["executables"]
        for _ in range(2):
            for (x,) in _ones(*range(1, used + 1)):
                executor(x)
        found.append(
            {
                "count": maxsize,
                "buckets": used,
                "compiles": executor.stats().compiles,
                "evictions": executor.stats().evictions,
                "executables": _held()["executables"] - before,
            }
        )
        executor.cache_clear()
        found[-1]["left"] = _held()["executables"] - before
    return found


_RATIO = Column("ratio", "ratio", ".3f")
_HELD = (
    Column("rss_mib", "RSS, MiB", ".0f"),
    Column("executables", "live executables", "d"),
    Column("arrays", "live arrays", "d"),
)

SECTIONS = (
    Section(
        "growth-entries",
        "Dispatch by cached entries",
        "A warm call of a tiny function, NumPy in, 8 sizes in turn. The executors take each call "
        "in turn; *ratio* is the median of the paired ratios to the first row.",
        (Column("count", "entries", ",d"), Column("us", "p50, us", ".1f"), _RATIO),
        "benchmarks.growth:by_entries",
    ),
    Section(
        "growth-programs",
        "Dispatch by programs",
        "The same, with ever more static shapes in turn, each a program of its own.",
        (Column("count", "programs", "d"), Column("us", "p50, us", ".1f"), _RATIO),
        "benchmarks.growth:by_programs",
    ),
    Section(
        "growth-leaves",
        "Dispatch by static leaves",
        f"A training step of that many parameters, {SIZE} rows in a bucket of {BUCKET}, in turn "
        "with `jax.jit` at the bucket's shape.",
        (
            Column("count", "leaves", "d"),
            Column("reference_us", "jax.jit, us", ".1f"),
            Column("us", "bucketjit, us", ".1f"),
            _RATIO,
        ),
        "benchmarks.growth:by_leaves",
    ),
    Section(
        "growth-arguments",
        "Dispatch by open arguments",
        f"That many arguments of {SIZE} rows in a bucket of {BUCKET}, of which one element each is "
        "used; in turn with NumPy's padding and `jax.jit` by hand.",
        (
            Column("count", "arguments", "d"),
            Column("reference_us", "by hand, us", ".1f"),
            Column("us", "bucketjit, us", ".1f"),
            _RATIO,
        ),
        "benchmarks.growth:by_arguments",
    ),
    Section(
        "growth-buckets",
        "Memory by buckets",
        "Buckets of a function of 4 layers. *Each* is what a bucket added, on average.",
        (
            Column("count", "buckets", "d"),
            *_HELD,
            Column("mib_each", "each, MiB", ".2f"),
        ),
        "benchmarks.growth:by_buckets",
    ),
    Section(
        "growth-calls",
        "Memory by warm calls",
        "The same function; sizes in turn, all compiled before. Nothing may grow.",
        (Column("count", "calls", ",d"), *_HELD),
        "benchmarks.growth:by_calls",
    ),
    Section(
        "growth-eviction",
        "Eviction gives executables back",
        "Twice through twice as many buckets as the cache holds; executables counted in XLA's "
        "client, before and after `cache_clear`.",
        (
            Column("count", "maxsize", "d"),
            Column("buckets", "buckets used", "d"),
            Column("compiles", "compiles", "d"),
            Column("evictions", "evictions", "d"),
            Column("executables", "live executables", "d"),
            Column("left", "after clear", "d"),
        ),
        "benchmarks.growth:by_eviction",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
