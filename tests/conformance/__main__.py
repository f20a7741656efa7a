"""The sweep: ``python -m tests.conformance [--part a|b|g] [--sample N] [--filter TEXT] ...``."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.conformance import driver
from tests.conformance.outcome import BAD, FALLBACK, KINDS, Outcome, causes, share_masked, table
from tests.conformance.sweep import Progress, sweep
from tests.isolated import processes

PARTS = {
    "a": "mapped over an open batch axis",
    "b": "every axis of every argument open, one at a time",
    "g": "gradient, mapped over an open batch axis",
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    told = "; ".join(f"{k}: {v}" for k, v in PARTS.items()) + " (default: a and b)"
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help=told)
    parser.add_argument("--sample", type=int, help="this many of JAX's cases, not all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    told = "cases whose name contains this"
    parser.add_argument("--filter", action="append", default=[], help=told)
    parser.add_argument("--open", default="", help="only these axes, such as 'arg0[1]' (part b)")
    told = "processes; 0 runs in this one"
    parser.add_argument("--jobs", type=int, default=processes(), help=told)
    told = "show them, in this process (implies --jobs 0)"
    parser.add_argument("--traceback", action="store_true", help=told)
    return parser.parse_args(argv)


def _counted(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(o.kind for o in outcomes)
    return ", ".join(f"{k} {counts[k]}" for k in KINDS if counts[k])


def _progress(part: str) -> Progress:
    """Prints a line for every chunk of cases, and each wrong or failed case as it comes."""
    began, shown = time.perf_counter(), 0

    def progress(done: int, total: int, outcomes: Sequence[Outcome]) -> None:
        nonlocal shown
        lines = [f"    {o.kind}: {o.told}" for o in outcomes[shown:] if o.kind in BAD]
        seconds = time.perf_counter() - began
        head = f"[{part} {done}/{total}] {_counted(outcomes)}; {seconds:.0f} s"
        print(head, *lines, sep="\n", file=sys.stderr, flush=True)
        shown = len(outcomes)

    return progress


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; 1 if anything was wrong or failed."""
    options = _arguments(argv)
    if options.traceback:
        options.jobs, driver.show_tracebacks = 0, True
    is_bad = False
    for part in options.part or ["a", "b"]:
        outcomes = sweep(
            part,
            contains=options.filter,
            sample=options.sample,
            seed=options.seed,
            only=options.open,
            jobs=options.jobs,
            progress=_progress(part),
        )
        print(f"\n{table(outcomes)}\n")
        for kind in (*BAD, FALLBACK):
            if listed := causes(outcomes, kind):
                print(f"{kind}:\n{listed}\n")
        print(
            f"part {part} ({PARTS[part]}): {len(outcomes)} cases: {_counted(outcomes)}; "
            f"masked {share_masked(outcomes):.2%} of what JAX lets be open; "
            f"{sum(o.seconds for o in outcomes):.0f} s of work"
        )
        is_bad = is_bad or any(o.kind in BAD for o in outcomes)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
