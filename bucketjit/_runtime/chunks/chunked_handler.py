"""How calls with one set of shapes are served in chunks, once that is known: the warm path.

A `ChunkedHandler` is to `bucketjit._runtime.chunks.splitter` what a `BucketHandler` is to the
engine.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit._arrays.padding import part, plain
from bucketjit._cores.helper_threads import run_together
from bucketjit._runtime.counters import CallCounter
from bucketjit._runtime.fast_path.bucket_handler import changed
from bucketjit._runtime.fast_path.dispatch import CallArguments
from bucketjit._runtime.fast_path.handler import Evicted, Handler, Where
from bucketjit._runtime.fast_path.layout import arguments_of
from bucketjit._signature.signer import SignedCall

_WORTH_HELP = (
    1e6  # floating point operations of a call below which threads cost more than they save
)


class Piece(NamedTuple):
    """What chunks have of one leaf of the call.

    Attributes:
        leaf: Position of the leaf.
        axis: The axis that is cut; None if the leaf is a size itself.
        block: Positions along the axis for each of the variable.
        values: The size, by the variable's size in the chunk.
    """

    leaf: int
    axis: int | None
    block: int = 1
    values: Mapping[int, int] = MappingProxyType({})

    def of(self, value: object, start: int, stop: int) -> Any:
        """What the chunk from ``start`` to ``stop`` of the variable has."""
        if self.axis is not None:
            return part(value, self.axis, start * self.block, stop * self.block)
        size = self.values[stop - start]
        return value.dtype.type(size) if isinstance(value, np.integer) else size


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each chunk begins and ends."""
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


class Cut(NamedTuple):
    """What chunks have of one argument.

    Attributes:
        where: Its position or name.
        tree: Its tree; None for a bare array.
        pieces: By leaf among those of the argument.
    """

    where: Where
    tree: Any
    pieces: tuple[tuple[int, Piece], ...]


def by_argument(signed: SignedCall, given: CallArguments, cut: Sequence[Piece]) -> tuple[Cut, ...]:
    """What chunks have of each argument, where they do not all have the whole of it."""
    by_leaf = {piece.leaf: piece for piece in cut}
    found = []
    for argument in arguments_of(signed, given.args, given.kwargs):
        own = [(i, by_leaf[argument.start + i]) for i in argument.own(by_leaf)]
        if own:
            bare = jax.tree_util.treedef_is_leaf(argument.tree)
            found.append(Cut(argument.where, None if bare else argument.tree, tuple(own)))
    return tuple(found)


class ChunkedHandler:
    """How calls with one set of shapes are served in chunks.

    `bucketjit._runtime.fast_path.bucket_handler` says what a plan is.

    If a chunk cannot be served by its plan, the whole call takes the slow path: what has no open
    axes may be another thing now, of which it has not been shown that it may be cut.

    Args:
        sizes: The variable's size in each chunk.
        ways: How a chunk of each size is served.
        cut: What chunks have of the leaves that are cut.
        cuts: The same by argument.
        join: Joins the results of all chunks.
        padded: Whether there are `Padded` arrays among what is cut.

    Attributes:
        following: The plan to try where this one is refused.
        slots: Where the executables are.
        lines: Count the chunks. They belong to their own plans.
    """

    bind = None  # a chunk of its own is cut along another axis

    __slots__ = (
        *("_block", "_cut", "_cuts", "_helped", "_join", "_padded", "_sizes", "_ways"),
        *("next", "slots"),
    )

    def __init__(
        self,
        sizes: Sequence[int],
        handlers: Mapping[int, Handler],
        cut: Sequence[Piece],
        cuts: tuple[Cut, ...],
        join: Callable[[Sequence[Any]], Any],
        padded: bool,
    ) -> None:
        self._sizes = tuple(sizes)
        self._ways = dict(handlers)
        self._cut = cut
        self._cuts = cuts
        self._join = join
        self._padded = padded
        self.next: Handler | None = None
        self.slots = tuple(slot for handler in self._ways.values() for slot in handler.slots)
        self._helped = _wants_help([self._ways[n] for n in sizes])
        entries = [slot.entry for slot in self.slots]
        self._block = self._helped and not all(e is not None and e.waits for e in entries)

    @property
    def lines(self) -> tuple[CallCounter, ...]:
        """Count the chunks."""
        return tuple(line for handler in self._ways.values() for line in handler.lines)

    @property
    def is_alive(self) -> bool:
        """Whether its executables are in the cache."""
        return all(slot.entry is not None for slot in self.slots)

    def serve(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Serve a call.

        Raises:
            Evicted: An executable has left the cache.
            SignatureChanged: What has no open axes is not as it was.
        """
        return self._join(self.run(range(len(self._sizes)), args, kwargs))

    def run(
        self, which: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """The results of some of its chunks, by position; see `serve`."""
        if not self.is_alive:
            raise Evicted  # before a chunk has been served, and counted
        if self._padded:  # once, and not for each chunk
            args, kwargs = changed(args, kwargs, self._cuts, lambda value, _: plain(value))
        chunk_of = {n: self._chunk_of(handler, args, kwargs) for n, handler in self._ways.items()}
        ends = spans(self._sizes)
        jobs = [functools.partial(chunk_of[self._sizes[i]], *ends[i]) for i in which]
        return run_together(jobs) if self._helped else [job() for job in jobs]

    def _chunk_of(
        self, handler: Handler, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[int, int], Any]:
        """What serves the chunks of a call that go one way, by where they begin and end."""
        part = None
        if handler.bind is not None:
            part = handler.bind(args, kwargs, [piece.leaf for piece in self._cut])
        if part is None:
            return functools.partial(self._serve, handler, args, kwargs)
        cut, serve = [(piece, part.leaves[piece.leaf]) for piece in self._cut], part.serve
        return lambda start, stop: serve([(p.leaf, p.of(x, start, stop)) for p, x in cut])

    def _serve(
        self,
        handler: Handler,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        start: int,
        stop: int,
    ) -> Any:
        values, named = changed(
            args, kwargs, self._cuts, lambda value, piece: piece.of(value, start, stop)
        )
        result = handler.serve(values, named)
        return jax.block_until_ready(result) if self._block else result


def _wants_help(handlers: Sequence[Handler]) -> bool:
    """Whether chunks end sooner when several threads run them.

    On an accelerator they are queued one after the other, whoever asks; and programs of several
    devices wait for each other.
    """
    entries = [slot.entry for handler in handlers for slot in handler.slots]
    flops = sum(entry.flops for entry in entries if entry is not None)
    if flops < _WORTH_HELP:  # where they are not known (NaN), help is wanted
        return False
    return all(entry is not None and entry.on_host for entry in entries)
