"""Shows on standard error how far something long is: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from bucketjit._events import one_line


class Unbreakable:
    """A stream that ignores errors of writing: a full disk must not end what is shown."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        try:
            return bool(self._stream.isatty())
        except (AttributeError, OSError, ValueError):
            return False

    def flush(self) -> None:
        """Flush the stream, if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


@contextlib.contextmanager
def bar(stream: Unbreakable, title: str, total: int) -> Iterator[Callable[[str], None] | None]:
    """Show a bar while something is done."""
    progress = _progress(stream) if stream.isatty() else None
    if progress is None:
        yield None
        return
    with progress:
        task = progress.add_task(one_line(title), total=total, note="")
        yield lambda note: progress.update(task, advance=1, note=one_line(note))


def _progress(stream: Unbreakable) -> Any:
    """The bar of rich; None if rich is not installed, or the terminal cannot move its cursor."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
    except ImportError:
        return None
    file: Any = stream
    console = Console(file=file, force_terminal=True)
    if console.is_dumb_terminal:
        return None
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Elapsed(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        # What others print goes where they print it.
        redirect_stdout=False,
        redirect_stderr=False,
    )
