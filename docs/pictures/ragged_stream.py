"""Writes the picture beside this file: ``python -m docs.pictures.ragged_stream``.

On the left are the sizes of some calls; on the right the same calls in the buckets of `Pow2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bucketjit.strategies import Pow2
from docs.pictures.drawing import DATA, PADDING, box, document, legend, line, text

SIZES = (7, 12, 3, 26, 9, 14, 5, 31, 11, 6, 18, 13, 8, 22, 10, 4, 29, 15, 7, 12, 24, 5, 16, 20)
FILE = Path(__file__).with_suffix(".svg")

FLOOR = 232  # y of the foot of all bars
UNIT = 5.5  # pixels of one row of a call
BAR, STEP = 9, 14  # width of a bar, and from one bar to the next
LEFT, RIGHT = 34, 438  # x of the first bar on either side


def _bar(x: float, rows: int, foot: int, colour: str) -> str:
    """A bar of so many rows that stands on another one of ``foot`` rows."""
    return box(x, FLOOR - UNIT * (foot + rows), BAR, UNIT * rows, colour)


def _parts(buckets: list[int], different: int) -> Iterator[str]:
    bucket, span = Pow2().bucket, STEP * len(SIZES)
    yield text(LEFT, 28, "jax.jit", 16, "bold")
    yield text(RIGHT, 28, "bucketjit", 16, "bold")
    for size in buckets:
        y = FLOOR - UNIT * size
        yield line(RIGHT - 6, y, RIGHT + span, y, "3 3")
        yield text(RIGHT - 10, y + 4, size, 12, anchor="end")
    for i, n in enumerate(SIZES):
        yield _bar(LEFT + STEP * i, n, 0, DATA)
        yield _bar(RIGHT + STEP * i, n, 0, DATA)
        if padding := bucket(n) - n:
            yield _bar(RIGHT + STEP * i, padding, n, PADDING)
    for x in (LEFT, RIGHT):
        yield line(x - 6, FLOOR, x + span, FLOOR)
    yield text(LEFT, 256, f"{len(SIZES)} calls of {different} sizes: {different} compiles")
    yield text(RIGHT, 256, f"the same calls in {len(buckets)} buckets: {len(buckets)} compiles")
    yield from legend(RIGHT, 283, 70, (DATA, "data"), (PADDING, "padding, masked"))


def picture() -> str:
    """The text of the SVG file."""
    buckets, different = sorted({Pow2().bucket(n) for n in SIZES}), len(set(SIZES))
    title = f"{len(SIZES)} calls have {different} sizes and need {len(buckets)} buckets"
    return document(800, 300, title, _parts(buckets, different))


if __name__ == "__main__":
    FILE.write_text(picture())
