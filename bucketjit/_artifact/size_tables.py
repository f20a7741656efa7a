"""The sizes that a program of concrete traces serves, with the constants that each takes.

Such a program is compared with a trace at the sizes of each call, and takes constants such as
``math.sqrt(n)`` from it. Without the source nothing can be traced, so the file has them for all
sizes of the saved buckets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bucketjit._artifact.dtypes import as_bytes, name_of
from bucketjit._artifact.manifest import SizeTable
from bucketjit._events import shown
from bucketjit._ir.expressions import is_symbolic
from bucketjit._ir.interface import SizeConstants
from bucketjit._ir.program import Program
from bucketjit._tracing.call import Call
from bucketjit.errors import ArtifactError

_MOST_ROWS = 4096
_MOST_LOOKED_AT = 2**20
_MOST_BYTES = 64 * 2**20

BucketCall = tuple[Mapping[str, int], Call]


def table_of(
    program: Program, calls: Sequence[BucketCall], add: Callable[[str, bytes], str], where: str
) -> tuple[SizeTable, list[BucketCall]]:
    """Tabulate the size constants of a program."""
    assert program.pairing is not None
    own = [v for v in calls[0][1].variables if v not in program.unfitted]
    largest = {v: max(bucket[v] for bucket, _ in calls) for v in own}
    every = itertools.product(*(range(1, largest[v] + 1) for v in own))
    admitted = (row for row in every if program.admits(dict(zip(own, row, strict=True))))
    count = math.prod(largest.values())
    tried = list(itertools.islice(admitted, _MOST_ROWS + 1)) if count < _MOST_LOOKED_AT else []
    if not 0 < len(tried) <= _MOST_ROWS:
        raise ArtifactError(
            f"the function is traced at concrete sizes ({program.pairing.why}), and the sizes up "
            f"to {shown(largest)} are too many to trace: at most {_MOST_ROWS}. Save smaller "
            "buckets, or compute on sizes with jax.numpy, such as jnp.sqrt(jnp.shape(x)[0])"
        )
    rows: list[tuple[int, ...]] = []
    found: list[SizeConstants] = []
    taken = 0
    for row in tried:
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
    bucket, call = one
    room: dict[str, Any] = dict(bucket)
    for row, extra in zip(table.rows, table.extra, strict=True):
        if all(n <= bucket[v] for v, n in zip(own, row, strict=True)):
            for name, size in zip(table.unfitted, extra, strict=True):
                room[name] = max(room[name], size)
    return room, call
