"""Show how far a long loop is: a bar in a terminal, a line every few seconds anywhere else."""

import sys
import time
from types import TracebackType
from typing import Any

SECONDS = 5.0  # between two lines where there is no terminal


class Progress:
    """The progress of one loop.

    >>> with Progress("first pass", 2, "batches") as progress:
    ...     for _ in range(2):
    ...         progress.advance()
    first pass: 2 of 2 batches in 0 s

    Args:
        what: What is done.
        total: How many steps it takes.
        unit: What a step is, in the plural.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self.bar: Any = None
        if sys.stdout.isatty():
            from rich.progress import Progress as Bar

            self.bar = Bar()
            self.task = self.bar.add_task(what, total=total)

    def __enter__(self) -> "Progress":
        self.began = self.told = time.perf_counter()
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif kind is None:
            self._tell()

    def advance(self, steps: int = 1) -> None:
        """Note that some steps are done."""
        self.done += steps
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done)
        elif self.done < self.total and time.perf_counter() - self.told >= SECONDS:
            self._tell()

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        if self.bar is not None:
            self.bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def _tell(self) -> None:
        self.told = time.perf_counter()
        took = self.told - self.began
        print(f"{self.what}: {self.done} of {self.total} {self.unit} in {took:.0f} s", flush=True)
