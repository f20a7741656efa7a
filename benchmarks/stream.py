"""A ragged stream from a cold start: 1,000 calls of a 6-layer encoder at about 610 shapes.

    python -m benchmarks.stream
    python -m benchmarks.stream stream --quick --peers-python .venv-peers/bin/python

Each contender runs in a process of its own, with the same weights and the same calls. Every one of
its results is compared with NumPy's: a contender that differs has failed. Contenders are listed in
benchmarks/contenders/__init__.py; those that are not installed are skipped by name.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import encoder
from benchmarks.alone import run_alone
from benchmarks.contenders import ENTRIES, PLANS, Entry, entry
from benchmarks.measuring import in_turn, paired_ratio
from benchmarks.sections import Column, Options, Row, Section, add_ratios, print_sections

CALLS, QUICK_CALLS = 1000, 10
REFERENCE = "expert pow2"


def cold(options: Options) -> list[Row]:
    """A row for each contender."""
    return cold_rows(options, ENTRIES, REFERENCE)


def plans(options: Options) -> list[Row]:
    """A row for each way of choosing buckets."""
    return cold_rows(options, PLANS, PLANS[0].name)


def cold_rows(
    options: Options, entries: Sequence[Entry], reference: str, timeout: float = 3600
) -> list[Row]:
    """A row for each contender, one process after the other, none longer than ``timeout``."""
    calls = options.calls or (QUICK_CALLS if options.quick else CALLS)
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "exact.float32"
        # Threads of OpenBLAS that wait for each other on a busy machine take 20 times as long.
        written = run_alone(
            "benchmarks.stream:write_exact",
            {"path": str(exact), "calls": calls},
            variables={"OPENBLAS_NUM_THREADS": "1"},
        )
        if written.status != "ok":
            raise RuntimeError(f"no results to compare with: {written.reason}")
        for contender in entries:
            outcome = run_alone(
                "benchmarks.contenders.cold:start",
                {"name": contender.name, "calls": calls, "exact": str(exact)},
                python=options.peers_python if contender.peer else sys.executable,
                timeout=timeout,
            )
            row: Row = {"contender": contender.name}
            row |= outcome.value or {"note": f"{outcome.status}: {outcome.reason}"}
            print(f"{contender.name}: {row.get('total_s', outcome.reason)}", file=sys.stderr)
            found.append(row)
    add_ratios(found, reference)
    return found


def write_exact(path: str, calls: int) -> None:
    """Write what every contender has to return for each call, by NumPy."""
    weights = encoder.draw_weights()
    with open(path, "wb") as file:
        for tokens in encoder.draw_tokens(encoder.draw_sizes(calls)):
            encoder.encode(weights, tokens).tofile(file)


def warm(options: Options) -> list[Row]:
    """The stream once all is compiled: contenders in turn, call by call, in one process."""
    ours = [e for e in ENTRIES if e.name.startswith("bucketjit")]
    return warm_rows(options, [entry(REFERENCE), *ours])


def warm_plans(options: Options) -> list[Row]:
    """The same, by ways of choosing buckets."""
    return warm_rows(options, PLANS)


def warm_rows(options: Options, entries: Sequence[Entry]) -> list[Row]:
    """A row for each contender; the first is what they are compared with."""
    calls = options.calls or (QUICK_CALLS if options.quick else CALLS)
    sizes, weights = encoder.draw_sizes(calls), encoder.draw_weights()
    stream = [(tokens,) for tokens in encoder.draw_tokens(sizes)]
    contenders = {e.name: e.load()(weights, sizes).run for e in entries}
    in_turn(contenders, stream)  # compiles
    times = in_turn(contenders, stream)
    return [
        {
            "contender": name,
            "p50_ms": median(times[name]) * 1e3,
            "p99_ms": float(np.percentile(times[name], 99)) * 1e3,
            "ratio": paired_ratio(times, name, entries[0].name),
            "total_s": sum(times[name]),
            "throughput": sum(times[entries[0].name]) / sum(times[name]),
        }
        for name in contenders
    ]


COLUMNS = (
    Column("contender", "contender"),
    Column("total_s", "total, s", ".1f"),
    Column("ratio", "ratio", ".2f"),
    Column("set_up_s", "set-up, s", ".1f"),
    Column("compiles", "compiles", "d"),
    Column("p50_ms", "p50, ms", ".1f"),
    Column("p99_ms", "p99, ms", ".0f"),
    Column("peak_rss_mib", "peak RSS, MiB", ".0f"),
    Column("off_by", "off by", ".0e"),
    Column("stolen", "stolen", ".0%"),
    Column("version", "with"),
    Column("note", "note"),
)

WARM_COLUMNS = (
    Column("contender", "contender"),
    Column("p50_ms", "p50, ms", ".2f"),
    Column("p99_ms", "p99, ms", ".0f"),
    Column("total_s", "all calls, s", ".1f"),
    Column("ratio", "ratio", ".3f"),
    Column("throughput", "throughput", ".2f"),
)

SECTIONS = (
    Section(
        "stream",
        "A ragged stream, cold",
        f"{CALLS:,} calls of a {encoder.LAYERS}-layer transformer encoder (width {encoder.WIDTH}) "
        f"from a cold start, at about 610 shapes: batches of 1 to {encoder.LARGEST_BATCH}, "
        "lognormal lengths. Token numbers are NumPy arrays, and the states are wanted on the "
        "host. Each contender has a process of its own and the same weights, and every result is "
        "compared with NumPy's: *off by* is the largest difference. *Total* is the set-up "
        "(exports and compiles ahead of time) and all calls, compiles included; imports are not "
        f"counted. *Ratio* is to *{REFERENCE}*, of the same run but another process. The peak "
        "memory is that of the whole process, framework included. *Stolen* is the CPU time that "
        "the host of a virtual machine gave to others meanwhile, of all that was wanted: rows with "
        "more than a few percent tell of the host. All that use powers of two have the same "
        "buckets. Frameworks whose one program runs at exact sizes (onnxruntime, `tf.function`, "
        "PyTorch) pad nothing and compile once, where XLA compiles for each bucket: "
        "on a stream this short they can come out ahead of all that use buckets.",
        COLUMNS,
        "benchmarks.stream:cold",
    ),
    Section(
        "stream-plans",
        "The same stream, by plans",
        "Cold, as above. *Ratio* is to powers of two by hand from 1, the buckets of who does not "
        "choose any. The fitted plans know the sizes of the stream, as from a log of the day "
        "before; in the background, the largest bucket that is compiled stands in for others.",
        COLUMNS,
        "benchmarks.stream:plans",
    ),
    Section(
        "stream-warm",
        "The same stream, warm",
        "All buckets compiled before; the contenders take each call in turn, in one process. "
        f"*Ratio* is the median of the paired ratios to *{REFERENCE}*; *throughput* is how many "
        "calls are done in the time that it takes for one.",
        WARM_COLUMNS,
        "benchmarks.stream:warm",
    ),
    Section(
        "stream-plans-warm",
        "The same stream, by plans, warm",
        f"As above, beside *{PLANS[0].name}*.",
        WARM_COLUMNS,
        "benchmarks.stream:warm_plans",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
