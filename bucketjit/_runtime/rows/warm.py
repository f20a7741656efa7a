"""Which batches a warm-up compiles: the numbers of rows, and what differs between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bucketjit._compile.rows import Rows
from bucketjit._config import is_positive_int
from bucketjit._runtime.rows.examples import mapped_leaves
from bucketjit._runtime.rows.placement import placement_of, rows_sharding
from bucketjit._tracing.call import Call
from bucketjit._tracing.signer import Signer
from bucketjit.errors import SpecError


def rows_to_compile(
    signer: Signer,
    call: Call,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: object,
    in_axes: object,
) -> list[Rows]:
    """The batches that a warm-up asks for."""
    mapped = mapped_leaves(signer, call, args, kwargs, in_axes)
    sharding = rows_sharding(leaf for i, leaf in enumerate(call.leaves) if i not in mapped)
    return [
        Rows(count, mapped, placement=placement_of(sharding, count)) for count in row_counts(rows)
    ]


def row_counts(rows: object) -> list[int]:
    """Numbers of rows, each rounded up to a power of two."""
    every = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, str) else [rows]
    found: dict[int, None] = {}
    for count in every:
        if not is_positive_int(count):
            raise SpecError(f"warmup: rows must be ints of at least 1, got {count!r}")
        assert isinstance(count, int)
        found[1 << (count - 1).bit_length()] = None
    if not found:
        raise SpecError("warmup: rows names no number of rows; give at least one")
    return list(found)
