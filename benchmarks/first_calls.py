"""What the first call of a function costs, beside `jax.jit` of the same function masked by hand.

    python -m benchmarks.first_calls

Each call is the first one of a process of its own, after its imports. Both ways get NumPy arrays:
those by hand are padded already. A call is measured in CPU seconds of all threads of the process,
a stage in seconds.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from benchmarks.alone import run_alone
from benchmarks.measuring import paired_ratio
from benchmarks.sections import Column, NotHere, Options, Row, Section, print_sections

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


def of_model(index: int, way: str, staged: bool = False) -> dict[str, float]:
    """CPU seconds of the first call of a model of `benchmarks.lean`; by stages, if asked."""
    import jax

    import bucketjit
    from benchmarks.lean import MODELS

    model = MODELS[index](np.random.default_rng(0))
    arrays = list(model.arrays)
    if way == "hand":
        function: Any = jax.jit(model.by_hand)
        arrays += [np.int32(n) for n in model.sizes.values()]
    else:
        cuts = [tuple(slice(model.sizes.get(n, n)) for n in shape) for shape in model.shapes]
        arrays = [array[cut] for array, cut in zip(arrays, cuts, strict=True)]
        axes = [
            ", ".join(n if n in model.sizes else "_" for n in map(str, s)) for s in model.shapes
        ]
        buckets = {v: bucketjit.strategies.Boundaries([n]) for v, n in model.bucket.items()}
        function = bucketjit.jit(
            model.plain, dynamic_axes=(None, *axes), buckets=buckets, fallback="error"
        )
    jax.block_until_ready(jax.device_put(np.zeros(1)))
    if not staged:
        began = time.process_time()
        jax.block_until_ready(function(model.params, *arrays))
        return {"call": time.process_time() - began}
    lowered: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: lowered.append(seconds) if name == _LOWERED else None
    )
    stages, program = {}, function
    for stage in ("trace", "lower", "compile"):
        began = time.perf_counter()
        arguments = (model.params, *arrays) if stage == "trace" else ()
        program = getattr(program, stage)(*arguments)
        stages[stage] = time.perf_counter() - began
        if stage == "lower":
            stages["masks"] = stages["lower"] - sum(lowered)
            stages["lower"] = sum(lowered)
    return stages


def by_model(options: Options) -> list[Row]:
    """A row for each model, and one of all; ``options.calls`` is how often each process is run."""
    from benchmarks.lean import MODELS

    rows: list[Row] = []
    for index in range(1 if options.quick else len(MODELS)):
        times: dict[str, list[float]] = {"hand": [], "ours": []}
        for _ in range(1 if options.quick else options.calls or 7):
            for way, seconds in times.items():
                seconds.append(_seconds(index, way)["call"])
        row: Row = {"model": MODELS[index](np.random.default_rng(0)).name}
        for way, seconds in times.items():
            row |= {f"{way}_{stage}": s for stage, s in _seconds(index, way, True).items()}
            row[f"{way}_s"] = median(seconds)
        row["hand_trace"] += row.pop("hand_masks")
        row["ratio"] = paired_ratio(times, "ours", "hand")
        rows.append(row)
    ratios = [row["ratio"] for row in rows]
    return [*rows, {"model": "median", "ratio": median(ratios)}]


def _seconds(index: int, way: str, staged: bool = False) -> dict[str, float]:
    arguments = {"index": index, "way": way, "staged": staged}
    # Files of compiled Python are there, as after an installation.
    variables = {"PYTHONDONTWRITEBYTECODE": ""}
    outcome = run_alone("benchmarks.first_calls:of_model", arguments, variables=variables)
    if outcome.status != "ok":
        raise NotHere(outcome.reason)
    value: dict[str, float] = outcome.value
    return value


SECTIONS = (
    Section(
        "first-calls",
        "First calls",
        "CPU seconds of the first call of a function, in a process of its own, beside `jax.jit` of "
        "the same function masked by hand; and seconds of the stages: the trace, the masks, the "
        "lowering, XLA's compile. By hand, masks are a part of the trace.",
        (
            Column("model", "program"),
            Column("hand_s", "by hand, s", ".2f"),
            Column("ours_s", "bucketjit, s", ".2f"),
            Column("ratio", "ratio", ".2f"),
            *(
                Column(f"{way}_{stage}", f"{stage}, {name}", ".2f")
                for stage in ("trace", "masks", "lower", "compile")
                for way, name in (("hand", "by hand"), ("ours", "bucketjit"))
                if (way, stage) != ("hand", "masks")
            ),
        ),
        "benchmarks.first_calls:by_model",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
