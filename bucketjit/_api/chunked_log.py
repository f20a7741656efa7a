"""Turns the sizes of past calls into those that a plan is fitted to, if calls are cut into chunks.

It serves `BucketedExec.with_fitted_plan`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bucketjit._config import is_positive_int
from bucketjit.errors import SpecError
from bucketjit.strategies._search.histogram import Sizes, joint_histogram


class ChunkedLog(NamedTuple):
    """The sizes to fit a plan to.

    Attributes:
        sizes: Sizes of each variable that is not cut, one for each chunk of a call: the i-th sizes
            of all variables are one chunk. If nothing is cut, the sizes as the user gave them.
        chunks: Size of the chunks of each variable that is cut.
        together: For each variable that is cut, the number of chunks of a call, averaged over all
            chunks: what a chunk has on average beside it, itself included.
    """

    sizes: Mapping[str, Any]
    chunks: Mapping[str, int]
    together: Mapping[str, float]


def chunked_log(sizes: Mapping[str, Sizes], split: str | Mapping[str, int] | None) -> ChunkedLog:
    """Read a log of sizes.

    Args:
        sizes: Sizes of past calls by dimension variable; the i-th sizes of all variables are one
            call.
        split: A variable that is cut into chunks of 1, or a dict of it to the size of the chunks.

    Returns:
        The sizes to fit a plan to.

    Raises:
        SpecError: ``sizes`` is no dict of a variable to sizes, or has different numbers of them; or
            ``split`` is malformed or has a variable without sizes.
    """
    if not isinstance(sizes, Mapping) or not sizes:
        raise SpecError(
            f"sizes must be a dict such as {{'batch': [3, 5, 8]}}, got {reprlib.repr(sizes)}"
        )
    left: Any = {
        dim: list(values)
        if isinstance(values, Iterable) and not isinstance(values, Mapping)
        else values
        for dim, values in sizes.items()
    }
    try:
        joint_histogram(left)
    except (TypeError, ValueError) as error:
        raise SpecError(f"with_fitted_plan: {error}") from None
    chunks = _chunks_of(split)
    if not chunks:
        return ChunkedLog(left, {}, {})
    left = _calls_to_cut(left, chunks)
    together = {dim: _chunks_together(left[dim], chunk) for dim, chunk in chunks.items()}
    for dim, chunk in chunks.items():
        left = _in_chunks(left, dim, chunk)
    return ChunkedLog(left, chunks, together)


def _chunks_of(split: str | Mapping[str, int] | None) -> Mapping[str, int]:
    chunks = {split: 1} if isinstance(split, str) else {} if split is None else split
    if not isinstance(chunks, Mapping):
        raise SpecError(
            f"split must be a variable such as 'b', or a dict such as {{'b': 2}}, got {split!r}"
        )
    for dim, chunk in chunks.items():
        if not is_positive_int(chunk):
            raise SpecError(f"split[{dim!r}] must be a positive int, got {chunk!r}")
    return {dim: int(chunk) for dim, chunk in chunks.items()}


def _calls_to_cut(sizes: Mapping[str, Any], chunks: Mapping[str, int]) -> dict[str, list[int]]:
    """The sizes of the calls that are cut: those with a size of 0 run exact, and are left out."""
    for dim in chunks:
        if dim not in sizes:
            raise SpecError(f"split: there are no sizes of {dim!r}, only of {', '.join(sizes)}")
        if isinstance(sizes[dim], Mapping):
            raise SpecError(f"split: sizes of {dim!r} must be those of each call, not counts")
    calls = [call for call in zip(*sizes.values(), strict=True) if all(n > 0 for n in call)]
    return {
        dim: [int(n) for n in column]
        for dim, column in zip(sizes, zip(*calls, strict=True), strict=True)
    }


def _chunks_together(cut: list[int], chunk: int) -> float:
    counts = [-(-n // chunk) for n in cut]
    # A call of c chunks is counted c times with c chunks each, so long calls weigh more.
    return sum(n * n for n in counts) / sum(counts)


def _in_chunks(sizes: Mapping[str, list[int]], dim: str, chunk: int) -> dict[str, list[int]]:
    """The sizes of the other variables, repeated for each chunk of a call."""
    cut = sizes[dim]
    others = {name: values for name, values in sizes.items() if name != dim}
    return {
        name: [n for n, rows in zip(values, cut, strict=True) for _ in range(-(-rows // chunk))]
        for name, values in others.items()
    }
