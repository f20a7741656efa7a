"""What the compilers of TPUs and of NVIDIA's GPUs make of derived masks, on a machine without one.

    make accelerator-compilers                   both targets, benchmarks/README.md, and all cases
                                                 of the tests; an hour and a half
    make accelerator-compilers ARGS=--sample     a minute for each, and a sample of the tests; it
                                                 fails if a program takes more cycles or kernels

The compilers come with packages (`libtpu`, `jax-cuda12-plugin`), which `make` installs into an
environment of their own. A TPU's compiler writes the cycles that it expects beside each kernel, a
GPU's kernels can be counted, and both tell bytes. None of it depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks import encoder
from benchmarks.alone import ROOT, run_alone
from benchmarks.lean import MODELS
from benchmarks.sections import Column, NotHere, Options, Row, Section, load, print_sections

PYTHON = ROOT / ".venv-compilers" / "bin" / "python"
# What libtpu would ask a machine of a cloud for; the last lets several processes load it.
VARIABLES = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
CALLS = 1000
TARGETS = {"tpu": "TPU v5e", "cuda": "H100"}
# An H100 as its data sheet and XLA's description of the chip tell it.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024  threads_per_warp: 32  core_count: 132  fpus_per_core: 128
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 84942979072  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"  device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 }  runtime_version { major: 12 minor: 9 }
"""
_KERNEL = re.compile(
    r" (?:fusion|custom-call|sort|convolution|dot|copy|while|scatter|reduce|all-\w+)\("
)


@functools.cache
def device(target: str) -> Any:
    """A device of a topology that is not here."""
    from jax.experimental import topologies

    if target == "tpu":
        described = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    else:
        described = topologies.get_topology_desc(
            "one", "cuda", target_config=H100, topology="1x1x1"
        )
    return described.devices[0]


def cycles(text: str, turns: int = 1) -> int:
    """The cycles of a module for a TPU; those of a loop as often as it is known to turn.

    The compiler does not know it of loops over sequences: these turn ``turns`` times.
    """
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if begin := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = begin[2]
            entry = name if begin[1] else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)

    def of(name: str) -> int:
        total = 0
        for line in bodies.get(name, ()):
            if estimate := re.search(r'"estimated_cycles":"(\d+)"', line):
                total += int(estimate[1])
            if loop := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                total += of(loop[1]) * (int(known[1]) if known else turns)
        return total

    return of(entry)


def figures(compiled: Any, turns: int = 1) -> dict[str, int]:
    """Cycles (of a TPU), kernels, fused kernels that tell no cycles, and temporary bytes."""
    text = compiled.as_text()
    entry = text[text.index("ENTRY") :]
    untold = [
        line
        for line in entry.splitlines()
        if "tpu_custom_call" in line and "estimated_cycles" not in line
    ]
    return {
        "cycles": cycles(text, turns),
        "kernels": len(_KERNEL.findall(entry)),
        "fused": len(untold),
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
    }


def compile_pairs(
    target: str, dtypes: Sequence[str], widths: Sequence[int], models: Sequence[str], exact: bool
) -> list[Row]:
    """A row for each pair, width and dtype: by hand, derived, and plain at the exact shape.

    Derived programs are those that ``bucketjit.jit(f).lower(...)`` compiles for the device.
    """
    import jax
    import jax.numpy as jnp

    import bucketjit

    at = jax.sharding.SingleDeviceSharding(device(target))
    rows: list[Row] = []
    for dtype, width, make in itertools.product(dtypes, widths, MODELS):
        if make.__name__ not in models:
            continue
        model = make(np.random.default_rng(0), width)

        def spec(x: Any, shape: Any = None, dtype: str = dtype) -> Any:
            kind = jnp.dtype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
            return jax.ShapeDtypeStruct(x.shape if shape is None else shape, kind, sharding=at)

        params, *padded = jax.tree.map(spec, (model.params, *model.arrays))
        sizes = [spec(np.zeros((), np.int32)) for _ in model.sizes]
        shapes = [tuple(model.sizes.get(n, n) for n in shape) for shape in model.shapes]  # type: ignore[call-overload]
        ragged = list(map(spec, model.arrays, shapes))
        axes = [", ".join("_" if isinstance(n, int) else n for n in dims) for dims in model.shapes]
        buckets = {v: bucketjit.strategies.Boundaries([n]) for v, n in model.bucket.items()}
        derived = bucketjit.jit(model.plain, dynamic_axes=(None, *axes), buckets=buckets)
        programs = {
            "hand": jax.jit(model.by_hand).lower(params, *padded, *sizes),
            "ours": derived.lower(params, *ragged),
        }
        if exact:
            programs["exact"] = jax.jit(model.plain).lower(params, *ragged)
        row: Row = {"target": TARGETS[target], "model": model.name, "width": width, "dtype": dtype}
        for name, program in programs.items():
            try:
                compiled = program.compile()
            except jax.errors.JaxRuntimeError as error:
                if name != "exact":  # XLA's compilers refuse some sizes
                    raise
                row["note"] = f"exact: {str(error).split(':')[0].lower()} error"
            else:
                turns = (model.sizes if name == "exact" else model.bucket).get("s", 1)
                row |= {f"{name}_{key}": n for key, n in figures(compiled, turns).items()}
        for key in ("cycles", "kernels"):
            for name, to in (("ours", "hand"), ("hand", "exact")):
                if row.get(f"{to}_{key}"):
                    row[f"{name}_{key}_ratio"] = row[f"{name}_{key}"] / row[f"{to}_{key}"]
        row["fused"] = f"{row['ours_fused']} of {row['hand_fused']}"
        row["more_kb"] = (row["ours_temporary"] - row["hand_temporary"]) / 1e3
        rows.append(row)
    return rows


def compile_stream(target: str, sample: int) -> Row:
    """Compile the ragged stream: ``sample`` of its shapes by ``jax.jit``, and all its buckets."""
    import jax
    from jax.sharding import SingleDeviceSharding

    import bucketjit
    from benchmarks.contenders.jax_encoder import encode

    at = SingleDeviceSharding(device(target))

    def spec(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

    weights = jax.tree.map(spec, encoder.draw_weights())
    shapes = sorted(set(encoder.draw_sizes(CALLS)))
    sizes = [{"b": b, "s": s} for b, s in shapes]
    some = shapes[:: max(1, len(shapes) // sample)]
    tokens = {shape: spec(np.zeros(shape, np.int32)) for shape in (*some, shapes[-1])}
    bucketed = bucketjit.jit(encode, dynamic_axes=(None, "b, s"), buckets="pow2", fallback="error")
    began = time.perf_counter()
    bucketed.warmup(weights, tokens[shapes[-1]], sizes=sizes, workers=1, progress=False)
    warm = time.perf_counter()
    refused = 0
    for shape in some:
        lowered = jax.jit(encode).lower(weights, tokens[shape])
        try:
            lowered.compile()
        except jax.errors.JaxRuntimeError:  # XLA's compilers refuse some sizes
            refused += 1
    exact = (time.perf_counter() - warm) / len(some) * len(shapes)
    return {
        "target": TARGETS[target],
        "shapes": len(shapes),
        "tried": len(some),
        "refused": refused,
        "exact_s": exact,
        "buckets": bucketed.cache_size(),
        "total_s": warm - began,
        "ratio": exact / (warm - began),
    }


def of_stream(options: Options) -> list[Row]:
    """The stream by each target's compiler."""
    sample = {"sample": 2 if options.quick else 24}
    return [compiled_alone(target, "compile_stream", **sample) for target in TARGETS]


def compiled_alone(target: str, function: str = "compile_pairs", **options: Any) -> Any:
    """Compile in a process of its own, by the interpreter that has the compilers."""
    arguments = {"target": target, **options}
    where = f"benchmarks.compilers:{function}"
    outcome = run_alone(where, arguments, python=str(PYTHON), variables=VARIABLES)
    if outcome.status == "skipped":
        raise NotHere(f"accelerators skipped: {outcome.reason}; make accelerator-compilers")
    if outcome.status != "ok":
        raise RuntimeError(f"{TARGETS[target]}: {outcome.reason}")
    return outcome.value


def by_target(options: Options) -> list[Row]:
    """The rows of both targets; a process for each model, as compilers keep memory."""
    rows = []
    for target, dtype in itertools.product(TARGETS, ("float32", "bfloat16")):
        for make in MODELS[:1] if options.quick else MODELS:
            grid = {"dtypes": [dtype], "widths": [64, 256], "models": [make.__name__]}
            rows += compiled_alone(target, **grid, exact=dtype == "float32")
            print(f"{TARGETS[target]}, {dtype}, {make.__name__}", file=sys.stderr)
    return rows


SAMPLE = {"dtypes": ["float32"], "widths": [64], "exact": False}
SAMPLE_MODELS = ("mlp_step", "transformer_forward", "gru_step", "decode_step", "graph_step")
TOLERANCE = 0.005


def dearer(kept: Iterable[Row], rows: Iterable[Row]) -> list[str]:
    """What takes more cycles or kernels, over by hand, than the kept row of the same pair."""
    pair = operator.itemgetter("target", "model", "width", "dtype")
    before = {pair(row): row for row in kept if "ours_kernels_ratio" in row}
    found = []
    for row in rows:
        for key in ("ours_cycles_ratio", "ours_kernels_ratio"):
            was = before.get(pair(row), {}).get(key)
            if was is not None and row[key] > was + TOLERANCE:
                found.append(f"{', '.join(map(str, pair(row)))}: {key} {was:.3f} -> {row[key]:.3f}")
    return found


SECTIONS = (
    Section(
        "accelerators",
        "What the compilers of accelerators say",
        "The pairs of *How lean the masked program is*, compiled for devices that are not here. "
        "Derived programs are those of `bucketjit.jit`; their sizes are one vector. Ratios are to "
        "the same function masked by hand; *by hand, to exact* is that over the function without "
        "masks at the exact shape (float32). Cycles are what the TPU's compiler expects. It tells "
        "none for *fused* kernels (attention, gathers): both programs must have as many.",
        (
            Column("target", "target"),
            Column("model", "model"),
            Column("width", "width", "d"),
            Column("dtype", "dtype"),
            Column("hand_cycles", "by hand, cycles", ","),
            Column("ours_cycles_ratio", "cycles, ratio", ".2f"),
            Column("hand_cycles_ratio", "by hand, to exact", ".2f"),
            Column("hand_kernels", "by hand, kernels", "d"),
            Column("ours_kernels_ratio", "kernels, ratio", ".2f"),
            Column("fused", "fused"),
            Column("hand_temporary", "by hand, temporary bytes", ","),
            Column("more_kb", "more, kB", ".0f"),
            Column("note", "note"),
        ),
        "benchmarks.compilers:by_target",
        group="target",
        command="make accelerator-compilers",
    ),
    Section(
        "accelerators-stream",
        "The stream, by the compilers of accelerators",
        f"Seconds in which the compiler takes the shapes of {CALLS:,} calls of the ragged stream: "
        "each shape by `jax.jit`, from a sample of them, and all buckets by a warm-up of "
        "`bucketjit.jit(encode, buckets='pow2')` in one thread. The H100's compiler refuses some "
        "exact shapes.",
        (
            Column("target", "target"),
            Column("shapes", "shapes", "d"),
            Column("tried", "tried of them", "d"),
            Column("refused", "refused", "d"),
            Column("exact_s", "`jax.jit`, s", ".0f"),
            Column("buckets", "buckets", "d"),
            Column("total_s", "bucketjit, s", ".1f"),
            Column("ratio", "`jax.jit` to bucketjit", ".0f"),
        ),
        "benchmarks.compilers:of_stream",
        command="make accelerator-compilers",
    ),
)


def main() -> None:
    """Compile a sample, and fail if a pair got dearer; or all cases of the tests."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", action="store_true", help="a minute for each target")
    parser.add_argument("--tests", action="store_true", help="all cases of the tests, half an hour")
    options = parser.parse_args()
    if not options.sample and not options.tests:
        print_sections(SECTIONS, __doc__)
        return
    kept = load(SECTIONS[0])
    assert kept is not None
    found = []
    for target in TARGETS if options.sample else ():
        rows = compiled_alone(target, **SAMPLE, models=SAMPLE_MODELS)
        print(SECTIONS[0].tables(rows))
        found += dearer(kept["rows"], rows)
    files = [f"tests/accelerator/test_{name}.py" for name in ("targets", "cases", "kernels")]
    some = ["-m", "not slow"] if options.sample else []
    command = [str(PYTHON), "-m", "pytest", "-q", *some, *files]
    tests = subprocess.run(command, cwd=ROOT, env={**os.environ, **VARIABLES})
    if tests.returncode:
        sys.exit(tests.returncode)
    if found:
        sys.exit("dearer than in benchmarks/results:\n" + "\n".join(found))


if __name__ == "__main__":
    main()
