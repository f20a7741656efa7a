"""How each model is served, as a table: ``python -m tests.ecosystem [--only TEXT] [--poison]``.

The exit status is 1 if a result differs from that of ``jax.jit``.
"""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence

from bucketjit import Check
from tests.ecosystem.runner import Outcome, libraries, run


def _cell(text: str) -> str:
    """A reason, short of where on this machine libraries are installed."""
    return re.sub(r"/\S*/site-packages/", "", text).replace("|", "\\|")


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; 1 if any differed."""
    parser = argparse.ArgumentParser(prog="python -m tests.ecosystem", description=__doc__)
    parser.add_argument("--only", default="", help="models whose line contains this text")
    parser.add_argument("--poison", action="store_true", help="poison the padding (slower)")
    given = parser.parse_args(argv)
    check = Check.POISON if given.poison else Check.OFF
    ways: Counter[str] = Counter()
    problems = []
    print("| library | model | open axes | served | reason |\n| --- | --- | --- | --- | --- |")
    for library, models, skipped in libraries():
        if skipped:
            print(f"| {library} | | | skipped | {skipped} |", flush=True)
        for model in models:
            line = f"{library} | {model.name} | {', '.join(model.axes())}"
            if given.only not in line:
                continue
            began = time.perf_counter()
            try:
                outcome = run(model, check)
            except Exception as error:  # jax.jit raises it too
                outcome = Outcome("exact", problem=f"the case is broken: {error!r}")
            seconds = time.perf_counter() - began
            if outcome.problem:
                problems.append(f"{line}\n{outcome.problem}")
            way = f"{outcome.way}, WRONG" if outcome.problem else outcome.way
            ways[way] += 1
            calls = len(model.all_sizes())
            some = f", {outcome.fallbacks} of {calls} calls" if outcome.fallbacks else ""
            print(f"| {line} | {way}{some} | {_cell(outcome.reason)} |", flush=True)
            print(f"{seconds:.1f} s, {outcome.compiles} buckets", file=sys.stderr, flush=True)
    counts = ", ".join(f"{n} {way}" for way, n in ways.most_common())
    print(f"\n{sum(ways.values())} models: {counts}.")
    for problem in problems:
        print(f"\n{problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
