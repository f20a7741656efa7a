"""Batches of examples: how many rows an executable takes, its key in the cache, and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bucketjit._tracing.interface import Interface

_AXIS = "rows"  # how messages and statistics call the axis of the examples


@dataclass(frozen=True)
class Rows:
    """How many examples an executable takes, and what differs between them.

    Attributes:
        count: The number of examples.
        mapped: Positions of the leaves that each example has its own of. The others are shared.
        summed: Whether the executable returns the sum over the examples in place of each result.
        placement: How the rows are sharded over several devices; None if they are not.
    """

    count: int
    mapped: frozenset[int]
    summed: bool = False
    placement: Any = None


def rows_key(program: Interface, bucket: Mapping[str, int], rows: Rows) -> tuple[Interface, Any]:
    """The cache key of the executable of a batch.

    Args:
        program: The program.
        bucket: Padded size of each variable.
        rows: The number of examples, and what differs between them.
    """
    return program, (rows, *bucket.values())


def rows_sizes(bucket: Mapping[str, int], count: int) -> dict[str, int]:
    """The sizes of an executable of batches in messages and statistics.

    Args:
        bucket: Padded size of each variable.
        count: The number of examples.

    Returns:
        The sizes of the bucket after the number of examples, which is called ``rows``.
    """
    name = _AXIS
    while name in bucket:
        name += "_"
    return {name: count, **bucket}
