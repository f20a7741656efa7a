"""A saved sentence encoder: its file, how long it takes to load, and until it is ready.

    python -m benchmarks.saving

The encoder is all-MiniLM-L6-v2 of `examples/embed_sentences.py`, with its weights in the file.
Every row is a process of its own, which makes the same buckets ready: from the source, by tracing,
masking and compiling; from a file, by loading it and compiling; and from a file with executables.
Imports, and reading the weights of the source, are not counted.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.alone import ROOT, Skipped, run_alone
from benchmarks.sections import Column, Options, Row, Section, print_sections

BATCH = 8
LENGTHS = (16, 32, 48, 64, 96, 128)
SOURCE, FILE, EXECUTABLES = "from the source", "from the file", "from the file with executables"


def encoder() -> tuple[Any, int]:
    """The encoder as an executor, and the bytes of its weights.

    Raises:
        Skipped: The model is not installed.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    import embed_sentences

    import bucketjit

    try:
        params, _ = embed_sentences.load_model()
    except embed_sentences.MissingModelError as error:
        raise Skipped(str(error)) from error
    executor = bucketjit.jit(
        lambda token_ids: embed_sentences.encode(params, token_ids),
        dynamic_axes="b, s",
        buckets={"b": "pow2", "s": LENGTHS},
    )
    return executor.with_persistence(None), sum(value.nbytes for value in params.values())


def example() -> Any:
    """The type of the argument."""
    import jax
    import numpy as np

    return jax.ShapeDtypeStruct((BATCH, LENGTHS[0]), np.int32)


def write(path: str, lengths: list[int], executables: bool) -> Row:
    """Save the encoder.

    Returns:
        Seconds, and megabytes of the file and of the weights.
    """
    executor, nbytes = encoder()
    sizes = {"b": [BATCH], "s": lengths}
    began = time.perf_counter()
    executor.save(path, example(), sizes=sizes, executables=executables)
    seconds = time.perf_counter() - began
    size = Path(path).stat().st_size / 1e6
    return {"save_s": seconds, "file_mb": size, "beyond_mb": size - nbytes / 1e6}


def start(way: str, path: str, lengths: list[int]) -> Row:
    """Make all buckets ready.

    Returns:
        Seconds until the function was loaded, and until the buckets were ready.
    """
    import bucketjit

    executor = encoder()[0] if way == SOURCE else None
    began = time.perf_counter()
    loaded = began
    if executor is not None:
        executor.warmup(example(), sizes={"b": [BATCH], "s": lengths}, progress=False)
        stats = executor.stats()
    else:
        function = bucketjit.load(path, trust_executables=way == EXECUTABLES)
        loaded = time.perf_counter()
        function.warmup(progress=False)
        stats = function.stats()
    ready = time.perf_counter() - began
    found = {"ready_s": ready, "compiles": stats.compiles, "loads": stats.loads}
    if stats.compiles + stats.loads != len(lengths):
        raise AssertionError(f"{stats.compiles} compiles and {stats.loads} loads")
    return found if way == SOURCE else {**found, "load_s": loaded - began}


def by_way(options: Options) -> list[Row]:
    """A row for each way to get ready."""
    rounds, lengths = (1, LENGTHS[:2]) if options.quick else (3, LENGTHS)
    rows: dict[str, Row] = {SOURCE: {"way": SOURCE}}
    with tempfile.TemporaryDirectory() as folder:
        paths = {SOURCE: "", FILE: f"{folder}/plain.bkt", EXECUTABLES: f"{folder}/executables.bkt"}
        for way in (FILE, EXECUTABLES):
            given = {"path": paths[way], "lengths": lengths, "executables": way == EXECUTABLES}
            rows[way] = {"way": way, **_value("write", given)}
        times: dict[str, list[Row]] = {way: [] for way in rows}
        for _ in range(rounds):
            for way in rows:
                given = {"way": way, "path": paths[way], "lengths": lengths}
                times[way].append(_value("start", given))
    for way, row in rows.items():
        for key in times[way][0]:
            row[key] = median(one[key] for one in times[way])
        row["ratio"] = _ratio(times[way], times[SOURCE])
    rows[EXECUTABLES]["of_file"] = _ratio(times[EXECUTABLES], times[FILE])
    return list(rows.values())


def _ratio(ones: list[Row], others: list[Row]) -> float:
    pairs = zip(ones, others, strict=True)
    return median(one["ready_s"] / other["ready_s"] for one, other in pairs)


def _value(function: str, arguments: dict[str, Any]) -> Row:
    """What a function of this module returns in a process of its own."""
    outcome = run_alone(f"benchmarks.saving:{function}", arguments)
    if outcome.status == "skipped":
        raise Skipped(outcome.reason)
    if outcome.status != "ok":
        raise RuntimeError(outcome.reason)
    return outcome.value


SECTIONS = (
    Section(
        "saving",
        "A saved function",
        "all-MiniLM-L6-v2 with its weights in one file, and 6 buckets of 8 sentences. *Beyond the "
        "weights* is what the file has more than their bytes. *Load* is `bucketjit.load`, with the "
        "digests of all that is in the file. *Ready* is the time until all buckets can be called, "
        "in a process of its own: tracing, masking and compiling the source; loading and compiling "
        "the file; or loading the executables in it. The ratios are medians of pairs: to the "
        "source, and to the file without executables.",
        (
            Column("way", "way"),
            Column("file_mb", "file, MB", ".2f"),
            Column("beyond_mb", "beyond the weights, MB", ".2f"),
            Column("save_s", "save, s", ".1f"),
            Column("load_s", "load, s", ".2f"),
            Column("ready_s", "ready, s", ".2f"),
            Column("compiles", "compiles", ".0f"),
            Column("ratio", "of the source", ".3f"),
            Column("of_file", "of the file", ".3f"),
        ),
        "benchmarks.saving:by_way",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
