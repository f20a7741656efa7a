"""Non-maximum suppression: pick the objects of an image among overlapping boxes, and measure them.

    python examples/detect_and_measure.py
    python examples/detect_and_measure.py --images 100

A detector proposes up to 300 boxes for an image, several for each object. `detect` drops those with
a low score, sorts the rest, drops each box that overlaps a better one, and returns what is left and
its mean area. How many boxes are left is known only when that has run, twice over, so `jax.jit`
refuses the function. There are three ways to run it:

* *eager JAX*: operation by operation, each compiled for each number of boxes that it meets;
* *fixed size*: padding, `size=` and masks by hand, which is another function, `detect_padded`;
* *bucketjit*: `bucketjit.jit(detect)`, the function as it is.

The script runs all images in each way, and once more. It prints the lines of code of each way,
without comments and docstrings, what XLA compiled, and the time. It checks, and exits with status 1
if a check fails, that the three agree on every image, and that bucketjit compiled once per bucket.

An image without boxes has a program of its own, in which that axis has size 0.
"""

import argparse
import ast
import inspect
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compile_counter import CompileCounter
from jax import lax

import bucketjit
from bucketjit import BucketedExec, strategies

LARGEST = 300  # boxes
SMALLEST_BUCKET = 32
LEAST_SCORE = 0.3
MOST_OVERLAP = 0.5  # intersection over union
TOLERANCE = 1e-5  # of mean areas, relative

Image = tuple[np.ndarray, np.ndarray]  # boxes (left, top, right, bottom) and their scores
Found = tuple[Any, Any, Any]  # boxes, their scores, and their mean area


# --- What all ways share --------------------------------------------------------------------------


def areas(boxes: jax.Array) -> jax.Array:
    """The area of each box."""
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def overlaps(boxes: jax.Array) -> jax.Array:
    """Intersection over union, of each box with each."""
    start = jnp.maximum(boxes[:, None, :2], boxes[None, :, :2])
    end = jnp.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = jnp.prod(jnp.maximum(end - start, 0), axis=-1)
    each = areas(boxes)
    return shared / (each[:, None] + each - shared)


# --- Plain JAX, for eager JAX and for bucketjit ---------------------------------------------------


def detect(boxes: jax.Array, scores: jax.Array) -> Found:
    """The objects among the boxes of an image, the surest first, and their mean area."""
    sure = scores > LEAST_SCORE
    boxes, scores = boxes[sure], scores[sure]
    order = jnp.argsort(-scores)
    boxes, scores = boxes[order], scores[order]
    positions = jnp.arange(scores.shape[0])
    rivals = (overlaps(boxes) > MOST_OVERLAP) & (positions < positions[:, None])

    def visit(kept: jax.Array, box: Any) -> Any:
        position, better = box
        is_kept = ~jnp.any(kept & better)
        return kept | ((positions == position) & is_kept), is_kept

    _, keep = lax.scan(visit, jnp.zeros(scores.shape[0], bool), (positions, rivals))
    boxes, scores = boxes[keep], scores[keep]
    return boxes, scores, areas(boxes).mean()


def with_bucketjit() -> BucketedExec:
    """The same function, in buckets of the number of boxes."""
    buckets = strategies.Pow2(min=SMALLEST_BUCKET)
    return bucketjit.jit(detect, dynamic_axes=("b, _", "b"), buckets=buckets, fallback="error")


# --- Fixed sizes, by hand -------------------------------------------------------------------------


@jax.jit
def detect_padded(boxes: jax.Array, scores: jax.Array, n: jax.Array) -> Any:
    """`detect` at a fixed size, of which the first `n` boxes are real.

    Returns boxes and scores, padded, the mean area, and how many are real.
    """
    size = scores.shape[0]
    positions = jnp.arange(size)
    sure = (scores > LEAST_SCORE) & (positions < n)
    order = jnp.argsort(jnp.where(sure, -scores, jnp.inf))  # the others last
    boxes, scores, sure = boxes[order], scores[order], sure[order]
    rivals = (overlaps(boxes) > MOST_OVERLAP) & (positions < positions[:, None])

    def visit(kept: jax.Array, box: Any) -> Any:
        position, better, is_sure = box
        is_kept = is_sure & ~jnp.any(kept & better)
        return kept | ((positions == position) & is_kept), is_kept

    _, keep = lax.scan(visit, jnp.zeros(size, bool), (positions, rivals, sure))
    count = keep.sum()
    (kept,) = jnp.nonzero(keep, size=size, fill_value=0)
    boxes, scores = boxes[kept], scores[kept]
    mean = jnp.where(positions < count, areas(boxes), 0).sum() / count
    return boxes, scores, mean, count


def detect_by_hand(boxes: np.ndarray, scores: np.ndarray) -> Found:
    """Pad the boxes to a power of two, and cut the results."""
    n = len(scores)
    size = max(SMALLEST_BUCKET, 1 << (n - 1).bit_length())
    padded_boxes = np.zeros((size, 4), boxes.dtype)
    padded_boxes[:n] = boxes
    padded_scores = np.zeros(size, scores.dtype)
    padded_scores[:n] = scores
    found, sureness, mean, count = detect_padded(padded_boxes, padded_scores, np.int32(n))
    # On the host: a slice by JAX would be compiled for each count.
    found, sureness = np.asarray(found), np.asarray(sureness)
    return jax.device_put(found[: int(count)]), jax.device_put(sureness[: int(count)]), mean


# --- The images -----------------------------------------------------------------------------------


def draw_images(count: int, seed: int) -> list[Image]:
    """What a detector might propose for some images: 0 to 300 boxes, about six for an object.

    The first image has no box, the second one has 300.
    """
    rng = np.random.default_rng(seed)
    sizes = [0, LARGEST, *rng.integers(0, LARGEST + 1, count).tolist()][:count]
    return [_draw_image(rng, n) for n in sizes]


def _draw_image(rng: np.random.Generator, n: int) -> Image:
    corners = rng.uniform(0, 1000, (1 + n // 6, 2))
    extents = rng.uniform(50, 150, corners.shape)
    objects = rng.integers(0, len(corners), n)
    start = corners[objects] + rng.normal(0, 5, (n, 2))
    end = start + extents[objects] + rng.normal(0, 5, (n, 2))
    return np.concatenate([start, end], 1).astype(np.float32), rng.random(n, np.float32)


# --- The comparison -------------------------------------------------------------------------------


@dataclass
class Run:
    """What one way took, and what it found.

    Attributes:
        results: What was found in each image.
        compiles: How much was compiled for each image, the first time.
        seconds: All images, the first time and the second.
    """

    results: list[Found] = field(default_factory=list)
    compiles: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def run(way: Callable[..., Found], images: list[Image], counter: CompileCounter) -> Run:
    """Run all images, twice."""
    measured = Run()
    for _ in range(2):
        began = time.perf_counter()
        measured.results.clear()
        for image in images:
            before = counter.compiles
            measured.results.append(jax.block_until_ready(way(*image)))
            measured.compiles.append(counter.compiles - before)
        measured.seconds.append(time.perf_counter() - began)
    del measured.compiles[len(images) :]
    return measured


def eagerly(boxes: np.ndarray, scores: np.ndarray) -> Found:
    """Run the plain function, operation by operation."""
    return detect(jnp.asarray(boxes), jnp.asarray(scores))


def lines_of_code(*functions: Callable[..., Any]) -> int:
    """The lines of functions without comments, docstrings and empty lines."""
    count = 0
    for function in functions:
        lines = textwrap.dedent(inspect.getsource(inspect.unwrap(function))).splitlines()
        (definition,) = ast.parse("\n".join(lines)).body
        assert isinstance(definition, ast.FunctionDef)
        first = definition.body[0]
        is_documented = ast.get_docstring(definition) is not None
        documentation = range(first.lineno, first.end_lineno + 1) if is_documented else ()
        count += sum(
            number not in documentation and bool(line.strip()) and line.strip()[0] != "#"
            for number, line in enumerate(lines, 1)
        )
    return count


def first_difference(ours: Run, exact: Run) -> str:
    """What differs from the exact run, or ``""``: boxes and scores to the bit, areas nearly."""
    for i, (a, b) in enumerate(zip(ours.results, exact.results, strict=True)):
        for what, one, other in zip(("boxes", "scores"), a, b, strict=False):
            if not np.array_equal(one, other):
                return f"image {i}: other {what}, of shapes {one.shape} and {other.shape}"
        if not np.isclose(a[2], b[2], rtol=TOLERANCE, atol=0, equal_nan=True):
            return f"image {i}: mean areas {float(a[2])} and {float(b[2])}"
    return ""


def demonstrate(images: list[Image]) -> bool:
    """Run all ways, print what they took, and check them."""
    counter, executor = CompileCounter(), with_bucketjit()
    ways: dict[str, tuple[Callable[..., Found], tuple[Callable[..., Any], ...]]] = {
        "bucketjit": (executor, (detect, with_bucketjit)),
        "fixed size": (detect_by_hand, (detect_padded, detect_by_hand)),
        "eager JAX": (eagerly, (detect,)),
    }
    runs = {name: run(way, images, counter) for name, (way, _) in ways.items()}
    empty = [len(scores) == 0 for _, scores in images]
    boxes = sum(len(scores) for _, scores in images)
    kept = sum(len(scores) for _, scores, _ in runs["eager JAX"].results)
    print(f"{len(images)} images, {sum(empty)} of them without boxes;", end=" ")
    print(f"{kept} of {boxes} boxes kept\n")
    print(f"{'':<12}{'lines':>6}{'compiles':>10}{'first pass':>14}{'second pass':>14}")
    for name, taken in reversed(runs.items()):
        first, second = taken.seconds
        lines, compiles = lines_of_code(*ways[name][1]), sum(taken.compiles)
        print(f"{name:<12}{lines:>6}{compiles:>10}{first:>12.2f} s{second:>12.3f} s")

    compiles, buckets = sum(runs["bucketjit"].compiles), executor.cache_size()
    print()
    checks = [(compiles == buckets, f"{compiles} compiles for {buckets} buckets")]
    for name in ("fixed size", "bucketjit"):
        problem = first_difference(runs[name], runs["eager JAX"])
        checks.append((not problem, f"{name}: {problem or 'what eager JAX finds'}"))
    for passed, message in checks:
        print(f"{'ok' if passed else 'FAILED':<7}{message}")
    return all(passed for passed, _ in checks)


def main(argv: list[str] | None = None) -> int:
    """Compare the three ways on some images."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=24, help="default: 24")
    parser.add_argument("--seed", type=int, default=0, help="seed of the boxes (default: 0)")
    options = parser.parse_args(argv)
    return 0 if demonstrate(draw_images(options.images, options.seed)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
