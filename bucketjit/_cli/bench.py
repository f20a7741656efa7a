"""The command ``bench``: measures what bucketing saves on a stream of ragged calls."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._api.executor import BucketedExec
from bucketjit._cli.arguments import positive_int
from bucketjit._cli.command import Command, CommandError, UsageError
from bucketjit._cli.tables import print_table
from bucketjit._events import counted
from bucketjit._inspect.progress import Unbreakable, bar
from bucketjit._version import __version__

_DESCRIPTION = """\
Run one function over a stream of ragged calls in three ways, and compare them:

    by hand     padding to powers of two and masks, both written by hand
    jax.jit     unpadded: one compile for each size
    bucketjit   BucketedExec(function).with_pow2(): padding and masks derived

Cold is the whole stream in a fresh bucketed function, compiles included; warm is the same stream
once more, of which the median and the 99th percentile of a call are shown. It takes about 15
seconds; standard error shows how far it is.
"""

_CALLS, _BIGGEST = 60, 64  # by default
_SILENCE = 2.0  # seconds between two lines of progress
_WIDTH = 64  # columns of each argument
_LARGEST = 2**14  # rows of an argument at most
_MOST_ROWS = 2**24  # rows of all arguments together, which are held in memory: 4 GiB


class Result(NamedTuple):
    """The measurement of one of the three functions.

    Attributes:
        way: Name of the function.
        compiles: Executables compiled.
        cold_seconds: Seconds for the whole stream, the first time.
        median_us, p99_us: Microseconds of a call when the stream is repeated.
    """

    way: str
    compiles: int
    cold_seconds: float
    median_us: float
    p99_us: float


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calls", type=positive_int, default=_CALLS, metavar="N", help=f"calls (default: {_CALLS})"
    )
    parser.add_argument(
        "--largest",
        type=positive_int,
        default=_BIGGEST,
        metavar="N",
        help=f"largest size (default: {_BIGGEST})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace) -> None:
    if options.largest > _LARGEST:
        raise UsageError(f"--largest must be at most {_LARGEST:,}: attention is quadratic in it")
    if options.calls * options.largest > _MOST_ROWS:
        raise UsageError(f"--calls times --largest must be at most {_MOST_ROWS:,}")
    sizes = _stream(options.calls, options.largest)
    jax.block_until_ready(jnp.zeros(1))  # start the backend before anything is measured
    results = [_measure(way, make, sizes) for way, make in _WAYS.items()]
    if options.json:
        told = {
            "calls": len(sizes),
            "different_sizes": len(set(sizes)),
            "device": str(jax.devices()[0]),
            "versions": _versions(),
            "ways": [result._asdict() for result in results],
            "summary": _summary(sizes, results),
        }
        print(json.dumps(told, indent=2))
        return
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    different = counted(len(set(sizes)), "different size")
    title = f"{counted(len(sizes), 'call')} of {different} on {jax.devices()[0]} ({versions})"
    columns = ("way", "compiles", "cold", "warm median", "warm p99")
    rows = [
        (r.way, f"{r.compiles}", f"{r.cold_seconds:.2f} s", *_micros(r.median_us, r.p99_us))
        for r in results
    ]
    print_table(title, columns, rows, numeric=columns[1:])
    print(f"\n{_summary(sizes, results)}")


def _summary(sizes: Sequence[int], results: Sequence[Result]) -> str:
    """What was measured, in one sentence."""
    names = {"by hand": "padding and masks written by hand"}
    # bucketjit is measured last, and named first.
    times = [(names.get(r.way, r.way), f"{r.cold_seconds:.1f} s") for r in reversed(results)]
    name, seconds = times[0]
    others = "".join(f", {other} in {longer}" for other, longer in times[1:])
    calls = f"{counted(len(sizes), 'ragged call')} of {counted(len(set(sizes)), 'size')}"
    return f"On this machine {name} served {calls} in {seconds}{others}; compiles are included."


def _micros(*values: float) -> tuple[str, ...]:
    return tuple(f"{value:,.0f} us" for value in values)


def _versions() -> dict[str, str]:
    return {
        "bucketjit": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def _stream(calls: int, largest: int) -> list[int]:
    """Sizes distributed like the lengths of sentences: many small ones, a few large ones."""
    drawn = np.random.default_rng(0).lognormal(np.log(largest / 4), 0.7, calls)
    return [min(largest, max(1, int(n))) for n in drawn]


def _measure(way: str, make: Callable[[], _Way], sizes: Sequence[int]) -> Result:
    run, compiles = make()
    rng = np.random.default_rng(1)
    batches = [rng.standard_normal((n, _WIDTH)).astype(np.float32) for n in sizes]
    cold, shown = 0.0, 0.0
    stream = Unbreakable(sys.stderr)
    with bar(stream, way, len(batches)) as step:
        for number, x in enumerate(batches, 1):
            began = time.perf_counter()
            pooled = jax.block_until_ready(run(x))
            cold += time.perf_counter() - began
            if number == 1:
                _check(way, x, pooled)
            told = f"{counted(compiles(), 'compile')}, {cold:.1f} s"
            if step is not None:
                step(told)
            elif number == len(batches) or cold - shown >= _SILENCE:
                shown = cold
                print(f"{way}: {number} of {len(batches)} calls, {told}", file=stream, flush=True)
    took = []
    for x in batches:
        began = time.perf_counter()
        jax.block_until_ready(run(x))
        took.append(1e6 * (time.perf_counter() - began))
    p99 = float(np.percentile(took, 99))
    return Result(way, compiles(), cold, statistics.median(took), p99)


def _check(way: str, x: Any, got: Any) -> None:
    if not np.allclose(got, _pooled(x), rtol=1e-2, atol=1e-3):
        raise CommandError(f"{way} computes something else for {len(x)} rows: nothing is measured")


def _pooled(x: Any) -> Any:
    """Attention over the rows, then their mean. The contractions and the softmax need masks too."""
    scores = x @ x.mT / _WIDTH**0.5
    return jnp.mean(jax.nn.softmax(scores, axis=-1) @ x, axis=0)


_Way = tuple[Callable[[Any], Any], Callable[[], int]]


def _by_hand() -> _Way:
    @jax.jit
    def masked(n: Any, x: Any) -> Any:
        is_real = jnp.arange(x.shape[0]) < n
        scores = jnp.where(is_real, x @ x.mT / _WIDTH**0.5, -jnp.inf)
        rows = jax.nn.softmax(scores, axis=-1) @ x
        return jnp.sum(jnp.where(is_real[:, None], rows, 0), axis=0) / n

    buckets = set()

    def run(x: Any) -> Any:
        n = len(x)
        bucket = 1 << (n - 1).bit_length()
        buckets.add(bucket)
        padded = np.zeros((bucket, _WIDTH), np.float32)
        padded[:n] = x
        return masked(np.int32(n), padded)

    return run, lambda: len(buckets)


def _exact() -> _Way:
    sizes = set()
    fn = jax.jit(_pooled)

    def run(x: Any) -> Any:
        sizes.add(len(x))
        return fn(x)

    return run, lambda: len(sizes)


def _bucketed() -> _Way:
    executor = BucketedExec(_pooled).with_pow2()
    return executor, lambda: executor.stats().compiles


_WAYS: dict[str, Callable[[], _Way]] = {
    "by hand": _by_hand,
    "jax.jit": _exact,
    "bucketjit": _bucketed,
}

COMMAND = Command(
    name="bench",
    summary="measure bucketing by hand, jax.jit and bucketjit on this machine",
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
)
