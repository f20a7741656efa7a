"""Writes ``ragged_stream.svg`` beside this file: ``python -m docs.pictures.ragged_stream``.

On the left are the sizes of some calls; on the right the same calls in the buckets of `Pow2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bucketjit.strategies import Pow2

SIZES = (7, 12, 3, 26, 9, 14, 5, 31, 11, 6, 18, 13, 8, 22, 10, 4, 29, 15, 7, 12, 24, 5, 16, 20)
FILE = Path(__file__).with_suffix(".svg")

WIDTH, HEIGHT = 800, 300
FLOOR = 232  # y of the foot of all bars
UNIT = 5.5  # pixels of one row of a call
BAR, STEP = 9, 14  # width of a bar, and from one bar to the next
LEFT, RIGHT = 34, 438  # x of the first bar on either side

DATA, PADDING, LINE, TEXT = "#2f6fb2", "#e3c9a0", "#9aa3ad", "#24292f"


def _rectangle(x: float, rows: int, foot: int, colour: str) -> str:
    """A bar of so many rows that stands on another one of ``foot`` rows."""
    y = FLOOR - UNIT * (foot + rows)
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{BAR}" height="{UNIT * rows:g}" '
        f'fill="{colour}" stroke="{TEXT}" stroke-width="0.4"/>'
    )


def _text(x: float, y: float, text: str, size: int = 13, weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" '
        f'fill="{TEXT}">{text}</text>'
    )


def _lines() -> Iterator[str]:
    bucket = Pow2().bucket
    buckets = sorted({bucket(n) for n in SIZES})
    different = len(set(SIZES))
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif">'
    )
    yield (
        f"<title>{len(SIZES)} calls have {different} sizes and need {len(buckets)} buckets</title>"
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    yield _text(LEFT, 28, "jax.jit", 16, "bold")
    yield _text(RIGHT, 28, "bucketjit", 16, "bold")
    for i, n in enumerate(SIZES):
        yield _rectangle(LEFT + STEP * i, n, 0, DATA)
    span = STEP * len(SIZES)
    for size in buckets:
        y = FLOOR - UNIT * size
        yield (
            f'<line x1="{RIGHT - 6}" y1="{y:g}" x2="{RIGHT + span}" y2="{y:g}" '
            f'stroke="{LINE}" stroke-dasharray="3 3"/>'
        )
        yield _text(RIGHT - 26, y + 4, str(size), 12)
    for i, n in enumerate(SIZES):
        x, padding = RIGHT + STEP * i, bucket(n) - n
        yield _rectangle(x, n, 0, DATA)
        if padding:
            yield _rectangle(x, padding, n, PADDING)
    for x in (LEFT, RIGHT):
        yield (
            f'<line x1="{x - 6}" y1="{FLOOR}" x2="{x + span}" y2="{FLOOR}" '
            f'stroke="{TEXT}" stroke-width="1"/>'
        )
    yield _text(LEFT, 256, f"{len(SIZES)} calls of {different} sizes: {different} compiles")
    yield _text(RIGHT, 256, f"the same calls in {len(buckets)} buckets: {len(buckets)} compiles")
    for x, colour, what in ((RIGHT, DATA, "data"), (RIGHT + 70, PADDING, "padding, masked")):
        yield f'<rect x="{x}" y="272" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 18, 283, what, 12)
    yield "</svg>"


def picture() -> str:
    """The text of the SVG file."""
    return "\n".join(_lines()) + "\n"


if __name__ == "__main__":
    FILE.write_text(picture())
