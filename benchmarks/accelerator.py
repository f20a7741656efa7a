"""The stream, dispatch and masks in a short form, on an accelerator, arrays there.

`make accelerator` runs it after its checks; see tests/accelerator/__main__.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import bucketjit
from benchmarks import dispatch, masking, stream
from benchmarks.alone import Skipped
from benchmarks.contenders import entry
from benchmarks.sections import Column, Options, Row, Section, print_sections

CALLS, ROUNDS = 16, 200
SIZES = (35, 41, 48, 52, 60, 64)  # of one bucket; each is a program of `jax.jit`
OURS = "bucketjit, pow2"

Part = tuple[str, Callable[[], list[Row]]]


def parts(calls: int = CALLS, rounds: int = ROUNDS) -> tuple[Part, ...]:
    """What is measured, by name: those first that take least."""
    return (
        ("dispatch", lambda: of_dispatch(rounds)),
        ("masks", lambda: of_masks(max(3, rounds // 10))),
        ("the stream, warm", lambda: of_warm_stream(calls)),
        ("the stream, cold", lambda: of_cold_stream(calls)),
    )


def measured(chosen: Sequence[Part], until: float) -> Iterator[tuple[str, list[Row]]]:
    """The name and the rows of each part that is begun before ``until``, by `time.monotonic`.

    A part that fails, or comes too late, has one row, which says so.
    """
    for name, run in chosen:
        if time.monotonic() > until:
            yield name, [{"group": name, "way": "left out", "note": "no time left"}]
            continue
        try:
            yield name, run()
        except Exception as error:  # the other parts are worth having without this one
            yield name, [_failed(name, f"{type(error).__name__}: {error}")]


def _failed(name: str, why: str) -> Row:
    return {"group": name, "way": "failed", "failed": True, "note": " ".join(why.split())[:160]}


def of_dispatch(rounds: int) -> list[Row]:
    """Warm calls of `dispatch.tiny`; arrays on the device come and go."""
    expert, jitted = dispatch.Expert(), jax.jit(dispatch.tiny)
    host = [(np.ones((n, dispatch.WIDTH), np.float32),) for n in SIZES]
    device = [(jax.device_put(x),) for (x,) in host]
    forms = {out: bucketjit.jit(dispatch.tiny, out=out, buckets="pow2") for out in ("numpy", "jax")}
    kept = bucketjit.jit(dispatch.tiny, out="padded", buckets="pow2")
    calls: dispatch.Calls = {
        "jax.jit, a program per size": jitted,
        "by hand, by way of the host": expert.jax_by_host,
        "bucketjit": forms["jax"],
        "bucketjit, results stay padded": kept,
    }
    at_bucket = {"jax.jit": jitted, "bucketjit": forms["jax"]}
    by_host = {"by hand": expert.numpy, "bucketjit": forms["numpy"]}
    of = f"{SIZES[0]} to {SIZES[-1]} rows"
    return [
        *dispatch.rows_of(f"dispatch: on the device, {of}", calls, device, rounds),
        *dispatch.rows_of(
            "dispatch: on the device, the bucket's size", at_bucket, device[-1:], rounds
        ),
        *dispatch.rows_of(f"dispatch: NumPy in, host array out, {of}", by_host, host, rounds),
    ]


def of_masks(rounds: int, quick: bool = False) -> list[Row]:
    """Derived masks beside masks by hand, executables alone."""
    makers = (masking.cnn_step, masking.transformer_forward, masking.transformer_step)
    found: list[Row] = []
    for make in makers[:1] if quick else makers:
        row = masking.measure(make(np.random.default_rng(0)), rounds)
        group = f"masks: {row['model']}"
        found += [
            {"group": group, "way": "by hand", "us": row["hand_ms"] * 1e3, "ratio": 1.0},
            {"group": group, "way": "derived", "us": row["ours_ms"] * 1e3, "ratio": row["ratio"]},
        ]
    return found


def of_warm_stream(calls: int) -> list[Row]:
    """The stream once all is compiled, tokens from the host and states to it."""
    rows = stream.warm_rows(Options(calls=calls), [entry(stream.REFERENCE), entry(OURS)])
    return [_of_stream(f"stream, warm, {calls} calls", row) for row in rows]


def of_cold_stream(calls: int) -> list[Row]:
    """The stream with its compiles, each contender in a process of its own."""
    entries = [entry(stream.REFERENCE), entry(OURS), entry("jax.jit per shape")]
    rows = stream.cold_rows(Options(calls=calls), entries, stream.REFERENCE, timeout=90)
    return [_of_stream(f"stream, cold, {calls} calls", row) for row in rows]


def _of_stream(group: str, row: Row) -> Row:
    kept: dict[str, Any] = {k: row[k] for k in ("total_s", "ratio", "compiles", "note") if k in row}
    kept |= {"us": row["p50_ms"] * 1e3} if "p50_ms" in row else {"failed": True}
    return {"group": group, "way": row["contender"], **kept}


def by_make(options: Options) -> list[Row]:
    """Says who measures this section."""
    raise Skipped("`make accelerator` measures it, on a machine with a GPU")


SECTION = Section(
    "accelerator",
    "On a GPU",
    "`make accelerator` measures this on a machine with a GPU, in at most five minutes: first its "
    "checks, which are listed, then short forms of the sections above. Products of matrices have "
    "their full precision, not that of TF32. *On the device* means that arguments and results are "
    "arrays of the GPU; bucketjit pads and cuts them there. *Ratio* is to the first row: for calls "
    "in turn the median of the paired ratios, for the cold stream that of the totals.",
    (
        Column("way", "way"),
        Column("us", "p50, us", ".1f"),
        Column("total_s", "total, s", ".2f"),
        Column("compiles", "compiles", "d"),
        Column("ratio", "ratio", ".3f"),
        Column("outcome", "outcome"),
        Column("seconds", "seconds", ".1f"),
        Column("note", "note"),
    ),
    "benchmarks.accelerator:by_make",
    group="group",
    command="make accelerator",
)
SECTIONS = (SECTION,)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
