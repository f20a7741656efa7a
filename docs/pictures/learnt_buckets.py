"""Writes the picture beside this file: ``python -m docs.pictures.learnt_buckets``.

The sizes of a stream of calls, and the buckets that are learnt from them, over time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from bucketjit._runtime.learning.learner import Learner
from bucketjit.strategies import Auto
from docs.pictures.drawing import DATA, GOOD, PADDING, document, line, text

FILE = Path(__file__).with_suffix(".svg")

CALLS = 180
COMPILE_SECONDS, SECONDS_OF_ONE = 0.5, 2e-4  # what a compile costs, and a call by its size
LEFT, FLOOR, STEP, UNIT = 52, 252, 3.6, 1.6  # pixels of one call, and of one row


def _sizes() -> list[int]:
    """Sizes of calls: most are near each other, and some are larger."""
    draw = random.Random(4).random
    return [int(20 + 20 * draw() + (60 * draw() if draw() < 0.3 else 0)) for _ in range(CALLS)]


def _learn(sizes: list[int]) -> tuple[list[int], dict[int, int]]:
    """The bucket of each call, and the call that each bucket was compiled for."""
    learner = Learner(20, lambda bucket: tuple(map(Auto().bucket, bucket)))
    used, since = [], {}
    for i, n in enumerate(sizes):
        bucket = learner.bucket((n,))
        if not learner.has(bucket):
            learner.compiled(bucket, COMPILE_SECONDS)
            since[bucket[0]] = i
        if learner.wants_seconds(bucket):
            learner.ran(bucket, SECONDS_OF_ONE * bucket[0])
        learner.count((n,))
        if learner.is_due:
            learner.look()
        used.append(bucket[0])
    return used, since


def _bars(heights: list[int], colour: str) -> str:
    bars = (
        f"M{LEFT + STEP * i:g} {FLOOR}v{-UNIT * n:g}h3v{UNIT * n:g}" for i, n in enumerate(heights)
    )
    return f'<path d="{"".join(bars)}" fill="{colour}"/>'


def _parts(sizes: list[int], used: list[int], since: dict[int, int]) -> Iterator[str]:
    yield text(LEFT, 24, "calls of a stream, and the buckets that they run in", 15, "bold")
    yield _bars(used, PADDING)
    yield _bars(sizes, DATA)  # over the padding
    end = LEFT + STEP * CALLS
    for bucket, first in since.items():
        x, y = LEFT + STEP * first, FLOOR - UNIT * bucket
        yield line(x, y, end, y, "5 3", 1.4)
        yield f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{GOOD}"/>'
        yield text(end + 6, y + 4, bucket, 13)
    yield line(LEFT, FLOOR, end, FLOOR)
    yield text(LEFT - 8, FLOOR + 4, 0, 13, anchor="end")
    yield text(LEFT, FLOOR + 22, f"{CALLS} calls, one after the other", 13)
    words = (DATA, "data"), (PADDING, "padding"), (GOOD, "a bucket is compiled")
    for x, (colour, what) in zip((396, 466, 558), words, strict=True):
        yield f'<circle cx="{x}" cy="{FLOOR + 18}" r="5" fill="{colour}"/>'
        yield text(x + 12, FLOOR + 22, what, 13)


def picture() -> str:
    """The text of the SVG file."""
    sizes = _sizes()
    used, since = _learn(sizes)
    learnt = ", ".join(f"{bucket} from call {first + 1}" for bucket, first in since.items())
    title = f"{CALLS} calls of {len(set(sizes))} sizes need {len(since)} buckets: {learnt}"
    return document(800, 290, title, _parts(sizes, used, since))


if __name__ == "__main__":
    FILE.write_text(picture())
