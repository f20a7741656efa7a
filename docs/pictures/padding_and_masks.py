"""Writes the picture beside this file: ``python -m docs.pictures.padding_and_masks``.

A call of five rows in its bucket of eight, and what a maximum and a sum read of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bucketjit.strategies import Pow2
from docs.pictures.drawing import DATA, GOOD, PADDING, box, document, legend, line, text

ROWS = ((4, 1, 7), (2, 9, 3), (8, 5, 6), (1, 3, 2), (5, 7, 7))
FILE = Path(__file__).with_suffix(".svg")

WIDTH, HEIGHT = 34, 22  # of one number
TOP, FOOT = 62, 282  # y of the first rows, and of the results
LEFT, STEP = 24, 200  # x of the first table, and from one to the next


def _row(x: float, y: float, numbers: Sequence[object], colour: str) -> Iterator[str]:
    for i, number in enumerate(numbers):
        yield box(x + WIDTH * i, y, WIDTH, HEIGHT, colour)
        middle = x + WIDTH * (i + 0.5)
        yield text(middle, y + HEIGHT - 6, number, 14, "bold", "middle", "#ffffff")


def _parts(bucket: int) -> Iterator[str]:
    count, columns = len(ROWS), list(zip(*ROWS, strict=True))
    tables = (
        ("the call", f"{count} rows", None, None),
        ("in its bucket", f"{bucket} rows", "?", None),
        ("a maximum reads", "&#8722;&#8734; in the padding", "&#8722;&#8734;", max),
        ("a sum reads", "0 in the padding", "0", sum),
    )
    for i, (name, below, padding, reduce) in enumerate(tables):
        x = LEFT + STEP * i
        yield text(x, 24, name, 15, "bold")
        yield text(x, 46, below, 13)
        rows = [*((row, DATA) for row in ROWS), *[((padding,) * 3, PADDING)] * (bucket - count)]
        for j, (numbers, colour) in enumerate(rows if padding else rows[:count]):
            yield from _row(x, TOP + HEIGHT * j, numbers, colour)
        if reduce:
            yield line(x + WIDTH * 1.5, TOP + HEIGHT * bucket + 6, x + WIDTH * 1.5, FOOT - 6)
            yield from _row(x, FOOT, [reduce(column) for column in columns], GOOD)
    yield text(LEFT, FOOT + 8, "The results are those of the 5 rows,", 14)
    yield text(LEFT, FOOT + 28, f"and a mean divides by {count}, not by {bucket}.", 14)
    entries = (DATA, "data"), (PADDING, "padding"), (GOOD, "result")
    yield from legend(LEFT + 2 * STEP, FOOT + 46, 100, *entries)


def picture() -> str:
    """The text of the SVG file."""
    count, bucket = len(ROWS), Pow2().bucket(len(ROWS))
    title = (
        f"A call of {count} rows runs in a bucket of {bucket}. In the {bucket - count} rows of "
        "padding a maximum reads minus infinity and a sum reads 0, so both give its results."
    )
    return document(800, 340, title, _parts(bucket))


if __name__ == "__main__":
    FILE.write_text(picture())
