"""Writes the picture beside this file: ``python -m docs.pictures.background_compile``.

Calls that wait for their compiles, beside calls that a larger bucket serves meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bucketjit.strategies import Boundaries
from docs.pictures.drawing import DATA, GOOD, PADDING, box, document, legend, line, text

FILE = Path(__file__).with_suffix(".svg")

SIZES = (12, 9, 30, 14, 25, 11, 28, 13, 31, 10)
ARRIVALS = range(0, 600, 60)
BUCKETS = (16, 32, 64)
COMPILE = 130  # pixels of a compile; a call takes half a pixel for each row of its bucket
LEFT, BAR = 140, 24


def _waiting() -> Iterator[tuple[float, float, float]]:
    """When each call begins to compile, to run, and ends, if it compiles for its own size."""
    free = 0.0
    for arrival, n in zip(ARRIVALS, SIZES, strict=True):
        start = max(arrival, free)
        free = start + COMPILE + n / 2
        yield start, start + COMPILE, free


def _beside() -> tuple[list[tuple[float, int]], dict[int, float]]:
    """The bucket of each call, and when the compile of each bucket begins; the largest is there."""
    bucket = Boundaries(BUCKETS).bucket
    calls, begins, free = [], {}, 0.0
    for arrival, n in zip(ARRIVALS, SIZES, strict=True):
        own = bucket(n)
        if own not in begins:
            begins[own] = max(arrival, free)
            free = begins[own] + COMPILE
        ready = [b for b in begins if begins[b] + COMPILE <= arrival and b >= n]
        calls.append((arrival, min([*ready, max(BUCKETS)])))
    return calls, begins


def _compile(x: float, y: float, words: str) -> Iterator[str]:
    yield box(x, y, COMPILE, BAR, PADDING)
    yield text(x + COMPILE / 2, y + 17, words, 13, "bold", "middle", "#ffffff")


def _parts() -> Iterator[str]:
    end = 780
    yield text(16, 24, "jax.jit", 15, "bold")
    yield text(16, 70, "calls")
    for arrival, n, (start, run, stop) in zip(ARRIVALS, SIZES, _waiting(), strict=True):
        yield text(LEFT + arrival, 44, n, 13, "bold")
        yield line(LEFT + arrival, 48, LEFT + arrival, 54)
        if LEFT + stop < end:
            yield from _compile(LEFT + start, 54, f"compiles {n}")
            yield box(LEFT + run, 54, stop - run, BAR, GOOD)
    yield text(LEFT, 98, "Each new size waits for a compile, and for the calls before it.", 13)
    yield line(16, 114, end, 114, "2 4")
    yield text(16, 138, "with_background_compile()", 15, "bold")
    yield text(16, 184, "calls")
    yield text(16, 224, "a thread beside")
    calls, begins = _beside()
    for (arrival, bucket), n in zip(calls, SIZES, strict=True):
        yield text(LEFT + arrival, 158, n, 13, "bold")
        yield line(LEFT + arrival, 162, LEFT + arrival, 168)
        yield box(LEFT + arrival, 168, bucket / 2, BAR, DATA if bucket == 64 else GOOD)
    for bucket, start in begins.items():
        yield from _compile(LEFT + start, 208, f"compiles {bucket}")
    yield text(LEFT, 252, "The bucket of 64 serves every call until a smaller one is ready.", 13)
    entries = (GOOD, "runs in its own size or bucket"), (DATA, "runs in the bucket of 64")
    yield from legend(LEFT, 282, 260, *entries)


def picture() -> str:
    """The text of the SVG file."""
    title = (
        "Under jax.jit each call of a new size waits for a compile. With background compiles the "
        "bucket of 64 serves calls at once, while a thread compiles the buckets of 16 and 32."
    )
    return document(800, 300, title, _parts())


if __name__ == "__main__":
    FILE.write_text(picture())
