"""What happens to an executor, told as it happens: to log lines and to whoever asked.

One line a compile, eviction, fallback and new signature, by the logger ``bucketjit``. Calls are
not events: they are counted, see `bucketjit.Stats`.

Text that others wrote is made safe where it leaves the process: in log lines, warnings, metrics,
tables and HTML. Messages of exceptions, and names of functions, arguments and files, may hold lone
surrogates, which UTF-8 cannot encode, control characters, which a terminal obeys, and any number of
characters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

logger = logging.getLogger("bucketjit")

LONGEST = 2000  # characters of an event's detail and of a warning
LONGEST_LABEL = 500  # characters: monitoring systems take labels of 2,048 bytes, 4 a character
_CUT = " ... "


@dataclass(frozen=True)
class Event:
    """Something that happened to an executor.

    The text that listeners get is printable: control characters and lone surrogates are escapes.

    Attributes:
        kind: ``"compile"``, ``"evict"``, ``"fallback"``, ``"signature"`` (the function was traced
            for a new signature, or with other axes open), ``"stand-in"`` (a call is served by a
            larger bucket while its own compiles), ``"budget"`` (a compile beyond what is allowed),
            ``"plan"`` (an adaptive strategy has changed its buckets), ``"ahead"`` (a plan, or some
            of it, was not compiled with its first call, and why), ``"process"`` (what compiles
            in the background is not compiled by another process, and why), ``"error"`` (a compile
            in the background failed), ``"load"`` (an executable was read from a file), ``"stale"``
            (a file was made for another version, program or machine), ``"damaged"``,
            ``"distrusted"``, ``"unreadable"`` or ``"unwritable"`` (a file cannot be used, and
            why), or ``"unstored"`` (an executable is not kept in a file).
        name: Name of the function.
        sizes: Size of each dimension variable: of the bucket, or of the call.
        seconds: What it took; 0 where that is not measured.
        detail: The reason, in words, of at most 2,000 characters; may be empty.

    Examples:
        >>> print(Event("compile", "train_step", {"b": 64}, 0.25))
        train_step: compile b=64 in 0.25 s
    """

    kind: str
    name: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        sizes = shown(self.sizes)
        took = f" in {self.seconds:.3g} s" if self.seconds else ""
        why = f": {self.detail}" if self.detail else ""
        line = f"{self.name}: {self.kind}{' ' + sizes if sizes else ''}{took}{why}"
        return one_line(line)


def shown(sizes: Mapping[str, int]) -> str:
    """Sizes by dimension variable, as messages write them: ``"b=8, s=64"``."""
    return ", ".join(f"{v}={n}" for v, n in sizes.items())


Listener = Callable[[Event], object]

_LEVELS = {
    **dict.fromkeys(("fallback", "budget"), logging.WARNING),
    **dict.fromkeys(("damaged", "distrusted", "unreadable", "unwritable"), logging.WARNING),
    "error": logging.ERROR,
}


def emit(event: Event, listeners: Sequence[Listener]) -> None:
    """Log an event, and hand it to the listeners.

    A listener that raises is logged and the call goes on: who watches must not break what it
    watches.
    """
    event = replace(
        event,
        name=printable(event.name),
        sizes={printable(v): n for v, n in event.sizes.items()},
        detail=printable(event.detail, LONGEST),
    )
    logger.log(_LEVELS.get(event.kind, logging.INFO), "%s", event)
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            logger.exception("a listener failed for %s", event)


def printable(text: str, most: int | None = None) -> str:
    r"""Text in which each character that cannot be shown is written as its escape.

    Line ends stay.

    Args:
        text: Any text.
        most: The most characters of the result, which lacks the middle of a longer text; None
            for no bound.

    >>> print(printable("red \x1b[31m, half \ud800"))
    red \x1b[31m, half \ud800
    >>> printable("a long text", 9)
    'a l ... t'
    """
    text = _cut(text, most)
    if text.isprintable():
        return text
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return _cut(shown, most)


def one_line(text: str, most: int | None = None) -> str:
    """The same, with a single space for each run of spaces and line ends."""
    return printable(" ".join(_cut(text, most).split()), most)


def _cut(text: str, most: int | None) -> str:
    """A text without its middle: it begins with what it is about, and often ends with a line."""
    if most is None or len(text) <= most:
        return text
    kept = most - len(_CUT)
    end = kept // 3
    return text[: kept - end] + _CUT + text[len(text) - end :]
