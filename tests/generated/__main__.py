"""Thousands of random programs: ``python -m tests.generated [--examples N] [--seed S]``.

Failures are cut down to the lines they need and printed as source; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from tests.generated.sweep import run_batch

BATCH = 40
TASKS_PER_PROCESS = 4  # an executable holds about a hundred memory maps until it is freed


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__)
    parser.add_argument("--examples", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(argv)
    began = time.perf_counter()
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failures: list[str] = []
    batches = -(-given.examples // BATCH)
    with ProcessPoolExecutor(
        given.jobs, mp_context=get_context("spawn"), max_tasks_per_child=TASKS_PER_PROCESS
    ) as pool:
        futures = {
            pool.submit(run_batch, given.seed * 100_000 + k, BATCH): k for k in range(batches)
        }
        for future in as_completed(futures):
            try:
                more, refused, failed = future.result()
            except BrokenProcessPool:
                failures.append(f"batch {futures[future]} of seed {given.seed}: the process died")
                continue
            kinds += more
            reasons += refused
            failures += failed
            shown = ", ".join(f"{k} {n}" for k, n in sorted(kinds.items()))
            seconds = time.perf_counter() - began
            print(f"{shown}; {seconds:.0f} s", file=sys.stderr, flush=True)
            for text in failed:
                print(f"\n{text}", flush=True)
    for reason, count in reasons.most_common():
        print(f"{count:5} refused: {reason}")
    print(f"{sum(kinds.values())} programs: {dict(kinds)}; {len(failures)} failures")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
