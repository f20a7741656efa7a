"""Makes the functions by which a handler of the fast path serves calls with one set of shapes.

A handler is for exact shapes, so it stays right whatever is learnt of the function later.
Arguments without open axes (400 parameter arrays, say) are checked by the C++ argument check of
``jax.jit``. If that would retrace, `SignatureChanged` sends the call to the slow path.

Between two calls the caches of the processor are overwritten, so loading an object costs more than
what is done with it. That is why everything is decided when the handler is made, and why the
functions here return closures: a call then loads one function and its cells, and no attributes of
several objects.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.results import Change
from bucketjit._compile.cache import Slot
from bucketjit._compile.executable import Executable, SignatureChanged
from bucketjit._jax.compiler import failed_running
from bucketjit._runtime.counters import CallCounter

_now = time.monotonic

Where = int | str  # position or name of an argument

Prepared = tuple[Sequence[Any], Mapping[str, Any]]  # arguments as the executable takes them

Prepare = Callable[[Sequence[Any], Mapping[str, Any]], Prepared]  # of the arguments of a call

After = Callable[[Sequence[Any], Mapping[str, Any]], None]  # called when the executable has run

Serve = Callable[[Sequence[Any], Mapping[str, Any]], Any]  # from arguments to the result


class Evicted(Exception):
    """The executable of a handler has left the cache; the call takes the slow path."""


class Handler:
    """Serves calls with one set of shapes by one executable."""

    __slots__ = ("line", "serve", "slot")

    def __init__(self, slot: Slot[Executable], line: CallCounter, serve: Serve) -> None:
        self.slot = slot
        self.line = line
        self.serve = serve

    @property
    def is_alive(self) -> bool:
        return self.slot.entry is not None


class Clock:
    """Tells handlers when a call has to take the slow path, or all have to (``is_over``)."""

    __slots__ = ("is_over", "runs_out")

    def __init__(self, calls: int) -> None:
        self.is_over = False
        self.wind(calls)

    def end(self) -> None:
        self.is_over = True
        self.wind(0)

    def wind(self, calls: int) -> None:
        """Let so many calls pass."""
        ticks = itertools.chain(itertools.repeat(False, calls), itertools.repeat(True))
        self.runs_out = ticks.__next__  # one C call, which is atomic


def counting(slot: Slot[Executable], line: CallCounter) -> Callable[[], None]:
    """A function that counts one call: a hit of the slot, and a call of the counter."""
    use, count, now, also = slot.uses.add, line.calls.add, _now, line.also
    history = line.history
    taken = -1 if history.held else history.taken

    def counted() -> None:
        nonlocal taken
        if history.taken != taken:  # a snapshot was taken since the last call
            taken = history.keep(slot, line)
        slot.last_used = now()
        use()
        count()
        if also is not None:
            also()

    return counted


def serving(
    slot: Slot[Executable],
    counted: Callable[[], None],
    sizes: object,
    prepare: Prepare | None,
    after: After | None,
    finish: Change | None,
    is_checked: bool = False,
) -> Serve:
    """A function that serves a call; see `Handler`."""
    lead = () if sizes is None else (sizes,)

    def serve(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        entry = slot.entry  # read once: another thread may evict it during the call
        if entry is None:
            raise Evicted
        values, named = (args, kwargs) if prepare is None else prepare(args, kwargs)
        function = entry.function
        try:
            result = function(*lead, *values, **named) if named else function(*lead, *values)
        except Exception as error:
            if failed_running(error):  # an error of the run counts, one of the arguments does not
                counted()
            raise
        # jit compiles once more for arguments that are placed differently than before. Its own
        # cache has grown then, and a warm call has to compare only that number.
        if entry.count_signatures() != entry.signatures:
            entry.note_compiles(values, named)
        if is_checked and finish is not None:
            result = finish(result)
        counted()
        if after is not None:
            after(args, kwargs)
        return result if finish is None or is_checked else finish(result)

    return serve


def until(clock: Clock, serve: Serve) -> Serve:
    """A function that serves calls until a clock runs out; see `bucketjit._runtime.learning`."""

    def serve_or_not(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if clock.runs_out():
            raise Evicted
        return serve(args, kwargs)

    return serve_or_not


def preparing(
    pads: Sequence[tuple[Where, Any, Sequence[tuple[int, Change]]]],
    hosts: Sequence[Where],
    without_statics: Prepare | None,
) -> Prepare | None:
    """A function that makes the arguments of the executable from those of a call."""
    if not pads and not hosts:
        return without_statics
    # The most frequent case gets a shorter function: only bare positional arguments to pad.
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
            args, kwargs = padded(args, kwargs, pads)
        return (args, kwargs) if without_statics is None else without_statics(args, kwargs)

    return prepare


def _check_hosts(hosts: Sequence[Where], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for where in hosts:
        value = args[where] if isinstance(where, int) else kwargs[where]
        for leaf in (value,) if type(value) is np.ndarray else jax.tree_util.tree_leaves(value):
            if isinstance(leaf, np.ndarray) and not (
                type(leaf) is np.ndarray and leaf.dtype.isnative
            ):
                raise SignatureChanged


def afterwards(gives: Sequence[tuple[Where, Sequence[int]]]) -> After | None:
    """A function that gives away leaves of the arguments of a call when the executable has run."""
    if not gives:
        return None

    def after(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for where, leaves in gives:
            flat = jax.tree_util.tree_leaves(
                args[where] if isinstance(where, int) else kwargs[where]
            )
            give_away(map(flat.__getitem__, leaves))

    return after


def give_away(leaves: Iterable[Any]) -> None:
    """Delete the arrays of donated arguments, as ``jax.jit`` does with unpadded ones."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array | Padded):
            leaf.delete()


def padded(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    pads: Sequence[tuple[Where, Any, Sequence[tuple[int, Change]]]],
) -> Prepared:
    """The arguments of a call with some leaves padded; those that came are left alone."""
    values = list(args)
    if kwargs:  # copied: the caller may hold and use the dict
        kwargs = dict(kwargs)
    for where, tree, leaves in pads:
        place: Any = values if type(where) is int else kwargs
        if tree is None:
            place[where] = leaves[0][1](place[where])
            continue
        flat = tree.flatten_up_to(place[where])
        for leaf, padder in leaves:
            flat[leaf] = padder(flat[leaf])
        place[where] = tree.unflatten(flat)
    return values, kwargs
