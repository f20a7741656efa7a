"""Text that others wrote, made safe where it leaves: log lines, warnings, metrics, tables, HTML.

Messages of exceptions, and names of functions, arguments and files, may hold lone surrogates,
which UTF-8 cannot encode, control characters, which a terminal obeys, and any number of
characters.
"""

from __future__ import annotations

LONGEST = 2000  # characters of an event's detail and of a warning
LONGEST_LABEL = 500  # characters: monitoring systems take labels of 2,048 bytes, 4 a character
_CUT = " ... "


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
