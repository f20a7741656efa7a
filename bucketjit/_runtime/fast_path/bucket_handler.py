"""How calls with one set of shapes are served: the warm path, once the plan is found.

A plan is for exact shapes, so it stays right whatever is learnt of the function later. Everything
that has no open axes (400 parameter arrays, say) is checked by the executable's own C++ argument
check, whose refusal (`SignatureChanged`) sends the call to the slow path.

Between two calls the caches of the processor are filled with other things, and each object that is
looked at costs more than what is done with it. So what a plan needs is decided when it is made, and
held by one function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import pad
from bucketjit._arrays.results import Change
from bucketjit._compile.cache_slot import Slot
from bucketjit._compile.executable import Executable, SignatureChanged
from bucketjit._jax.compiler import failed_running
from bucketjit._runtime.counters import CallCounter
from bucketjit._runtime.fast_path.handler import (
    After,
    Bind,
    Evicted,
    Handler,
    Own,
    Part,
    Prepare,
    Prepared,
    Serve,
    Where,
)

X = TypeVar("X")

_now = time.monotonic


class BucketHandler:
    """A way by one executable.

    Args:
        slot: Where it is.
        line: Counts the calls.
        serve: Serves a call; see `serving`.
        bind: Serves the chunks of a call; see `binding`.
    """

    __slots__ = ("bind", "next", "line", "serve", "slot")

    def __init__(
        self, slot: Slot[Executable], line: CallCounter, serve: Serve, bind: Bind | None = None
    ) -> None:
        self.slot = slot
        self.line = line
        self.serve = serve
        self.bind = bind
        self.next: Handler | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its executable is in the cache."""
        return self.slot.entry is not None

    @property
    def slots(self) -> tuple[Slot[Executable], ...]:
        """Where its executable is."""
        return (self.slot,)

    @property
    def lines(self) -> tuple[CallCounter, ...]:
        """Counts the calls."""
        return (self.line,)


def counting(slot: Slot[Executable], line: CallCounter) -> Callable[[], None]:
    """What counts a call of a plan."""
    use, count, clock, now = slot.uses.add, line.calls.add, line.clock, _now

    def counted() -> None:
        slot.last_used = moment = now()
        use()
        count()
        if moment >= clock.due:
            clock.tick(moment)

    return counted


def serving(
    slot: Slot[Executable],
    counted: Callable[[], None],
    sizes: object,
    prepare: Prepare | None,
    after: After | None,
    finish: Change | None,
    joined: bool = False,
) -> Serve:
    """What serves the calls of a plan.

    Args:
        slot: Where the executable is. It is not held itself: it may leave the cache.
        counted: See `counting`.
        sizes: What it takes before the arguments, on the device; None where it runs exact.
        prepare: Makes its arguments of those of the call; None if they are the same.
        after: Told of the arguments when it has taken them.
        finish: What is done to the result.
        joined: Whether it is of a chunk, and will be joined with those of others on the host.
    """
    lead = () if sizes is None else (sizes,)

    def serve(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        entry = slot.entry
        if entry is None:
            raise Evicted
        values, named = (args, kwargs) if prepare is None else prepare(args, kwargs)
        function = entry.to_host if joined else entry.function
        try:
            result = function(*lead, *values, **named) if named else function(*lead, *values)
        except Exception as error:
            if failed_running(error):
                counted()
            raise
        if entry.count_signatures() != entry.signatures:
            entry.note_compiles(values, named)
        counted()
        if after is not None:
            after(args, kwargs)
        return result if finish is None else finish(result)

    return serve


def binding(
    slot: Slot[Executable],
    counted: Callable[[], None],
    sizes: object,
    hosts: Sequence[Where],
    without_statics: Prepare | None,
    note: Callable[[], None] | None,
    finish: Change | None,
) -> Bind:
    """What serves the chunks of a call by a plan; see `Handler` and `Part`.

    Args:
        slot: See `serving`.
        counted: See `serving`.
        sizes: See `serving`.
        hosts: See `preparing`.
        without_statics: See `preparing`.
        note: Told of each chunk.
        finish: See `serving`.
    """

    def bind(args: Sequence[Any], kwargs: Mapping[str, Any], cut: Sequence[int]) -> Part | None:
        entry = slot.entry
        if entry is None:
            raise Evicted
        if entry.bind is None:
            return None
        if hosts:
            _check_hosts(hosts, args, kwargs)
        if without_statics is not None:
            args, kwargs = without_statics(args, kwargs)
        shapes = dict(entry.pads)
        common = {i: shape for i, shape in entry.pads if i not in cut}
        bound = entry.bind(sizes, args, kwargs, common)
        if bound is None:
            return None

        def serve(own: Own) -> Any:
            values = [(i, pad(x, shapes[i]) if i in shapes else x) for i, x in own]
            try:
                result = bound.run(values)
            except Exception as error:
                if failed_running(error):
                    counted()
                raise
            if entry.count_signatures() != entry.signatures:
                entry.note_compiles(*bound.arguments)
            counted()
            if note is not None:
                note()
            return result if finish is None else finish(result)

        return Part(bound.leaves, serve)

    return bind


def preparing(
    pads: Sequence[tuple[Where, Any, Sequence[tuple[int, Change]]]],
    hosts: Sequence[Where],
    without_statics: Prepare | None,
) -> Prepare | None:
    """What makes the arguments of the executable of those of a call; None if they are the same.

    Args:
        pads: ``(where, tree, ((leaf, padder), ...))`` for each argument to pad; the tree is None
            for a bare array.
        hosts: Arguments that hold NumPy arrays without open axes. They have to be looked at: a
            jitted function that knows a NumPy array takes one of the other byte order for the
            same, and reads its bytes as they are; and it does not see masks.
        without_statics: Leaves out the static arguments, if there are any.
    """
    if not pads and not hosts:
        return without_statics
    bare = [(w, leaves[0][1]) for w, tree, leaves in pads if tree is None and isinstance(w, int)]
    if len(bare) == len(pads) and not hosts and without_statics is None:

        def pad_bare(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
            values = list(args)
            for where, padder in bare:
                values[where] = padder(values[where])
            return values, kwargs

        return pad_bare

    def prepare(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
        if hosts:
            _check_hosts(hosts, args, kwargs)
        if pads:
            args, kwargs = changed(args, kwargs, pads, _padded_by)
        return (args, kwargs) if without_statics is None else without_statics(args, kwargs)

    return prepare


def _padded_by(value: object, padder: Change) -> Any:
    return padder(value)


def _check_hosts(hosts: Sequence[Where], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for where in hosts:
        value = args[where] if isinstance(where, int) else kwargs[where]
        for leaf in (value,) if type(value) is np.ndarray else jax.tree_util.tree_leaves(value):
            if isinstance(leaf, np.ndarray) and not (
                type(leaf) is np.ndarray and leaf.dtype.isnative
            ):
                raise SignatureChanged


def afterwards(gives: Sequence[Where], note: Callable[[], None] | None) -> After | None:
    """What is done with the arguments of a call when the executable has taken them.

    Args:
        gives: Arguments to delete: they were donated, by way of a padded copy.
        note: Told of each call.
    """
    if not gives and note is None:
        return None

    def after(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if gives:
            give_away([args[w] if isinstance(w, int) else kwargs[w] for w in gives])
        if note is not None:
            note()

    return after


def give_away(values: Sequence[Any]) -> None:
    """Delete the arrays of donated arguments, as a call does that takes them without padding."""
    for value in jax.tree_util.tree_leaves(values):
        if isinstance(value, jax.Array | Padded):
            value.delete()


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
