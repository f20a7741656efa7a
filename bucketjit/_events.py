"""Events of bucketed functions: lines of the logger ``bucketjit``, and calls of listeners.

Compiles, evictions, fallbacks and new signatures are events. Calls are not: they are counted, see
`bucketjit.types.Stats`.

`printable` makes text safe where it leaves the process: in log lines, warnings, metrics, tables and
HTML. Others write the messages of exceptions and the names of functions, arguments and files. These
may contain lone surrogates, which UTF-8 cannot encode, and control characters, which a terminal
obeys, and they may have any length.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bucketjit._raised import frames_inside

logger = logging.getLogger("bucketjit")
# Without a handler, `logging` prints to standard error what `warnings` tells there, too.
if not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
    logger.addHandler(logging.NullHandler())

LONGEST = 2000  # characters of an event's detail and of a warning
LONGEST_LABEL = 500  # characters: monitoring systems take labels of 2,048 bytes, 4 a character
_CUT = " ... "


@dataclass(frozen=True)
class Event:
    """Something that happened to a bucketed function.

    The text that listeners get is printable: control characters and lone surrogates are escapes.

    Attributes:
        kind: ``"compile"``, ``"evict"``, ``"fallback"``, ``"signature"`` (the function was traced
            for a new signature, or with other axes open), ``"stand-in"`` (a larger bucket serves a
            call while its own compiles), ``"budget"`` (a compile beyond the compile budget),
            ``"recompile"`` (a function compiles for each size, or beyond its buckets),
            ``"inlined"`` (a call inside ``jit``, ``vmap`` and the like), ``"ahead"`` (listed
            buckets were not compiled with the first call, and why), ``"error"`` (a compile in the
            background failed), ``"load"`` (an executable was read from a file), ``"damaged"``,
            ``"distrusted"``, ``"unreadable"`` or ``"unwritable"`` (a file cannot be used, and why),
            or ``"unstored"`` (an executable is not kept in a file, and why).
        name: Name of the function.
        sizes: Size of each dimension variable: of the bucket, or of the call.
        seconds: The time it took, in seconds; 0 if it is not measured.
        detail: The reason, a text of at most 2,000 characters; may be empty.

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
    """The text of sizes by dimension variable in messages: ``"b=8, s=64"``."""
    return ", ".join(f"{v}={n}" for v, n in sizes.items())


Listener = Callable[[Event], object]

_LEVELS = {
    **dict.fromkeys(("fallback", "budget", "recompile"), logging.WARNING),
    **dict.fromkeys(("damaged", "distrusted", "unreadable", "unwritable"), logging.WARNING),
    "error": logging.ERROR,
}


def emit(event: Event, listeners: Sequence[Listener]) -> None:
    """Log an event, and call the listeners with it.

    An exception of a listener is logged, and the call continues: a listener must not break it.
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


def warn(message: str, category: type[Warning]) -> None:
    """Warn, at the line of the user's code."""
    warnings.warn(printable(message, LONGEST), category, stacklevel=frames_inside())


def printable(text: str, most: int | None = None) -> str:
    """The text with each character that cannot be shown written as its escape; line ends stay."""
    text = _cut(text, most)  # before the loop over characters, which may be many
    if text.isprintable():
        return text
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return _cut(shown, most)  # escapes are longer than what they stand for


class Verbatim(str):
    """Text that is shown without quotes in what holds it."""

    __repr__ = str.__str__


def one_line(text: str, most: int | None = None) -> str:
    """`printable` text with a single space for each run of spaces and line ends."""
    return printable(" ".join(_cut(text, most).split()), most)


def counted(count: int, what: str) -> str:
    """A number with its noun, such as ``1 executable`` and ``2 executables``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _cut(text: str, most: int | None) -> str:
    """A text without its middle: its start says what it is about, its end often names a line."""
    if most is None or len(text) <= most:
        return text
    kept = most - len(_CUT)
    end = kept // 3
    return text[: kept - end] + _CUT + text[len(text) - end :]
