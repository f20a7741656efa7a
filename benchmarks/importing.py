"""What importing costs: until a function is bucketed, and until its first call has returned.

    python -m benchmarks.importing

Each figure is the CPU time of a whole process, user and system. The processes of bucketjit and of
``jax.jit`` take turns. Files of compiled Python are there, as after an installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median
from typing import Any

from benchmarks.alone import ROOT
from benchmarks.measuring import paired_ratio
from benchmarks.sections import Column, Options, Row, Section, print_sections

_TOTAL = "def fn(x): return (x * 2).sum()"
_POOLED = "def fn(x): return jax.nn.softmax(x.sum(-1)) @ x"

# What is imported and run, and whether the function is called.
PROGRAMS = {
    "import and jit": (_TOTAL, False),
    "and a first call of (x * 2).sum()": (_TOTAL, True),
    "and a first call of a softmax and a product": (_POOLED, True),
}


def script(way: str, function: str, is_called: bool) -> str:
    """The program of a process."""
    call = "(np.ones((5, 3), np.float32))" if is_called else ""
    return f"import numpy as np, jax, {way}\n{function}\nresult = {way}.jit(fn){call}\n"


def cpu_seconds(code: str) -> float:
    """The CPU time of a process, user and system."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = os.times()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    now = os.times()
    return now.children_user + now.children_system - before.children_user - before.children_system


def loaded(code: str) -> int:
    """How many modules of bucketjit a program loads."""
    count = "sum(name.split('.')[0] == 'bucketjit' for name in __import__('sys').modules)"
    command = [sys.executable, "-c", f"{code}print({count})"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def by_program(options: Options) -> list[Row]:
    """A row for each program; ``options.calls`` is how often each process is run."""
    rows: list[Row] = []
    for name, program in PROGRAMS.items():
        codes = {way: script(way, *program) for way in ("jax", "bucketjit")}
        times: dict[str, Any] = {way: [] for way in codes}
        for round_ in range(1 + (1 if options.quick else options.calls or 10)):
            for way, code in codes.items():
                seconds = cpu_seconds(code)
                if round_:  # the first one may write files of compiled Python
                    times[way].append(seconds)
        rows.append(
            {
                "program": name,
                "jax_s": median(times["jax"]),
                "ours_s": median(times["bucketjit"]),
                "ratio": paired_ratio(times, "bucketjit", "jax"),
                "modules": loaded(codes["bucketjit"]),
            }
        )
    return rows


SECTIONS = (
    Section(
        "importing",
        "Import and first call",
        "CPU seconds of a process that imports, wraps a function, and calls it once, beside one "
        "that does the same with `jax.jit`. *Modules* are those of bucketjit that it loads.",
        (
            Column("program", "program"),
            Column("jax_s", "jax.jit, s", ".2f"),
            Column("ours_s", "bucketjit, s", ".2f"),
            Column("ratio", "ratio", ".2f"),
            Column("modules", "modules", "d"),
        ),
        "benchmarks.importing:by_program",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
