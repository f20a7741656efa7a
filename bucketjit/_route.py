"""The warm path: from arguments to executable without flattening them.

A route knows where in the arguments of one signature the open axes are, and looks at nothing
else; a plan is what it found out for one set of shapes. Everything that has no open axes (400
parameter arrays, say) is checked by the executable's own C++ argument check, whose refusal
(`SignatureChanged`) sends the call to the slow path.

A plan is for exact shapes, so it stays right whatever is learnt of the function later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from bucketjit import _jax
from bucketjit._cache import Slot
from bucketjit._executable import Executable, SignatureChanged
from bucketjit._padded import Padded
from bucketjit._padding import pad
from bucketjit._results import Change
from bucketjit._signing import Signed
from bucketjit._stats import Line

_MEMO_LIMIT = 16384
_MAX_ROUTES = 64
_ALTERNATIVES = 16  # plans for the same shapes, where other things of the signature differ

X = TypeVar("X")
Where = int | str  # position or name of an argument
Reader = Callable[[Any], Hashable]  # what a plan depends on of an argument; None: look closer

_ARRAY = np.ndarray
_DEVICE_ARRAY = _jax.CONCRETE_ARRAY
_now = time.monotonic


class Evicted(Exception):
    """The executable of a plan has left the cache."""


class Opened(NamedTuple):
    """An argument with open axes.

    Attributes:
        where: Its position or name.
        tree: Its tree.
        leaves: ``(leaf among those of the argument, leaf of the call)`` for each with open axes.
    """

    where: Where
    tree: Any
    leaves: tuple[tuple[int, int], ...]

    @property
    def is_bare(self) -> bool:
        """Whether it is an array and not a container."""
        return jax.tree_util.treedef_is_leaf(self.tree)

    @property
    def read(self) -> Reader:
        """What a plan depends on of it."""
        if self.is_bare:
            return _read
        return _container_reader(self.tree, [i for i, _ in self.leaves])


class Way(Protocol):
    """What serves calls with one set of shapes: a `Plan`, or one plan for each chunk of a call.

    Attributes:
        following: What to try where this refuses a call.
        is_alive: Whether its executables are in the cache.
        slots: Where the executables are.
        lines: Count the calls.
    """

    following: Way | None

    @property
    def is_alive(self) -> bool: ...

    @property
    def slots(self) -> tuple[Slot[Executable], ...]: ...

    @property
    def lines(self) -> tuple[Line, ...]: ...

    def serve(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...


class Plan:
    """How calls with one set of shapes are served.

    Args:
        slot: Where the executable is.
        sizes: What it takes before the arguments, on the device; None where it runs exact.
        pads: ``(where, tree, ((leaf, padded shape), ...))`` for each argument to pad; the tree is
            None for a bare array.
        gives: Arguments to delete after the call: they were donated, by way of a padded copy.
        finish: What is done to the result, or None.
        line: Counts the calls.
        route: Where the static arguments are.
        note: Told of each call.
        hosts: See `host_arguments`.

    Attributes:
        following: The plan to try where this one's executable refuses what has no open axes.
    """

    __slots__ = (
        "_after",
        "_changes",
        "_clock",
        "_count",
        "_finish",
        "_gives",
        "_hosts",
        "_note",
        "_pads",
        "_route",
        "_sizes",
        "following",
        "line",
        "slot",
    )

    def __init__(
        self,
        slot: Slot[Executable],
        sizes: Any,
        pads: Sequence[tuple[Where, Any, tuple[tuple[int, tuple[int, ...]], ...]]],
        gives: Sequence[Where],
        finish: Change | None,
        line: Line,
        route: Route,
        note: Callable[[], None] | None = None,
        hosts: Sequence[Where] = (),
    ) -> None:
        self._hosts = tuple(hosts)
        self.slot = slot
        self.following: Way | None = None
        self._sizes = sizes
        self._pads = tuple(pads)
        self._gives = tuple(gives)
        self._finish = finish
        self._route = route if route.dynamic is not None or route.static_names else None
        self._note = note
        self._changes = bool(self._pads) or self._route is not None
        self._after = bool(self._gives) or note is not None
        self._count = line.calls.add
        self._clock = line.clock
        self.line = line

    @property
    def is_alive(self) -> bool:
        """Whether its executable is in the cache."""
        return self.slot.entry is not None

    @property
    def slots(self) -> tuple[Slot[Executable], ...]:
        """Where its executable is."""
        return (self.slot,)

    @property
    def lines(self) -> tuple[Line, ...]:
        """Counts the calls."""
        return (self.line,)

    def serve(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Serve a call.

        Raises:
            Evicted: The executable has left the cache.
            SignatureChanged: What has no open axes is not as it was.
        """
        slot = self.slot
        entry = slot.entry
        if entry is None:
            raise Evicted
        if self._hosts:
            _check_hosts(self._hosts, args, kwargs)
        values: Any = args
        given = kwargs
        if self._changes:
            if self._pads:
                values, kwargs = changed(args, kwargs, self._pads, pad)
            if self._route is not None:
                values, kwargs = self._route.without_statics(values, kwargs)
        if kwargs or self._sizes is None:
            lead = () if self._sizes is None else (self._sizes,)
            result = entry.function(*lead, *values, **kwargs)
        else:
            result = entry.function(self._sizes, *values)
        if entry.count_signatures() != entry.signatures:
            entry.note_compiles(values, kwargs)
        slot.last_used = now = _now()
        slot.uses.add()
        self._count()
        if now >= self._clock.due:
            self._clock.tick(now)
        if self._after:
            if self._gives:
                give_away([args[w] if isinstance(w, int) else given[w] for w in self._gives])
            if self._note is not None:
                self._note()
        return result if self._finish is None else self._finish(result)


def changed(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arguments: Sequence[tuple[Where, Any, Sequence[tuple[int, X]]]],
    change: Callable[[Any, X], Any],
) -> tuple[list[Any], Mapping[str, Any]]:
    """The arguments of a call with some leaves changed.

    Args:
        args: The positional arguments.
        kwargs: Those by name.
        arguments: ``(where, tree, ((leaf, what), ...))`` for each argument to change; the tree is
            None for a bare array.
        change: Makes a leaf of a leaf and its ``what``.
    """
    values = list(args)
    if kwargs:
        kwargs = dict(kwargs)
    for where, tree, leaves in arguments:
        place: Any = values if type(where) is int else kwargs
        if tree is None:
            place[where] = change(place[where], leaves[0][1])
            continue
        flat = tree.flatten_up_to(place[where])
        for leaf, what in leaves:
            flat[leaf] = change(flat[leaf], what)
        place[where] = tree.unflatten(flat)
    return values, kwargs


def give_away(values: Sequence[Any]) -> None:
    """Delete the arrays of donated arguments, as a call does that takes them without padding."""
    for value in jax.tree_util.tree_leaves(values):
        if isinstance(value, jax.Array | Padded):
            value.delete()


class Layout(NamedTuple):
    """Where in the arguments of a call the open axes are.

    Attributes:
        arity: Number of positional arguments.
        names: Names of the keyword arguments.
        dynamic: Positions of the arguments that are not static; None if all are dynamic.
        statics: Where the static arguments are.
        opened: The arguments with open axes.
    """

    arity: int
    names: tuple[str, ...]
    dynamic: tuple[int, ...] | None
    statics: tuple[Where, ...]
    opened: tuple[Opened, ...]


class Route:
    """The plans of all calls of one layout.

    Attributes:
        layout: Where the open axes are.
        dynamic: Positions of the arguments that are not static; None if all are dynamic.
        static_names: Names of the static ones.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.dynamic = layout.dynamic
        self.static_names = frozenset(w for w in layout.statics if isinstance(w, str))
        self._plans: dict[Hashable, Way] = {}
        readers = [(o.where, o.read) for o in layout.opened]
        readers += [(where, _read_static) for where in layout.statics]
        self._key: Callable[[Sequence[Any], Mapping[str, Any]], Hashable]
        if len(readers) == 1 and isinstance(readers[0][0], int) and not layout.names:
            self._key = _key_of_one(layout.arity, readers[0][0], readers[0][1])
        else:
            self._key = _key_of_several(layout.arity, frozenset(layout.names), readers)

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Way | None:
        """The plan of a call; None if there is none, or the call is another route's."""
        return self._plans.get(self._key(args, kwargs))

    def ways(self) -> list[Way]:
        """All there are."""
        found = []
        for plan in list(self._plans.values()):
            following: Way | None = plan
            while following is not None:
                found.append(following)
                following = following.following
        return found

    def without_statics(
        self, values: Any, kwargs: Mapping[str, Any]
    ) -> tuple[Any, Mapping[str, Any]]:
        """The arguments that the executable takes."""
        if self.dynamic is not None:
            values = [values[i] for i in self.dynamic]
        if self.static_names:
            kwargs = {k: v for k, v in kwargs.items() if k not in self.static_names}
        return values, kwargs

    def remember(self, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Way) -> Sequence[Way]:
        """Serve calls like this one by a plan. Returns the plans that had to give way."""
        gone: list[Way] = []
        if len(self._plans) >= _MEMO_LIMIT:
            gone += self.ways()
            self._plans = {}
        key = self._key(args, kwargs)
        kept: list[Way] = []
        old = self._plans.get(key)
        while old is not None:
            stays = old.is_alive and old.slots != plan.slots
            (kept if stays and len(kept) < _ALTERNATIVES else gone).append(old)
            old = old.following
        plan.following = None
        for other in reversed(kept):
            other.following, plan.following = plan.following, other
        self._plans[key] = plan
        return gone


def _key_of_one(arity: int, where: int, read: Reader) -> Callable[..., Hashable]:
    def key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        if kwargs or len(args) != arity:
            return None
        value = args[where]
        if type(value) is _DEVICE_ARRAY and read is _read:  # the same, without another call
            aval = value.aval
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
    """All routes of an executor.

    Attributes:
        known: The routes, the latest first.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: list[Route] = []

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Way | None:
        """The way to serve a call; None if none is known."""
        for route in self.known:
            way = route.find(args, kwargs)
            if way is not None:
                return way
        return None

    def of(self, layout: Layout) -> tuple[Route, list[Way]]:
        """The route of a layout, and what had to give way for it."""
        for route in self.known:
            if route.layout == layout:
                return route, []
        route = Route(layout)
        dropped = self.known[_MAX_ROUTES - 1 :]
        self.known = [route, *self.known][:_MAX_ROUTES]
        return route, [way for old in dropped for way in old.ways()]

    def clear(self) -> list[Way]:
        """Forget all of them. Returns the ways there were."""
        routes, self.known = self.known, []
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


def arguments_of(
    signed: Signed, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Where, list[Any], Any, int]]:
    """The arguments of a call that are not static.

    Yields:
        Where it is, its leaves, its tree, and the position of its first leaf in the call.
    """
    arguments: list[tuple[Where, Any]] = [(i, args[i]) for i in signed.dynamic]
    arguments += [(k, kwargs[k]) for k in sorted(kwargs) if k not in signed.statics.keyword]
    start = 0
    for where, value in arguments:
        flat, tree = jax.tree_util.tree_flatten(value)
        yield where, flat, tree, start
        start += len(flat)


def layout_of(
    signed: Signed, is_open: Sequence[bool], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Layout | None:
    """Where the open axes of a call are, or None where the slow path must look closer.

    Args:
        signed: The call, signed.
        is_open: Whether each of its leaves has open axes, or is a size itself.
        args: All positional arguments.
        kwargs: All keyword arguments.

    Returns:
        The layout; None if an array with open axes is of a kind that is not read fast.
    """
    opened: list[Opened] = []
    for where, flat, tree, start in arguments_of(signed, args, kwargs):
        own = is_open[start : start + len(flat)]
        for leaf, leaf_is_open in zip(flat, own, strict=True):
            if isinstance(leaf, Padded) if not leaf_is_open else _read(leaf) is None:
                return None
        places = tuple((i, start + i) for i, o in enumerate(own) if o)
        if places:
            opened.append(Opened(where, tree, places))
    if not opened:
        return None
    dynamic = None if len(signed.dynamic) == len(args) else tuple(signed.dynamic)
    statics: tuple[Where, ...] = (*signed.statics.positional, *signed.statics.keyword)
    return Layout(len(args), tuple(sorted(kwargs)), dynamic, statics, tuple(opened))


def make_plan(
    route: Route,
    slot: Slot[Executable],
    sizes: Any,
    leaves: Sequence[Any],
    finish: Change | None,
    line: Line,
    note: Callable[[], None] | None = None,
    hosts: Sequence[Where] = (),
) -> Plan:
    """How a route serves calls like one that was just served.

    Args:
        route: The route.
        slot: Where the executable is.
        sizes: What the executable takes before the arguments, or None.
        leaves: The leaves of the call, as they came.
        finish: What is done to the result.
        line: Counts the calls.
        note: Told of each call.
        hosts: See `host_arguments`.
    """
    entry = slot.entry
    shapes = dict(entry.pads) if entry is not None else {}
    donated = entry.donated_leaves if entry is not None else frozenset()
    pads, gives = [], []
    for argument in route.layout.opened:
        where, places = argument.where, argument.leaves
        wanted = []
        for own, leaf in places:
            value = leaves[leaf]
            shape = shapes.get(leaf)
            if isinstance(value, Padded):
                wanted.append((own, shape or value.sizes))
            elif shape is not None and value.shape != shape:
                wanted.append((own, shape))
        if wanted:
            pads.append((where, None if argument.is_bare else argument.tree, tuple(wanted)))
        if any(leaf in donated for _, leaf in places):
            gives.append(where)
    return Plan(slot, sizes, pads, gives, finish, line, route, note, hosts)


def host_arguments(
    signed: Signed, is_open: Sequence[bool], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Where]:
    """The arguments that hold NumPy arrays without open axes.

    They have to be looked at: a jitted function that knows a NumPy array takes one of the other
    byte order for the same, and reads its bytes as they are; and it does not see masks.
    """
    found: list[Where] = []
    for where, flat, _, start in arguments_of(signed, args, kwargs):
        own = is_open[start : start + len(flat)]
        if any(type(x) is _ARRAY and not o for x, o in zip(flat, own, strict=True)):
            found.append(where)
    return found


def _check_hosts(hosts: Sequence[Where], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for where in hosts:
        value = args[where] if isinstance(where, int) else kwargs[where]
        for leaf in (value,) if type(value) is _ARRAY else jax.tree_util.tree_leaves(value):
            if isinstance(leaf, _ARRAY) and not (type(leaf) is _ARRAY and leaf.dtype.isnative):
                raise SignatureChanged


def _read_static(value: Any) -> Hashable:
    return type(value), value


def _read(value: Any) -> Hashable:
    kind = type(value)
    if kind is _DEVICE_ARRAY:
        aval = value.aval
        return aval.shape, aval.dtype, aval.weak_type
    if kind is _ARRAY:
        return value.shape, value.dtype
    if kind is Padded:
        array = value.array
        return value.sizes, array.shape, array.dtype, value.weak_type, type(array)
    return value if kind is int else None


def _container_reader(tree: Any, places: Sequence[int]) -> Reader:
    flatten = jax.tree_util.tree_flatten

    def read(value: Any) -> Hashable:
        leaves, given = flatten(value)
        if given != tree:
            return None
        parts = [_read(leaves[i]) for i in places]
        return None if None in parts else tuple(parts)

    return read


def elements(pads: Sequence[tuple[int, tuple[int, ...]]], leaves: Sequence[Any]) -> tuple[int, int]:
    """Real elements of the padded arguments of a call, and all of them."""
    real = sum(leaves[i].size for i, _ in pads)
    return real, sum(math.prod(shape) for _, shape in pads)
