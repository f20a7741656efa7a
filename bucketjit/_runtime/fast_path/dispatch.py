"""The warm path: from arguments to a plan without flattening them.

A route knows where in the arguments of one signature the open axes are, and looks at nothing
else; a plan (`bucketjit._runtime.fast_path.bucket_handler`) is what it found out for one set of
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import padder
from bucketjit._arrays.results import Change
from bucketjit._compile.cache_slot import Slot
from bucketjit._compile.executable import Executable
from bucketjit._runtime.counters import CallCounter
from bucketjit._runtime.fast_path.bucket_handler import (
    BucketHandler,
    afterwards,
    binding,
    counting,
    preparing,
    serving,
)
from bucketjit._runtime.fast_path.handler import Handler, Where
from bucketjit._runtime.fast_path.layout import Layout
from bucketjit._runtime.fast_path.readers import (
    ARRAY,
    DEVICE_ARRAY,
    NAMED,
    Reader,
    reading,
    reading_static,
)

_MEMO_LIMIT = 16384

_MAX_ROUTES = 64

_LOOKED_THROUGH = 32  # plans, at which those without an executable are first looked for

_ALTERNATIVES = 16  # plans for the same shapes, where other things of the signature differ


class DispatchTable:
    """The plans of all calls of one layout.

    Attributes:
        layout: Where the open axes are.
        key: What a plan depends on, of the arguments of a call; None for calls of other fast_path.
        plans: The ways to serve calls, by key.
        following: The route to try where this one has no way; None if it is the last.
    """

    __slots__ = ("_look_through_at", "next", "key", "layout", "plans")

    def __init__(self, layout: Layout, next: DispatchTable | None) -> None:
        self.layout = layout
        self.next = next
        self.plans: dict[Hashable, Handler] = {}
        self._look_through_at = _LOOKED_THROUGH
        readers = [(o.where, o.read) for o in layout.opened]
        readers += [(where, reading_static) for where in layout.statics]
        self.key: Callable[[Sequence[Any], Mapping[str, Any]], Hashable]
        if len(readers) == 1 and isinstance(readers[0][0], int) and not layout.names:
            self.key = _key_of_one(layout.arity, readers[0][0], readers[0][1])
        else:
            self.key = _key_of_several(layout.arity, frozenset(layout.names), readers)

    def handlers(self) -> list[Handler]:
        """All there are."""
        return [handler for first in list(self.plans.values()) for handler in _chain(first)]

    def remember(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Handler
    ) -> Sequence[Handler]:
        """Serve calls like this one by a plan. Returns the plans that had to give way."""
        gone: list[Handler] = []
        if len(self.plans) >= _MEMO_LIMIT:
            gone += self.handlers()
            self.plans.clear()
        if len(self.plans) >= self._look_through_at:
            gone += self._without_executable()
        key = self.key(args, kwargs)
        kept: list[Handler] = []
        for old in _chain(self.plans.get(key)):
            stays = old.is_alive and old.slots != plan.slots
            (kept if stays and len(kept) < _ALTERNATIVES else gone).append(old)
        plan.next = None
        for other in reversed(kept):
            other.next, plan.next = plan.next, other
        self.plans[key] = plan
        return gone

    def _without_executable(self) -> list[Handler]:
        """Let go of the plans whose executables have all left the cache. Returns them."""
        gone: list[Handler] = []
        for key, first in list(self.plans.items()):
            handlers = list(_chain(first))
            if not any(handler.is_alive for handler in handlers):
                del self.plans[key]
                gone += handlers
        self._look_through_at = max(_LOOKED_THROUGH, 2 * len(self.plans))
        return gone


def _chain(handler: Handler | None) -> Iterator[Handler]:
    """A way, and those to try where it refuses a call."""
    while handler is not None:
        yield handler
        handler = handler.next


def _key_of_one(arity: int, where: int, read: Reader) -> Callable[..., Hashable]:
    def key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        if kwargs or len(args) != arity:
            return None
        value = args[where]
        if read is reading:  # the same for the most frequent, without another call
            kind = type(value)
            if kind is ARRAY:
                return value.shape, value.dtype
            if kind is DEVICE_ARRAY:
                aval = value.aval
                placed = value.sharding
                if type(placed) is NAMED:
                    return aval.shape, aval.dtype, aval.weak_type, placed
                return aval.shape, aval.dtype, aval.weak_type
        return read(value)

    return key


def _key_of_several(
    count: int, names: frozenset[str], readers: Sequence[tuple[Where, Reader]]
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
    """All fast_path of an executor, each followed by an older one.

    Attributes:
        latest: The latest route; None if there is none.
    """

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest: DispatchTable | None = None

    def __iter__(self) -> Iterator[DispatchTable]:
        table = self.latest
        while table is not None:
            yield table
            table = table.next

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Handler | None:
        """The way to serve a call; None if none is known."""
        for table in self:
            handler = table.plans.get(table.key(args, kwargs))
            if handler is not None:
                return handler
        return None

    def of(self, layout: Layout) -> tuple[DispatchTable, list[Handler]]:
        """The route of a layout, and what had to give way for it."""
        known = list(self)
        for table in known:
            if table.layout == layout:
                return table, []
        if len(known) < _MAX_ROUTES:
            dropped = []
        else:
            known[_MAX_ROUTES - 2].next = None
            dropped = known[_MAX_ROUTES - 1 :]
        self.latest = DispatchTable(layout, self.latest)
        return self.latest, [handler for old in dropped for handler in old.handlers()]

    def clear(self) -> list[Handler]:
        """Forget all of them. Returns the ways there were."""
        fast_path, self.latest = list(self), None
        return [handler for table in fast_path for handler in table.handlers()]


class CallArguments(NamedTuple):
    """The arguments of a call as they came.

    Attributes:
        args: The positional ones.
        kwargs: Those by name.
        fast_path: Where the way to serve others like it is kept.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    fast_path: FastPath


def make_handler(
    layout: Layout,
    slot: Slot[Executable],
    sizes: object,
    leaves: Sequence[Any],
    finish: Change | None,
    line: CallCounter,
    note: Callable[[], None] | None = None,
    hosts: Sequence[Where] = (),
    joined: bool = False,
) -> BucketHandler:
    """How to serve calls like one that was just served.

    Args:
        layout: Where its open axes are.
        slot: Where the executable is.
        sizes: What the executable takes before the arguments, or None.
        leaves: The leaves of the call, as they came.
        finish: What is done to the result.
        line: Counts the calls.
        note: Told of each call.
        hosts: See `host_arguments`.
        joined: See `serving`.
    """
    entry = slot.entry
    shapes = dict(entry.pads) if entry is not None else {}
    donated = entry.donated_leaves if entry is not None else frozenset()
    pads, gives = [], []
    for argument in layout.opened:
        where, places = argument.where, argument.leaves
        wanted = []
        for own, leaf in places:
            value = leaves[leaf]
            shape = shapes.get(leaf)
            if isinstance(value, Padded):
                wanted.append((own, padder(value, shape or value.sizes)))
            elif shape is not None and value.shape != shape:
                wanted.append((own, padder(value, shape)))
        if wanted:
            pads.append((where, None if argument.is_bare else argument.tree, tuple(wanted)))
        if any(leaf in donated for _, leaf in places):
            gives.append(where)
    prepare = preparing(pads, hosts, layout.without_statics)
    counted = counting(slot, line)
    serve = serving(slot, counted, sizes, prepare, afterwards(gives, note), finish, joined)
    bind = None
    if joined and entry is not None and entry.bind is not None:
        bind = binding(slot, counted, sizes, hosts, layout.without_statics, note, finish)
    return BucketHandler(slot, line, serve, bind)
