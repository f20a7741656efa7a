"""The sweep: ``python -m tests.conformance [--part a|b|g] [--sample N] [--filter TEXT] ...``."""

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.conformance import driver
from tests.conformance.outcome import (
    BAD,
    FALLBACK,
    KINDS,
    UNSUPPORTED,
    UNTRACEABLE,
    Outcome,
    causes,
    markdown,
    share_masked,
    table,
)
from tests.conformance.sweep import sweep
from tests.isolated import processes

PARTS = {
    "a": "mapped over an open batch axis",
    "b": "every axis of every argument open, one at a time",
    "g": "gradient, mapped over an open batch axis",
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument(
        "--part",
        choices=sorted(PARTS),
        action="append",
        help="; ".join(f"{k}: {v}" for k, v in PARTS.items()) + " (default: a and b)",
    )
    parser.add_argument("--sample", type=int, help="this many of JAX's cases, not all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--filter", action="append", default=[], help="cases whose name contains this"
    )
    parser.add_argument(
        "--any-dtype", action="store_true", help="leave out cases that differ in dtypes only"
    )
    parser.add_argument("--open", default="", help="only these axes, such as 'arg0[1]' (part b)")
    help_of_jobs = "processes; 0 runs in this one"
    parser.add_argument("--jobs", type=int, default=processes(), help=help_of_jobs)
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this page")
    parser.add_argument("--refused", action="store_true", help="list what JAX refuses, too")
    parser.add_argument(
        "--traceback", action="store_true", help="show them, in this process (implies --jobs 0)"
    )
    return parser.parse_args(argv)


def _summary(part: str, outcomes: Sequence[Outcome]) -> str:
    counts = Counter(o.kind for o in outcomes)
    seconds = sum(o.seconds for o in outcomes)
    totals = ", ".join(f"{k} {counts[k]}" for k in KINDS)
    return (
        f"part {part} ({PARTS[part]}): {len(outcomes)} cases: {totals}; "
        f"masked {share_masked(outcomes):.2%} of what JAX lets be open; {seconds:.0f} s of work"
    )


class _Progress:
    """A line for every chunk of cases, and each wrong or failed case as it comes."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._began = time.perf_counter()
        self._shown = 0

    def __call__(self, done: int, total: int, found: Sequence[Outcome]) -> None:
        counts = Counter(o.kind for o in found)
        shown = ", ".join(f"{k} {counts[k]}" for k in KINDS if counts[k])
        seconds = time.perf_counter() - self._began
        print(f"[{self._part} {done}/{total}] {shown}; {seconds:.0f} s", file=sys.stderr)
        for o in found[self._shown :]:
            if o.kind in BAD:
                print(f"    {o.kind}: {o.reason}\n        {o.command}", file=sys.stderr)
        sys.stderr.flush()
        self._shown = len(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; 1 if anything was wrong or failed."""
    given = _arguments(argv)
    parts = given.part or ["a", "b"]
    if given.traceback:
        given.jobs, driver.show_tracebacks = 0, True
    report: dict[str, list[Outcome]] = {}
    for part in parts:
        report[part] = sweep(
            part,
            contains=given.filter,
            sample=given.sample,
            seed=given.seed,
            only=given.open,
            any_dtype=given.any_dtype,
            jobs=given.jobs,
            progress=_Progress(part),
        )
    for part, outcomes in report.items():
        print(f"\n{table(outcomes)}\n")
        kinds = [*BAD, FALLBACK, *([UNTRACEABLE, UNSUPPORTED] if given.refused else [])]
        for kind in kinds:
            if listed := causes(outcomes, kind):
                print(f"{kind}:\n{listed}\n")
        print(_summary(part, outcomes))
    if given.markdown:
        given.markdown.write_text(markdown(report, PARTS))
    if given.json:
        rows = [dataclasses.asdict(o) for outcomes in report.values() for o in outcomes]
        given.json.write_text(json.dumps(rows, indent=1))
    return int(any(o.kind in BAD for outcomes in report.values() for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
