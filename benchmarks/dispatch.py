"""The micro-costs of test_dispatch.py, by pytest-benchmark, as a section of the page."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.alone import ROOT
from benchmarks.sections import Column, Options, Row, Section, print_sections

QUICK = (
    "--benchmark-min-rounds=1",
    "--benchmark-max-time=0.001",
    "--benchmark-calibration-precision=1",
)


def by_group(options: Options) -> list[Row]:
    """A row for each benchmark; its ratio is to the first one of its group."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "-q", "benchmarks/test_dispatch.py"]
        command += [
            "--benchmark-only",
            f"--benchmark-json={report}",
            *(QUICK if options.quick else ()),
        ]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        return rows_of(json.loads(report.read_text()))


def rows_of(report: dict[str, Any]) -> list[Row]:
    """The rows of what pytest-benchmark writes."""
    found: list[Row] = []
    first: dict[str, float] = {}
    for benchmark in report["benchmarks"]:
        group, us = benchmark["group"], benchmark["stats"]["median"] * 1e6
        way = (benchmark["params"] or {}).get("way", benchmark["name"])
        ratio = us / first.setdefault(group, us)
        found.append({"group": group, "way": way, "us": us, "ratio": ratio})
    return found


SECTIONS = (
    Section(
        "dispatch",
        "Dispatch",
        "Warm calls beside what an expert writes by hand for the same bucket, or `jax.jit` at the "
        "bucket's shape. *Ratio* is that of the medians, to the first row.",
        (Column("way", "way"), Column("us", "p50, us", ".1f"), Column("ratio", "ratio", ".2f")),
        "benchmarks.dispatch:by_group",
        group="group",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
