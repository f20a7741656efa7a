"""Run the checks, then the short benchmarks, and keep what was found.

    python -m tests.accelerator                  all of it, in at most five minutes
    python -m tests.accelerator -k transfers     only the checks with this word in their name
    python -m tests.accelerator --any-device --results FOLDER     the benchmarks on a CPU as well

It runs in the Python that is there and installs nothing: `make accelerator` picks it by
ACCELERATOR_PYTHON. The exit status is not 0 if a check or a benchmark failed.
"""

import argparse
import faulthandler
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEEDED = ("jax", "jaxlib", "numpy", "cachetools")
# Shares of the time: what is not begun by then is left out, and named.
CORE_UNTIL, BENCHMARKS_UNTIL = 0.5, 0.8
VARIABLES = {
    # Other processes need memory of the GPU too, and what is in use shall say what is used.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # A GPU would round float32 to TF32, in one order with padding and in another without.
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names.

    Args:
        arguments: The command line; that of the process if None.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300, help="at most (default: %(default)s)")
    parser.add_argument("-k", metavar="WORD", help="only checks with it in their name")
    parser.add_argument("--any-device", action="store_true", help="the benchmarks on a CPU, too")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where results are kept")
    options = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{', '.join(missing)}: not importable by {sys.executable}; nothing is installed here."
            "\nName another interpreter (make accelerator ACCELERATOR_PYTHON=...), or a folder "
            "that has what is missing and nothing else, such as a copy of "
            ".venv/lib/python3*/site-packages/cachetools (PYTHONPATH=FOLDER make accelerator).",
            file=sys.stderr,
        )
        return 2
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    run = _Run(options)
    watchdog = threading.Timer(options.seconds, run.give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        return run()
    finally:
        watchdog.cancel()


class _Run:
    """One run: what is at work, and what was found.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.monotonic()
        self.at_work = "the import of JAX"
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def __call__(self) -> int:
        """Run all of it; returns the exit status."""
        import jax

        from tests.accelerator import on_device

        client = on_device.device().client
        device = (
            f"{on_device.device().device_kind} ({' '.join(client.platform_version.split())}), "
            f"jax {jax.__version__}, python {sys.version.split()[0]}"
        )
        print(device, flush=True)
        self.check()
        if self.options.k is None:
            if on_device.is_cpu() and not self.options.any_device:
                print("There is only a CPU: nothing is measured, and nothing is written.")
            else:
                self.measure(device, is_kept=not on_device.is_cpu())
        outcome = f"failed: {', '.join(self.failed)}" if self.failed else "nothing failed"
        print(f"{outcome}; {on_device.compiles()} compiles, {self.seconds():.0f} s")
        return 1 if self.failed else 0

    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began

    def give_up(self) -> None:
        """End the process: the time is over, and a compile cannot be interrupted."""
        faulthandler.dump_traceback(all_threads=True)
        late = f"failed: no end within {self.options.seconds:.0f} s, at work: {self.at_work}"
        print(late, file=sys.stderr, flush=True)
        os._exit(1)

    def check(self) -> None:
        """Run the checks, a line each."""
        from tests.accelerator.checks import CHECKS
        from tests.accelerator.on_device import NotShown, compiles

        compiles()
        for name, run in CHECKS.items():
            if self.options.k is not None and self.options.k not in name:
                continue
            self.at_work, began = name, time.monotonic()
            try:
                if name.startswith("core") and self.seconds() > CORE_UNTIL * self.options.seconds:
                    raise NotShown("no time left")
                outcome, note = "passed", run()
            except NotShown as reason:
                outcome, note = "skipped", str(reason)
            except Exception as error:
                lines = [line for line in str(error).splitlines() if line.strip()] or [""]
                outcome = "failed"
                note = f"{type(error).__name__}: {' / '.join(lines[:6])}"[:400]
                self.failed.append(name)
            seconds = time.monotonic() - began
            print(f"{outcome:8}{seconds:6.1f} s  {name}: {note}", flush=True)
            row = {"outcome": outcome, "seconds": seconds, "note": note}
            self.rows.append({"group": "checks", "way": name, **row})

    def measure(self, device: str, is_kept: bool) -> None:
        """Run the benchmarks. What there is is kept after each, on a CPU only where one asks."""
        from benchmarks import accelerator, table
        from benchmarks.sections import Options, save

        folder = self.options.results or (table.RESULTS if is_kept else None)
        until = self.began + BENCHMARKS_UNTIL * self.options.seconds
        for name, rows in accelerator.measured(accelerator.parts(), until):
            self.rows += rows
            self.failed += [name] if any(row.get("failed") for row in rows) else []
            print(f"{name}, after {self.seconds():.0f} s:\n\n{accelerator.SECTION.tables(rows)}")
            self.at_work = f"the benchmark after {name!r}"
            if folder is not None:
                save(accelerator.SECTION, self.rows, Options(), folder, device)
        if folder == table.RESULTS:
            table.PAGE.write_text(table.page())


if __name__ == "__main__":
    sys.exit(main())
