"""Writes the picture beside this file: ``python -m docs.pictures.map_batches``.

On the left are the examples of a `map`; on the right the batches that they run in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bucketjit.strategies import Pow2
from docs.pictures.drawing import DATA, PADDING, box, document, legend, line, text

LENGTHS = (3, 12, 7, 5, 30, 12, 1)
FILE = Path(__file__).with_suffix(".svg")

UNIT, BAR, STEP = 8, 16, 22  # pixels of one token, of a row, and from one row to the next
LEFT, RIGHT, TOP = 44, 440, 62


def _batches() -> dict[int, list[int]]:
    """The examples of each bucket, by their positions in the list."""
    bucket = Pow2(min=8).bucket
    return {
        size: [i for i, n in enumerate(LENGTHS) if bucket(n) == size]
        for size in sorted({bucket(n) for n in LENGTHS})
    }


def _parts() -> Iterator[str]:
    yield text(LEFT, 24, "the examples", 15, "bold")
    yield text(LEFT, 44, "each of its own length", 13)
    yield text(RIGHT, 24, "the batches", 15, "bold")
    yield text(RIGHT, 44, "each row masked by its own length", 13)
    for i, n in enumerate(LENGTHS):
        y = TOP + STEP * i
        yield text(LEFT - 10, y + 13, i, 13, anchor="end")
        yield box(LEFT, y, UNIT * n, BAR, DATA)
        yield text(LEFT + UNIT * n + 6, y + 13, n, 12)
    y = TOP
    for size, members in _batches().items():
        for i in members:
            n = LENGTHS[i]
            yield text(RIGHT - 10, y + 13, i, 13, anchor="end")
            yield box(RIGHT, y, UNIT * n, BAR, DATA)
            yield box(RIGHT + UNIT * n, y, UNIT * (size - n), BAR, PADDING)
            y += STEP
        shape = f"{len(members)} x {size}"
        right = RIGHT + UNIT * size
        yield text(right + 8, y - STEP * len(members) / 2 + 2, shape, 13)
        yield line(RIGHT, y + 2, RIGHT + UNIT * 32 + 50, y + 2, "2 4")
        y += 8
    yield text(RIGHT, y + 14, "The results come in the order of the examples.")
    yield from legend(LEFT, y + 14, 70, (DATA, "tokens"), (PADDING, "padding"))


def picture() -> str:
    """The text of the SVG file."""
    batches = " and ".join(f"{len(m)} of length {size}" for size, m in _batches().items())
    title = f"{len(LENGTHS)} examples of different lengths run in batches: {batches}"
    return document(800, 270, title, _parts())


if __name__ == "__main__":
    FILE.write_text(picture())
