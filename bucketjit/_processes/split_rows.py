"""Give each shard of this process its rows: the arguments of a call, cut along their first axis.

    x of 5 rows, two devices of this process       3 rows and 2

With one device a process, its shard has all rows of the call and nothing is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from bucketjit._arrays.padding import part as part_of
from bucketjit._compile.argument_types import at_sizes, is_open
from bucketjit._ir.expressions import is_symbolic, variables_in, variables_of
from bucketjit._ir.interface import Interface
from bucketjit._runtime.engine import Engine
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import bind_sizes
from bucketjit.errors import ArgumentError


class Part(NamedTuple):
    """The call of one shard of this process, and where each leaf of it is cut."""

    call: Call
    cuts: Mapping[int, tuple[int, int]]

    def value(self, leaf: int, argument: Any) -> Any:
        """The part of an argument that this shard gets."""
        return part_of(argument, 0, *self.cuts[leaf]) if leaf in self.cuts else argument


class ShardedCall(NamedTuple):
    """A call of this process, cut into those of its shards.

    Attributes:
        whole: The call, with its arrays.
        parts: The calls of the shards, the largest first. All have one program.
        rows: The variable along which it is cut; None if it is not cut.
    """

    whole: Call
    parts: Sequence[Part]
    rows: str | None = None

    @property
    def call(self) -> Call:
        """The largest of the calls, with types in the place of arrays."""
        return self.parts[0].call


def sharded_call(engine: Engine, call: Call, count: int) -> ShardedCall:
    """Cut a call into those of the shards of this process, and resolve them."""
    signature, types = call.signature, call.signature.types
    for leaf, path in zip(call.leaves, signature.paths, strict=True):
        is_spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        if is_spread and not leaf.is_fully_replicated:
            raise ArgumentError(
                f"{path}: expected the rows of this process, or an array of which each device has "
                f"a copy; got one that is cut over processes, {leaf.sharding}"
            )
    typed = zip(call.leaves, call.shapes, types, strict=True)
    leaves = [x if k.dtype is None else jax.ShapeDtypeStruct(n, k.dtype) for x, n, k in typed]
    abstract = call.with_leaves(leaves)
    if count == 1:
        return ShardedCall(call, [Part(engine.resolve(abstract), {})])
    tokens = signature.tokens or signature.guessed_tokens(call.shapes)
    opened = {
        i: row
        for i, (row, kind) in enumerate(zip(tokens, types, strict=True))
        if kind.dtype is not None and any(map(is_open, row))
    }
    sizes, rows = bind_sizes(tokens, call.shapes, signature.paths), _rows_of(opened, count)
    each, more = divmod(total := sizes[rows], count)
    if not each:
        raise ArgumentError(
            f"{total} rows ({rows}) cannot be given to the {count} devices of this process, "
            "as each shard needs one row at least; give more rows, or a mesh of fewer devices"
        )
    counts = (each + bool(more), each)
    shard_calls = {n: at_sizes(abstract, tokens, {**sizes, rows: n}) for n in counts}
    scales = {
        i: call.shapes[i][0] // total
        for i in opened
        if any(part.shapes[i] != call.shapes[i] for part in shard_calls.values())
    }
    for i in scales:
        length, *rest = call.shapes[i]
        for n, part in shard_calls.items():
            first, *others = part.shapes[i]
            if others != rest or first * total != length * n:
                raise ArgumentError(
                    f"{signature.paths[i]}: it cannot be cut for the devices of this process, as "
                    f"its shape is ({', '.join(opened[i])}): only axis 0 may depend on {rows}, and "
                    "must be a multiple of it; use one device a process"
                )
    calls = _with_one_program({n: engine.resolve(call) for n, call in shard_calls.items()})
    parts, start = [], 0
    for i in range(count):
        stop = start + each + (i < more)
        cuts = {leaf: (start * scale, stop * scale) for leaf, scale in scales.items()}
        parts.append(Part(calls[stop - start], cuts))
        start = stop
    return ShardedCall(call, parts, rows)


def _rows_of(opened: Mapping[int, Sequence[str]], count: int) -> str:
    """The variable of the rows, along which a call is cut."""
    leading = [row[0] for row in opened.values() if is_open(row[0])]
    names = sorted({v for token in leading for v in variables_of(token)})
    if len(names) == 1:
        return names[0]
    text = f"the first open axes are {', '.join(names)}" if names else "no first axis is open"
    raise ArgumentError(
        f"the rows of this process cannot be given to its {count} devices, as {text}; open the "
        "first axis of the arguments that are cut, by one name, or use one device a process"
    )


def _with_one_program(calls: Mapping[int, Call]) -> dict[int, Call]:
    """The calls by their number of rows, with a program that holds for all of them."""
    programs = dict.fromkeys(call.program for call in calls.values())
    if None in programs:
        return dict(calls)
    for program in programs:
        if program is not None and all(program.admits(call.sizes) for call in calls.values()):
            return {n: dataclasses.replace(call, program=program) for n, call in calls.items()}
    sizes = ", ".join(str(call.sizes) for call in calls.values())
    raise ArgumentError(
        f"the function decides by sizes, and differently on the devices of this process, which "
        f"have {sizes}; decide by jax.lax.cond, or give all devices as many rows"
    )


def refuse_results(call: ShardedCall, program: Interface) -> None:
    """Refuse results that the shards of one process cannot give as one array."""
    if call.rows is None:
        return
    for i in program.open_outs:
        first, *others = program.out_shapes[i]
        of_rows = is_symbolic(first) and variables_in([first]) == {call.rows}
        if not of_rows or call.rows in variables_in(others):
            shape = ", ".join(map(str, (first, *others)))
            raise ArgumentError(
                f"result {i} of shape ({shape}) cannot be joined from the devices of this process: "
                f"the first axis must be one of rows ({call.rows}), and no other one may depend on "
                "them; reduce it, or use one device a process"
            )
