"""Constants that Python computes from sizes, tabulated for every size of the saved buckets.

A program of concrete traces takes constants such as ``math.sqrt(n)`` from a trace at the sizes of
each call. Without the source nothing can be traced, so the file has them for all sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bucketjit._artifact.dtypes import as_bytes, name_of
from bucketjit._artifact.manifest import SizeTable
from bucketjit._events import shown
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.expressions import is_symbolic
from bucketjit._tracing.interface import SizeConstants
from bucketjit._tracing.program import Program
from bucketjit.errors import ArtifactError

_MOST_ROWS = 4096
_MOST_BYTES = 64 * 2**20

BucketCall = tuple[Mapping[str, int], SignedCall, ResolvedCall]


def table_of(
    program: Program,
    calls: Sequence[BucketCall],
    add: Callable[[str, bytes], str],
    where: str,
) -> tuple[SizeTable, list[BucketCall]]:
    """Tabulate the size constants of a program.

    Args:
        program: A program of concrete traces.
        calls: Its buckets, each with a call.
        add: Adds a member to the archive.
        where: The folder of its members.

    Returns:
        The table, and the buckets, with room for the largest unfitted sizes in each.

    Raises:
        ArtifactError: There are too many sizes, or the constants take too much space.
    """
    assert program.pairing is not None
    own = [v for v in calls[0][2].variables if v not in program.unfitted]
    largest = {v: max(bucket[v] for bucket, _, _ in calls) for v in own}
    count = int(np.prod([largest[v] for v in own], dtype=object))
    if count > _MOST_ROWS:
        raise ArtifactError(
            f"Python computes constants from the sizes, and there are {count} combinations of "
            f"sizes up to {shown(largest)}; at most {_MOST_ROWS} are tabulated: save smaller "
            "buckets, or compute them with jax.numpy, such as jnp.sqrt(jnp.shape(x)[0])"
        )
    rows: list[tuple[int, ...]] = []
    found: list[SizeConstants] = []
    taken = 0
    for row in itertools.product(*(range(1, largest[v] + 1) for v in own)):
        constants = program.size_constants(dict(zip(own, row, strict=True)))
        if constants is None:  # another program serves these sizes
            continue
        taken += constants.nbytes
        if taken > _MOST_BYTES:
            raise ArtifactError(
                "the constants that Python computes from the sizes take more than "
                f"{_MOST_BYTES >> 20} MiB: save smaller buckets, or compute them with jax.numpy"
            )
        rows.append(row)
        found.append(constants)
    members, dtypes = [], []
    for number in range(len(program.size_constant_shapes)):
        values = [np.asarray(one.values[number]) for one in found]
        kinds = {value.dtype for value in values}
        if len(kinds) != 1:
            raise ArtifactError(
                "a constant that Python computes from the sizes is of another dtype at another "
                "size: give it one dtype"
            )
        raw = b"".join(bytes(as_bytes(value)) for value in values)
        members.append(add(f"{where}/size_constants/{number}.bin", raw))
        dtypes.append(name_of(kinds.pop()))
    table = SizeTable(
        axes=tuple(
            tuple(str(d) if is_symbolic(d) else int(d) for d in shape)
            for shape in program.size_constant_shapes
        ),
        dtypes=tuple(dtypes),
        unfitted=program.unfitted,
        rows=tuple(rows),
        extra=tuple(tuple(one.sizes) for one in found),
        members=tuple(members),
    )
    return table, [_with_room(one, own, table) for one in calls]


def _with_room(one: BucketCall, own: Sequence[str], table: SizeTable) -> BucketCall:
    """A bucket that holds the largest unfitted sizes of all logical sizes in it."""
    bucket, signed, call = one
    room: dict[str, Any] = dict(bucket)
    for row, extra in zip(table.rows, table.extra, strict=True):
        if all(n <= bucket[v] for v, n in zip(own, row, strict=True)):
            for name, size in zip(table.unfitted, extra, strict=True):
                room[name] = max(room[name], size)
    return room, signed, call
