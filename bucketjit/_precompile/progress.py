"""Shows on standard error how far a warm-up is."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import IO, Any

from bucketjit._compile.requests import CompileRequest, Source
from bucketjit._events import one_line, printable, shown
from bucketjit.errors import MaskingError


class _Unbreakable:
    """A stream that ignores errors of writing, such as a full disk: they must not end a warm-up."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def isatty(self) -> bool:
        try:
            return bool(self._stream.isatty())
        except (AttributeError, OSError, ValueError):
            return False

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


@contextlib.contextmanager
def progress_of(name: str, total: int, wanted: bool) -> Iterator[Any]:
    """Show on standard error how far a warm-up is: a bar in a terminal, lines elsewhere.

    Args:
        name: Name of the function.
        total: Number of buckets.
        wanted: False to show nothing.

    Yields:
        A function to call for each compile request that is done, with its outcome.
    """
    stream = sys.stderr
    if not wanted or not total or stream is None:  # pythonw and daemons have no standard error
        yield lambda request, outcome: None
        return
    done, told, name = itertools.count(1), _Unbreakable(stream), one_line(name)

    def line(request: CompileRequest, outcome: Source | Exception) -> None:
        what = "compiled"
        if isinstance(outcome, Exception):
            refused = isinstance(outcome, MaskingError) and not outcome.is_defect
            what = "cannot be masked, and runs exact:" if refused else "failed"
        print(
            f"{name}: {what} {printable(shown(request.sizes)) or 'exact'} ({next(done)}/{total})",
            file=told,
        )

    if not told.isatty():
        yield line
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield line
        return
    with tqdm(total=total, desc=f"{name}: warm-up", unit="bucket", file=told) as bar:

        def step(request: CompileRequest, outcome: Source | Exception) -> None:
            bar.set_postfix_str(printable(shown(request.sizes)) or "exact", refresh=False)
            bar.update()

        yield step
