"""The warm path: from arguments to a plan without flattening them.

A route knows where in the arguments of one signature the open axes are, and looks at nothing
else; a plan (`bucketjit._runtime.fast_path.plan`) is what it found out for one set of shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import padder
from bucketjit._arrays.results import Change
from bucketjit._compile.cache_slot import Slot
from bucketjit._compile.executable import Executable
from bucketjit._runtime.counters import Line
from bucketjit._runtime.fast_path.handler import Way, Where
from bucketjit._runtime.fast_path.layout import Layout
from bucketjit._runtime.fast_path.plan import (
    Plan,
    afterwards,
    binding,
    counting,
    preparing,
    serving,
)
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


class Route:
    """The plans of all calls of one layout.

    Attributes:
        layout: Where the open axes are.
        key: What a plan depends on, of the arguments of a call; None for calls of other routes.
        plans: The ways to serve calls, by key.
        following: The route to try where this one has no way; None if it is the last.
    """

    __slots__ = ("_look_through_at", "following", "key", "layout", "plans")

    def __init__(self, layout: Layout, following: Route | None) -> None:
        self.layout = layout
        self.following = following
        self.plans: dict[Hashable, Way] = {}
        self._look_through_at = _LOOKED_THROUGH
        readers = [(o.where, o.read) for o in layout.opened]
        readers += [(where, reading_static) for where in layout.statics]
        self.key: Callable[[Sequence[Any], Mapping[str, Any]], Hashable]
        if len(readers) == 1 and isinstance(readers[0][0], int) and not layout.names:
            self.key = _key_of_one(layout.arity, readers[0][0], readers[0][1])
        else:
            self.key = _key_of_several(layout.arity, frozenset(layout.names), readers)

    def ways(self) -> list[Way]:
        """All there are."""
        return [way for first in list(self.plans.values()) for way in _chain(first)]

    def remember(self, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Way) -> Sequence[Way]:
        """Serve calls like this one by a plan. Returns the plans that had to give way."""
        gone: list[Way] = []
        if len(self.plans) >= _MEMO_LIMIT:
            gone += self.ways()
            self.plans.clear()
        if len(self.plans) >= self._look_through_at:
            gone += self._without_executable()
        key = self.key(args, kwargs)
        kept: list[Way] = []
        for old in _chain(self.plans.get(key)):
            stays = old.is_alive and old.slots != plan.slots
            (kept if stays and len(kept) < _ALTERNATIVES else gone).append(old)
        plan.following = None
        for other in reversed(kept):
            other.following, plan.following = plan.following, other
        self.plans[key] = plan
        return gone

    def _without_executable(self) -> list[Way]:
        """Let go of the plans whose executables have all left the cache. Returns them."""
        gone: list[Way] = []
        for key, first in list(self.plans.items()):
            ways = list(_chain(first))
            if not any(way.is_alive for way in ways):
                del self.plans[key]
                gone += ways
        self._look_through_at = max(_LOOKED_THROUGH, 2 * len(self.plans))
        return gone


def _chain(way: Way | None) -> Iterator[Way]:
    """A way, and those to try where it refuses a call."""
    while way is not None:
        yield way
        way = way.following


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


class Routes:
    """All routes of an executor, each followed by an older one.

    Attributes:
        latest: The latest route; None if there is none.
    """

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest: Route | None = None

    def __iter__(self) -> Iterator[Route]:
        route = self.latest
        while route is not None:
            yield route
            route = route.following

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Way | None:
        """The way to serve a call; None if none is known."""
        for route in self:
            way = route.plans.get(route.key(args, kwargs))
            if way is not None:
                return way
        return None

    def of(self, layout: Layout) -> tuple[Route, list[Way]]:
        """The route of a layout, and what had to give way for it."""
        known = list(self)
        for route in known:
            if route.layout == layout:
                return route, []
        if len(known) < _MAX_ROUTES:
            dropped = []
        else:
            known[_MAX_ROUTES - 2].following = None
            dropped = known[_MAX_ROUTES - 1 :]
        self.latest = Route(layout, self.latest)
        return self.latest, [way for old in dropped for way in old.ways()]

    def clear(self) -> list[Way]:
        """Forget all of them. Returns the ways there were."""
        routes, self.latest = list(self), None
        return [way for route in routes for way in route.ways()]


class Given(NamedTuple):
    """The arguments of a call as they came.

    Attributes:
        args: The positional ones.
        kwargs: Those by name.
        routes: Where the way to serve others like it is kept.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    routes: Routes


def make_plan(
    layout: Layout,
    slot: Slot[Executable],
    sizes: Any,
    leaves: Sequence[Any],
    finish: Change | None,
    line: Line,
    note: Callable[[], None] | None = None,
    hosts: Sequence[Where] = (),
    joined: bool = False,
) -> Plan:
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
    return Plan(slot, line, serve, bind)
