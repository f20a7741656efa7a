"""Give each shard of this process its rows: the arguments of a call, cut along their first axis.

    x of 5 rows, two devices of this process       3 rows and 2

With one device a process, its shard has all rows of the call and nothing is cut.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from bucketjit._arrays.padding import part as part_of
from bucketjit._processes.shard_axis import even_parts
from bucketjit._runtime.engine import Engine
from bucketjit._signature.binding import bind_sizes
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import STATIC, Tokens
from bucketjit._sizes.expressions import evaluate_text, is_symbolic, variables_in, variables_of
from bucketjit._tracing.interface import Interface
from bucketjit.errors import ArgumentError


@dataclass(frozen=True)
class Part:
    """The call of one shard of this process.

    Attributes:
        signed: The call, with types in the place of its arrays.
        call: The same call, resolved.
        starts: The first row, and the row after the last one, of each leaf that is cut.
    """

    signed: SignedCall
    call: ResolvedCall
    starts: Mapping[int, tuple[int, int]]

    def value(self, leaf: int, given: Any) -> Any:
        """The part of an argument that this shard gets."""
        return part_of(given, 0, *self.starts[leaf]) if leaf in self.starts else given


@dataclass(frozen=True)
class ShardedCall:
    """A call of this process, cut into those of its shards.

    Attributes:
        given: The call, with its arrays.
        parts: The calls of the shards, the largest first. All have one program.
        rows: The variable along which it is cut; None if it is not cut.
    """

    given: SignedCall
    parts: Sequence[Part]
    rows: str | None

    @functools.cached_property
    def shape_key(self) -> int | None:
        """A hash of the shapes and types of the whole call."""
        return self.given.shape_key

    @property
    def signed(self) -> SignedCall:
        """The largest of the calls."""
        return self.parts[0].signed

    @property
    def call(self) -> ResolvedCall:
        """The largest of the calls, resolved."""
        return self.parts[0].call

    def with_program(self, program: Interface) -> ShardedCall:
        """The same calls with a program that holds for all of them."""
        parts = [
            dataclasses.replace(p, call=dataclasses.replace(p.call, program=program))
            for p in self.parts
        ]
        return dataclasses.replace(self, parts=parts)


def sharded_call(engine: Engine, signed: SignedCall, count: int) -> ShardedCall:
    """Cut a call into those of the shards of this process, and resolve them."""
    _refuse_spread(signed)
    if count == 1:
        part = Part(_without_arrays(signed), engine.resolve(signed), {})
        return ShardedCall(signed, [part], None)
    signature = signed.signature
    tokens = signature.tokens or signature.guessed_tokens(signed.shapes)
    sizes = bind_sizes(tokens, signed.shapes, signature.paths)
    rows = _rows_of(signed, tokens, count)
    if sizes[rows] < count:
        raise ArgumentError(
            f"{sizes[rows]} rows ({rows}) cannot be given to the {count} devices of this process, "
            "as each shard needs one row at least; give more rows, or a mesh of fewer devices"
        )
    parts, done = [], 0
    calls: dict[int, ResolvedCall] = {}
    for n in even_parts(sizes[rows], count):
        own = _at(signed, tokens, {**sizes, rows: n})
        starts = _starts(signed, tokens, rows, {**sizes, rows: done}, own, done == 0)
        if n not in calls:
            calls[n] = engine.resolve(own)
        parts.append(Part(own, calls[n], starts))
        done += n
    return _with_one_program(ShardedCall(signed, parts, rows))


def _without_arrays(signed: SignedCall) -> SignedCall:
    """The same call with types in the place of its arrays, on no device."""
    return signed.with_leaves(
        [
            leaf if kind.dtype is None else jax.ShapeDtypeStruct(shape, kind.dtype)
            for leaf, shape, kind in zip(
                signed.leaves, signed.shapes, signed.signature.types, strict=True
            )
        ]
    )


def _at(signed: SignedCall, tokens: Tokens, sizes: Mapping[str, int]) -> SignedCall:
    """A call at other sizes, without arrays."""
    shapes = [
        tuple(
            n if _is_closed(t) else evaluate_text(t, sizes) for t, n in zip(row, shape, strict=True)
        )
        for row, shape in zip(tokens, signed.shapes, strict=True)
    ]
    leaves = [
        shape[0] if kind.dtype is None else leaf
        for leaf, shape, kind in zip(signed.leaves, shapes, signed.signature.types, strict=True)
    ]
    return _without_arrays(dataclasses.replace(signed, leaves=leaves, shapes=shapes))


def _is_closed(token: str) -> bool:
    return token == STATIC or token.isdigit()


def _refuse_spread(signed: SignedCall) -> None:
    """Refuse arrays of which this process has a part only."""
    for leaf, path in zip(signed.leaves, signed.signature.paths, strict=True):
        is_spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        if is_spread and not leaf.is_fully_replicated:
            raise ArgumentError(
                f"{path}: expected the rows of this process, or an array of which each device has "
                f"a copy; got one that is cut over processes, {leaf.sharding}"
            )


def _open_leaves(signed: SignedCall, tokens: Tokens) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The arrays with open axes, each with the tokens of its axes."""
    for i, (row, kind) in enumerate(zip(tokens, signed.signature.types, strict=True)):
        if kind.dtype is not None and not all(map(_is_closed, row)):
            yield i, tuple(row)


def _rows_of(signed: SignedCall, tokens: Tokens, count: int) -> str:
    """The variable of the rows, along which a call is cut."""
    leading = [row[0] for _, row in _open_leaves(signed, tokens) if not _is_closed(row[0])]
    names = sorted({v for token in leading for v in variables_of(token)})
    if len(names) == 1:
        return names[0]
    told = f"the first open axes are {', '.join(names)}" if names else "no first axis is open"
    raise ArgumentError(
        f"the rows of this process cannot be given to its {count} devices, as {told}; open the "
        "first axis of the arguments that are cut, by one name, or use one device a process"
    )


def _starts(
    signed: SignedCall,
    tokens: Tokens,
    rows: str,
    before: Mapping[str, int],
    own: SignedCall,
    is_first: bool,
) -> dict[int, tuple[int, int]]:
    """Where the rows of a shard begin and end in each leaf that is cut."""
    found = {}
    for i, row in _open_leaves(signed, tokens):
        depends = [not _is_closed(t) and rows in variables_of(t) for t in row]
        if any(depends[1:]):
            _refuse(signed, i, f"axis {depends.index(True, 1)} depends on {rows}")
        if not depends[0]:
            continue
        start = 0 if is_first else evaluate_text(row[0], before)
        if evaluate_text(row[0], {**before, rows: 0}) != 0 or len(set(variables_of(row[0]))) > 1:
            _refuse(signed, i, f"axis 0 has {row[0]} rows, not a multiple of {rows}")
        found[i] = start, start + own.shapes[i][0]
    return found


def _refuse(signed: SignedCall, leaf: int, why: str) -> NoReturn:
    raise ArgumentError(
        f"{signed.signature.paths[leaf]}: it cannot be cut for the devices of this process, as "
        f"{why}; use one device a process"
    )


def _with_one_program(call: ShardedCall) -> ShardedCall:
    """The calls with a program that holds for all of them."""
    if any(p.call.program is None for p in call.parts):
        return call
    programs = dict.fromkeys(p.call.program for p in call.parts)
    for program in programs:
        if program is not None and all(program.admits(p.call.sizes) for p in call.parts):
            return call.with_program(program)
    sizes = ", ".join(str(p.call.sizes) for p in call.parts)
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
