"""Run the benchmarks and write benchmarks/README.md.

    python -m benchmarks.table                   all sections; about an hour
    python -m benchmarks.table stream growth-calls --calls 1000000
    python -m benchmarks.table --page            write the page anew from what is kept
    python -m benchmarks.table --quick           see that all of them work; keeps nothing

What a section has measured is kept in benchmarks/results/, so that each can be run again alone. A
section that fails keeps what it had.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import (
    accelerator,
    auto,
    building,
    compilers,
    computed,
    dispatch,
    first_calls,
    generation,
    growth,
    importing,
    large,
    lean,
    masking,
    processes,
    ragged,
    saving,
    stalls,
    stream,
    training,
    waste,
)
from benchmarks.alone import ROOT
from benchmarks.sections import (
    RESULTS,
    NotHere,
    add_options,
    load,
    options_of,
    save,
    select,
)

SECTIONS = (
    *dispatch.SECTIONS,
    *stream.SECTIONS,
    *auto.SECTIONS,
    *stalls.SECTIONS,
    *training.SECTIONS,
    *generation.SECTIONS,
    *masking.SECTIONS,
    *large.SECTIONS,
    *lean.SECTIONS,
    *compilers.SECTIONS,
    *computed.SECTIONS,
    *waste.SECTIONS,
    *ragged.SECTIONS,
    *building.SECTIONS,
    *growth.SECTIONS,
    *importing.SECTIONS,
    *first_calls.SECTIONS,
    *saving.SECTIONS,
    *processes.SECTIONS,
    *accelerator.SECTIONS,
)
PAGE = ROOT / "benchmarks" / "README.md"

HEAD = """\
# Benchmarks

Written by `python -m benchmarks.table`; do not edit. `make bench` runs all of it, `make bench
ARGS="stream waste"` only some sections, `make bench-peers` first installs the peers of the stream
(PyTorch, onnxruntime, IREE, TensorFlow) into an environment of their own, and then runs the stream.

Machines are noisy: compare the rows of one table with each other, not with those of another day.
Where contenders can share a process they take turns, call by call, and the ratio is the median of
the ratios of neighbours. Times are medians.
"""


def page(folder: Path = RESULTS) -> str:
    """The page, made of what is kept."""
    parts = [HEAD]
    for section in SECTIONS:
        parts += [f"## {section.title}\n", f"{section.text}\n"]
        run = load(section, folder)
        if run is None:
            parts.append(f"`{section.name}`: not run yet.\n")
            continue
        parts += [
            section.tables(run["rows"]),
            f"`{run['command']}`, {run['when']}: {_described(run['environment'])}\n",
        ]
    return "\n".join(parts)


def _described(environment: dict[str, str]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in environment.items() if name != "machine")
    return f"{versions}; {environment['machine']}"


def main() -> None:
    """Run what the command line names, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    add_options(parser, SECTIONS)
    arguments = parser.parse_args()
    options = options_of(arguments)
    failed = []
    for section in () if arguments.page else select(parser, arguments, SECTIONS):
        began = time.monotonic()
        try:
            rows = section.run(options)
        except NotHere as reason:
            print(reason, file=sys.stderr)
            continue
        except RuntimeError as error:
            failed.append(section.name)
            print(error, file=sys.stderr)
            continue
        print(f"{section.name}: {time.monotonic() - began:.0f} s\n\n{section.tables(rows)}")
        if not options.quick:
            save(section, rows, options)
    if not options.quick:
        PAGE.write_text(page())
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
