"""What a second process saves by the executables that a first one has left in files.

Run with ``python benchmarks/persistence.py``. A 6-layer transformer is called once in each of
several buckets, in a process of its own for every row: with an empty directory, then with what that
left, call by call and by a warm-up, which loads with all cores; with JAX's own compilation cache
alone, likewise. The start is what it takes until all buckets can be called: tracing, and masking,
lowering and compiling, or loading; not imports, and what they leave to collect. *Stolen* is the CPU
time that the host of a virtual machine gave to others meanwhile, of all that was wanted. ``--warm``
adds what a warm call costs, of a compiled executable or a loaded one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS = 6
BATCH = 8
LENGTHS = (16, 32, 48, 64, 96, 128)


def _model(step: bool) -> Any:
    import numpy as np

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from benchmarks import masking

    masking.LAYERS = LAYERS
    make = masking.transformer_step if step else masking.transformer_forward
    return make(np.random.default_rng(0))


def child(mode: str, directory: str, options: argparse.Namespace) -> None:
    """Start one process, and print what that took as JSON."""
    import jax
    import numpy as np

    model = _model(options.step)
    import bucketjit
    from benchmarks.measuring import HostLoad

    executor = bucketjit.jit(
        model.plain, dynamic_axes=(None, "b, s"), buckets={"b": "pow2", "s": LENGTHS}
    )
    if mode == "files":
        executor = executor.with_persistence(directory)
    else:
        executor = executor.with_persistence(None)
    if mode == "jax":
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    calls = [(model.params, np.zeros((BATCH - 1, n - 1), np.int32)) for n in LENGTHS]
    engine = executor._engine
    gc.collect()  # what imports left: the next full collection is theirs, and takes 30 to 70 ms
    host = HostLoad()
    began = time.perf_counter()
    if options.warmup:
        executor.warmup(*calls[-1], sizes={"b": [BATCH], "s": LENGTHS}, progress=False)
    for call in calls:
        resolved = engine.resolve(engine.signer.sign(call, {}))
        bucket = engine.buckets.of(resolved.program, resolved)
        engine.provider.prepare(engine.requests.of(resolved, bucket), first_run=False)
    start, stolen = time.perf_counter() - began, host.stolen()
    for call in calls:
        jax.block_until_ready(executor(*call))
    stats = executor.stats()
    assert stats.compiles + stats.loads == len(LENGTHS)
    told = {
        "start": start,
        "stolen": stolen,
        "compiles": stats.compiles,
        "compile_seconds": stats.compile_seconds,
        "loads": stats.loads,
        "load_seconds": stats.load_seconds,
    }
    if options.warm:
        small = bucketjit.jit(lambda p, x: x + p, dynamic_axes=(None, "b"), buckets="pow2")
        small = small.with_persistence(directory if mode == "files" else None)
        x = np.zeros(7, np.float32)
        times = []
        for _ in range(4000):
            began = time.perf_counter()
            small(1.0, x)
            times.append(time.perf_counter() - began)
        told["warm"] = float(np.median(times[100:]))
        told["warm_loads"] = small.stats().loads
    print(json.dumps(told))


def _run(mode: str, directory: str, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", mode, "--directory", directory]
    command += ["--step"] * options.step + ["--warm"] * options.warm + list(more)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", action="store_true", help="a training step, not the forward pass")
    parser.add_argument("--warm", action="store_true", help="also time warm calls")
    parser.add_argument("--warmup", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.directory, options)
        return
    print(f"{LAYERS} layers, {'step' if options.step else 'forward'}, buckets {BATCH} x {LENGTHS}")
    headings = ("start", "of first", "compiles", "loads", "in files", "stolen")
    print(f"{'':34}" + "".join(f"{heading:>10}" for heading in headings))
    for _ in range(options.rounds):
        for mode, label in (("files", "with_persistence"), ("jax", "JAX's cache alone")):
            with tempfile.TemporaryDirectory() as directory:
                first = _run(mode, directory, options)
                size = sum(p.stat().st_size for p in Path(directory).rglob("*") if p.is_file())
                second = _run(mode, directory, options)
                warmed = _run(mode, directory, options, "--warmup")
            rows = {"first": first, "second": second, "second, warm-up": warmed}
            for which, told in rows.items():
                cells = (
                    f"{told['start']:.3f} s",
                    f"{told['start'] / first['start']:.1%}",
                    told["compiles"],
                    told["loads"],
                    f"{size / 2**20:.2f} MiB",
                    "" if told["stolen"] is None else f"{told['stolen']:.0%}",
                    *([f"  warm {told['warm'] * 1e6:.1f} us"] if options.warm else []),
                )
                row = "".join(f"{cell:>10}" for cell in cells)
                print(f"{label + ', ' + which:34}{row}", flush=True)


if __name__ == "__main__":
    main()
