"""Finds the handler of a call from the arguments that have open axes.

A `DispatchTable` knows where in the arguments of one layout the open axes are. It reads the shapes
and types there, and no other argument, and looks up the handler for them
(`bucketjit._runtime.fast_path.bucket_handler`). A `FastPath` chains the tables of a bucketed
function.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.tree_util import tree_structure

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import pad_to_place, padder
from bucketjit._arrays.results import Change
from bucketjit._compile.cache import Slot
from bucketjit._compile.executable import Executable
from bucketjit._jax.arrays import CONCRETE_ARRAY
from bucketjit._runtime.counters import CallCounter
from bucketjit._runtime.fast_path import bucket_handler
from bucketjit._runtime.fast_path.layout import (
    ARRAY,
    NAMED,
    Layout,
    Leaves,
    OtherSizes,
    Reader,
    kind_of,
    reading,
    reading_static,
)

_MEMO_LIMIT = 16384  # keys in a table; at that many all are dropped

_MOST_TREES = 1024  # of arguments; at that many all tables are dropped

_LOOKED_THROUGH = 32  # keys in a table when those without an executable are first dropped

_ALTERNATIVES = 16  # handlers for the same key, whose calls differ in arguments without open axes


class DispatchTable:
    """The handlers of all calls of one layout.

    Attributes:
        layout: Where the open axes are.
        key: Makes the key of a call from its arguments: shapes, types and static values. Returns
            None for calls of another layout, and for arguments that `reading` does not read.
        by_key: The handlers for each key, the latest one first.
        others: What is known of calls that differ from earlier ones in sizes alone, by `kind_of`.
    """

    __slots__ = ("_look_through_at", "by_key", "key", "layout", "others")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.by_key: dict[Hashable, tuple[bucket_handler.Handler, ...]] = {}
        self.others: dict[Hashable, OtherSizes] = {}
        self._look_through_at = _LOOKED_THROUGH
        readers = [(o.where, o.read) for o in layout.opened]
        readers += [(where, reading_static) for where in layout.statics]
        self.key: Callable[[Sequence[Any], Mapping[str, Any]], Hashable]
        if len(readers) == 1 and isinstance(readers[0][0], int) and not layout.names:
            self.key = _key_of_one(layout.arity, readers[0][0], readers[0][1])
        else:
            self.key = _key_of_several(layout.arity, frozenset(layout.names), readers)

    def handlers(self) -> list[bucket_handler.Handler]:
        return list(itertools.chain.from_iterable(list(self.by_key.values())))

    def remember(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], handler: bucket_handler.Handler
    ) -> Sequence[bucket_handler.Handler]:
        """Serve calls like this one by a handler; returns those that were dropped for it."""
        gone: list[bucket_handler.Handler] = []
        if len(self.by_key) >= _MEMO_LIMIT:
            gone += self.handlers()
            self.by_key.clear()
        if len(self.by_key) >= self._look_through_at:
            gone += self._without_executable()
        key = self.key(args, kwargs)
        handlers = self.by_key.get(key)
        if handlers is None:
            self.by_key[key] = (handler,)
            return gone
        alive = [old for old in handlers if old.is_alive and old.slot is not handler.slot]
        kept = alive[: _ALTERNATIVES - 1]
        self.by_key[key] = (handler, *kept)
        return [*gone, *(old for old in handlers if old not in kept)]

    def _without_executable(self) -> list[bucket_handler.Handler]:
        """Drop the keys none of whose handlers has its executable, and return those handlers."""
        gone: list[bucket_handler.Handler] = []
        for key, handlers in list(self.by_key.items()):
            if not any(handler.is_alive for handler in handlers):
                del self.by_key[key]
                gone += handlers
        self._look_through_at = max(_LOOKED_THROUGH, 2 * len(self.by_key))
        return gone


def _key_of_one(arity: int, where: int, read: Reader) -> Callable[..., Hashable]:
    def key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        if kwargs or len(args) != arity:
            return None
        value = args[where]
        if read is reading:  # `reading` inlined for the two most frequent types, to save a call
            kind = type(value)
            if kind is ARRAY:
                return value.shape, value.dtype
            if kind is CONCRETE_ARRAY:
                aval = value.aval
                placed = value.sharding
                if type(placed) is NAMED:
                    return aval.shape, aval.dtype, aval.weak_type, placed
                return aval.shape, aval.dtype, aval.weak_type
        return read(value)

    return key


def _key_of_several(
    count: int, names: frozenset[str], readers: Sequence[tuple[bucket_handler.Where, Reader]]
) -> Callable[..., Hashable]:
    positional = [(w, r) for w, r in readers if isinstance(w, int)]
    named = [(w, r) for w, r in readers if isinstance(w, str)]

    def key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        if len(args) != count or (kwargs or names) and kwargs.keys() != names:
            return None
        parts = []
        for where, read in positional:
            if (part := read(args[where])) is None:
                return None
            parts.append(part)
        for name, read in named:
            if (part := read(kwargs[name])) is None:
                return None
            parts.append(part)
        return tuple(parts)

    return key


class FastPath:
    """The dispatch tables of a bucketed function.

    Attributes:
        looks: How a call is looked up: in the latest table (False), then by its tree (True).
        latest: The table that served last, or was made last, in a tuple. It is empty if the key of
            a table does not tell its calls from those of another tree.
    """

    __slots__ = ("_by_tree", "_reads_trees", "latest", "looks")

    def __init__(self) -> None:
        self._by_tree: dict[Any, tuple[DispatchTable, ...]] = {}
        self.latest: tuple[DispatchTable, ...]
        self.clear()

    @property
    def tables(self) -> tuple[DispatchTable, ...]:
        return tuple(itertools.chain.from_iterable(list(self._by_tree.values())))

    def alike(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[DispatchTable, ...]:
        """The tables of calls whose arguments have the same tree."""
        tables = self._by_tree.get(tree_structure((args, kwargs)), ())
        if tables and not self._reads_trees:
            self.latest = tables[:1]
        return tables

    def other_sizes(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[DispatchTable, OtherSizes, Leaves] | None:
        """What is known of a call but for its sizes, with its table and its leaves."""
        for table in self.alike(args, kwargs) if True in self.looks else self.latest:
            if table.others and (kind := kind_of(table.layout, args, kwargs)) is not None:
                try:
                    others = table.others.get(kind[0])
                except TypeError:  # a static argument that cannot be hashed
                    return None
                if others is not None:
                    return table, others, kind[1]
        return None

    def of(
        self, layout: Layout, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[DispatchTable, list[bucket_handler.Handler]]:
        """The table of a layout, for calls like this one, and the handlers dropped for it."""
        gone = self.clear() if len(self._by_tree) >= _MOST_TREES else []
        tree = tree_structure((args, kwargs))
        tables = self._by_tree.get(tree, ())
        table = next((candidate for candidate in tables if candidate.layout == layout), None)
        if table is None:
            others = (t.layout for k, each in self._by_tree.items() if k != tree for t in each)
            self._reads_trees |= not all(map(layout.differs_from, others))
            table = DispatchTable(layout)
            self._by_tree[tree] = (table, *tables)
        self.latest = () if self._reads_trees else (table,)
        self.looks = (False, True)[: len(self.tables)]
        return table, gone

    def clear(self) -> list[bucket_handler.Handler]:
        gone = [handler for table in self.tables for handler in table.handlers()]
        self._by_tree, self._reads_trees = {}, False
        self.latest = ()
        self.looks = (False,)
        return gone


Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # of a call as they came


class ServedCall(NamedTuple):
    """How a call was served.

    Attributes:
        key: The key of its executable.
        sizes: The first argument of the executable, on the device; None if it runs exact.
        finish: Makes the result of the call from that of the executable, or None.
        line: Counts calls like it.
        clock: Tells when such a call has to take the slow path again; None for never.
    """

    key: Any
    sizes: Any
    finish: Change | None
    line: CallCounter
    clock: bucket_handler.Clock | None = None


def make_handler(
    layout: Layout,
    slot: Slot[Executable],
    leaves: Leaves,
    hosts: Sequence[bucket_handler.Where],
    served: ServedCall,
) -> bucket_handler.Handler:
    """The handler for calls like one that was just served."""
    entry = slot.entry
    shapes, placed, reused, is_checked = dict[int, Any](), dict[int, Any](), frozenset[int](), False
    if entry is not None:
        shapes, placed, reused = dict(entry.pads), dict(entry.placed), entry.reused_leaves
        is_checked = entry.is_checked_after_runs
    pads, gives = [], []
    for argument in layout.opened:
        where, places = argument.where, argument.leaves
        wanted = []
        for position, leaf in places:
            value = leaves[leaf]
            shape = shapes.get(leaf)
            if isinstance(value, Padded):
                wanted.append((position, padder(value, shape or value.sizes)))
            elif shape is not None and value.shape != shape and leaf in placed:
                place = functools.partial(pad_to_place, shape=shape, sharding=placed[leaf])
                wanted.append((position, place))
            elif shape is not None and value.shape != shape:
                wanted.append((position, padder(value, shape)))
        if wanted:
            pads.append((where, None if argument.is_bare else argument.tree, tuple(wanted)))
        if reused and (donated := [position for position, leaf in places if leaf in reused]):
            gives.append((where, donated))
    prepare = bucket_handler.preparing(pads, hosts, layout.without_statics)
    counted = bucket_handler.counting(slot, served.line)
    after = bucket_handler.afterwards(gives)
    serve = bucket_handler.serving(
        slot, counted, served.sizes, prepare, after, served.finish, is_checked
    )
    serve = serve if served.clock is None else bucket_handler.until(served.clock, serve)
    return bucket_handler.Handler(slot, served.line, serve)
