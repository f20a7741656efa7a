"""Serves calls with one set of shapes in chunks: the handler of the fast path for split calls.

`bucketjit._runtime.chunks.splitter` serves the first call of such shapes and makes a
`ChunkedHandler` from it, as the engine does with a `BucketHandler`.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit._arrays.padding import part, plain
from bucketjit._jax.config import ThreadConfig
from bucketjit._runtime.call_counts import CallCounter
from bucketjit._runtime.fast_path.bucket_handler import changed
from bucketjit._runtime.fast_path.dispatch import CallArguments
from bucketjit._runtime.fast_path.handler import Evicted, Handler, Where
from bucketjit._runtime.fast_path.layout import arguments_of
from bucketjit._signature.signer import SignedCall

# Floating point operations of a call below which starting threads costs more than they save.
_WORTH_HELP = 1e6


class Piece(NamedTuple):
    """How one leaf of the call is cut into chunks.

    Attributes:
        leaf: Position of the leaf.
        axis: The axis that is cut; None if the leaf is a size itself.
        block: Positions along the axis for each position of the variable: 2 for an axis ``2*b``.
        values: For a leaf that is a size, its value by the variable's size in the chunk.
    """

    leaf: int
    axis: int | None
    block: int = 1
    values: Mapping[int, int] = MappingProxyType({})

    def of(self, value: object, start: int, stop: int) -> Any:
        """The leaf of the chunk that has positions ``start`` to ``stop`` of the variable."""
        if self.axis is not None:
            return part(value, self.axis, start * self.block, stop * self.block)
        size = self.values[stop - start]
        return value.dtype.type(size) if isinstance(value, np.integer) else size


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Start and stop of each chunk."""
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


class Cut(NamedTuple):
    """How one argument is cut into chunks.

    Attributes:
        where: Its position or name.
        tree: Its tree; None for a bare array.
        pieces: ``(leaf of the argument, piece)`` for each leaf that is cut.
    """

    where: Where
    tree: Any
    pieces: tuple[tuple[int, Piece], ...]


def by_argument(signed: SignedCall, given: CallArguments, cut: Sequence[Piece]) -> tuple[Cut, ...]:
    """How the arguments of a call are cut; arguments that chunks get whole are left out.

    Args:
        signed: The call.
        given: Its arguments as they came.
        cut: How its leaves are cut.

    Returns:
        A record for each argument that is cut.
    """
    by_leaf = {piece.leaf: piece for piece in cut}
    found = []
    for argument in arguments_of(signed, given.args, given.kwargs):
        own = [(i, by_leaf[argument.start + i]) for i in argument.own(by_leaf)]
        if own:
            bare = jax.tree_util.treedef_is_leaf(argument.tree)
            found.append(Cut(argument.where, None if bare else argument.tree, tuple(own)))
    return tuple(found)


class ChunkedHandler:
    """Serves calls with one set of shapes in chunks; see `Handler`.

    Each chunk has a handler of its own. If one does not fit its chunk, the whole call takes the
    slow path: an argument without open axes has changed, so the proof that the call may be split
    need not hold any more.

    Args:
        sizes: The variable's size in each chunk.
        handlers: The handler for the chunks of each size.
        cut: How the leaves are cut.
        cuts: The same by argument.
        join: Joins the results of all chunks.
        padded: Whether there are `Padded` arrays among the leaves that are cut.

    Attributes:
        next: The handler to try if this one does not fit the call; None if it is the last.
        slots: The slots of the executables in the cache.
    """

    __slots__ = (
        *("_block", "_cut", "_cuts", "_helped", "_join", "_padded", "_sizes", "_handlers"),
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
        self._handlers = dict(handlers)
        self._cut = cut
        self._cuts = cuts
        self._join = join
        self._padded = padded
        self.next: Handler | None = None
        self.slots = tuple(slot for handler in self._handlers.values() for slot in handler.slots)
        # Helper threads must wait for their results, or they would only queue work. Executables
        # that wait themselves need no `block_until_ready`.
        self._helped = _wants_help([self._handlers[n] for n in sizes])
        self._block = self._helped

    @property
    def lines(self) -> tuple[CallCounter, ...]:
        """The call counters of the chunks, which belong to their handlers."""
        return tuple(line for handler in self._handlers.values() for line in handler.lines)

    @property
    def is_alive(self) -> bool:
        """Whether all its executables are in the cache."""
        return all(slot.entry is not None for slot in self.slots)

    def serve(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Serve a call.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.

        Returns:
            The joined results.

        Raises:
            Evicted: An executable has left the cache.
            SignatureChanged: An argument without open axes differs from what the executables were
                built for.
            SplitError: The chunks return different trees.
        """
        return self._join(self.run(range(len(self._sizes)), args, kwargs))

    def run(
        self, which: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Run some of the chunks.

        Args:
            which: Positions of the chunks.
            args: The positional arguments of the call.
            kwargs: The keyword arguments of the call.

        Returns:
            Their results, in the order of ``which``.

        Raises:
            Evicted: An executable has left the cache.
            SignatureChanged: See `serve`.
        """
        if not self.is_alive:
            raise Evicted  # before a chunk is served and counted
        if self._padded:  # cut `Padded` arrays to their logical sizes once, and not for each chunk
            args, kwargs = changed(args, kwargs, self._cuts, lambda value, _: plain(value))
        chunk_of = {
            n: self._chunk_of(handler, args, kwargs) for n, handler in self._handlers.items()
        }
        ends = spans(self._sizes)
        jobs = [functools.partial(chunk_of[self._sizes[i]], *ends[i]) for i in which]
        if not self._helped:
            return [job() for job in jobs]
        config = ThreadConfig()  # JAX's context managers of this thread hold in the others too
        return list(_threads().map(config.run, jobs))

    def _chunk_of(
        self, handler: Handler, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[int, int], Any]:
        """A function that serves the chunks of one handler; takes their start and stop."""
        return functools.partial(self._serve, handler, args, kwargs)

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


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """The threads that run chunks."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="bucketjit-chunk")


def _wants_help(handlers: Sequence[Handler]) -> bool:
    """Whether a call is faster when several threads run its chunks.

    Only on the host: an accelerator queues the chunks one after the other, whichever thread asks,
    and programs on several devices wait for each other.
    """
    entries = [slot.entry for handler in handlers for slot in handler.slots]
    flops = sum(entry.flops for entry in entries if entry is not None)
    if flops < _WORTH_HELP:  # False for NaN: where they are not known, threads help
        return False
    return all(entry is not None and entry.on_host for entry in entries)
