"""Thousands of random programs: ``python -m tests.generated [--examples N] [--seed S]``.

Failures are cut down to the lines they need and printed as source; then the exit status is 1.
"""

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.generated.sweep import BATCH, run_batch
from tests.isolated import processes, run_isolated


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__)
    parser.add_argument("--examples", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paired", action="store_true", help="make them of concrete traces")
    parser.add_argument("--jobs", type=int, default=processes())
    given = parser.parse_args(argv)
    began = time.perf_counter()
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failures: list[str] = []
    chunks = [[given.seed * 100_000 + k] for k in range(-(-given.examples // BATCH))]
    run = functools.partial(run_batch, paired=given.paired)
    for chunk, result in run_isolated(run, chunks, given.jobs):
        if result is None:
            failures.append(f"batch {chunk[0]}: the process died")
            continue
        more, refused, failed = result
        kinds += more
        reasons += refused
        failures += failed
        shown = ", ".join(f"{k} {n}" for k, n in sorted(kinds.items()))
        print(f"{shown}; {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        for text in failed:
            print(f"\n{text}", flush=True)
    for reason, count in reasons.most_common():
        print(f"{count:5} refused: {reason}")
    print(f"{sum(kinds.values())} programs: {dict(kinds)}; {len(failures)} failures")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
