"""Shows on standard error how far a warm-up is."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from bucketjit._compile.requests import CompileRequest, Source
from bucketjit._events import one_line, printable, shown
from bucketjit._inspect.progress import Unbreakable, bar
from bucketjit.errors import MaskingError


@contextlib.contextmanager
def progress_of(name: str, total: int, wanted: bool) -> Iterator[Any]:
    """Show on standard error how far a warm-up is: a bar in a terminal, lines elsewhere."""
    stream = sys.stderr
    if not wanted or not total or stream is None:  # pythonw and daemons have no standard error
        yield lambda request, outcome: None
        return
    done, told, name = itertools.count(1), Unbreakable(stream), one_line(name)

    def line(request: CompileRequest, outcome: Source | Exception) -> None:
        what = "compiled"
        if isinstance(outcome, Exception):
            refused = isinstance(outcome, MaskingError) and not outcome.is_defect
            what = "cannot be masked, and runs exact:" if refused else "failed"
        print(
            f"{name}: {what} {printable(shown(request.sizes)) or 'exact'} ({next(done)}/{total})",
            file=told,
        )

    with bar(told, f"{name}: warm-up", total) as step:
        if step is None:
            yield line
        else:
            yield lambda request, outcome: step(shown(request.sizes) or "exact")
