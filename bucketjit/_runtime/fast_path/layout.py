"""Describes where in the arguments of a call the open axes are.

A call is flattened once, on the slow path; its `Layout` then lets the fast path read the leaves
with open axes without flattening the other arguments.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._arrays.padded import Padded
from bucketjit._compile.cache import Slot
from bucketjit._compile.executable import Executable
from bucketjit._ir.dynamic_axes import places_of
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import CONCRETE_ARRAY, KEY_ARRAY, on_one_device
from bucketjit._runtime.fast_path.bucket_handler import Clock, Prepare, Prepared, Where
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import bind_sizes
from bucketjit.errors import ArgumentError

Reader = Callable[[Any], Hashable]  # returns a part of the key; None: take the slow path

ARRAY = np.ndarray

DEVICE_ARRAY = CONCRETE_ARRAY

NAMED = jax.sharding.NamedSharding

_KEY_ARRAY = KEY_ARRAY


def reading_static(value: object) -> Hashable:
    """The part of the key for a static argument: its type and value."""
    return type(value), value


def reading(value: Any) -> Hashable:
    """The part of the key for a leaf: shape and type; None if the slow path must handle it.

    Types are compared by identity, so an instance of a subclass, such as a masked array, takes the
    slow path.
    """
    kind = type(value)
    if kind is DEVICE_ARRAY:
        aval, placed = value.aval, value.sharding
        if type(placed) is NAMED:  # a mesh may split the array: its sharding is part of its type
            return aval.shape, aval.dtype, aval.weak_type, placed
        return aval.shape, aval.dtype, aval.weak_type
    if kind is ARRAY:
        return value.shape, value.dtype
    if kind is Padded:
        array = value.array
        return value.sizes, array.shape, array.dtype, value.weak_type, type(array)
    if kind is _KEY_ARRAY:
        return value.shape, value.dtype
    return value if kind is int else None


def container_reader(tree: PyTreeDef, places: Sequence[int]) -> Reader:
    """A function that reads some leaves of a container."""
    flatten = jax.tree_util.tree_flatten

    def read(value: object) -> Hashable:
        leaves, given = flatten(value)
        if given != tree:
            return None
        parts = [reading(leaves[i]) for i in places]
        return None if None in parts else tuple(parts)

    return read


class Opened(NamedTuple):
    """An argument with open axes.

    Attributes:
        where: Its position or name.
        tree: Its tree.
        leaves: For each leaf with open axes its position in the argument and in the call.
        is_bare: Whether it is a leaf and not a container.
    """

    where: Where
    tree: Any
    leaves: tuple[tuple[int, int], ...]
    is_bare: bool

    @property
    def read(self) -> Reader:
        """The function that reads, of such an argument, what a handler depends on."""
        if self.is_bare:
            return reading
        return container_reader(self.tree, [i for i, _ in self.leaves])


class Layout(NamedTuple):
    """Where in the arguments of a call the open axes are.

    Attributes:
        arity: Number of positional arguments.
        names: Names of the keyword arguments, sorted.
        dynamic: Positions of the positional arguments that are not static; None if none is static.
        statics: Positions and names of the static arguments.
        opened: The arguments with open axes.
    """

    arity: int
    names: tuple[str, ...]
    dynamic: tuple[int, ...] | None
    statics: tuple[Where, ...]
    opened: tuple[Opened, ...]

    def differs_from(self, other: Layout) -> bool:
        """Whether what is read of a call tells the two apart."""
        trees = {argument.where: argument.tree for argument in self.opened}
        is_like = (self.arity, self.names) == (other.arity, other.names)
        return not is_like or any(trees.get(o.where, o.tree) != o.tree for o in other.opened)

    @property
    def without_statics(self) -> Prepare | None:
        """A function that leaves out the static arguments; None if there are none."""
        if self.dynamic is None and not self.statics:
            return None
        dynamic, names = self.dynamic, {w for w in self.statics if isinstance(w, str)}

        def without(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
            if dynamic is not None:
                args = [args[i] for i in dynamic]
            if names:
                kwargs = {k: v for k, v in kwargs.items() if k not in names}
            return args, kwargs

        return without


class Argument(NamedTuple):
    """An argument of a call that is not static.

    Attributes:
        where: Its position or name.
        leaves: Its leaves.
        tree: Its tree.
        start: The position of its first leaf among the leaves of the call.
    """

    where: Where
    leaves: list[Any]
    tree: Any
    start: int

    def own(self, opened: Iterable[int]) -> list[int]:
        """The leaves of the argument among some leaves of the call, by position in the argument."""
        stop = self.start + len(self.leaves)
        return [leaf - self.start for leaf in opened if self.start <= leaf < stop]


def arguments_of(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Argument]:
    """The arguments of a call that are not static, flat, in the order of `Call.leaves`."""
    arguments: list[tuple[Where, Any]] = [(i, args[i]) for i in call.dynamic]
    arguments += [(k, kwargs[k]) for k in sorted(kwargs) if k not in call.statics.keyword]
    start = 0
    found = []
    for where, value in arguments:
        flat, tree = jax.tree_util.tree_flatten(value)
        found.append(Argument(where, flat, tree, start))
        start += len(flat)
    return found


def layout_of(
    call: Call,
    opened: Sequence[int],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arguments: Sequence[Argument],
) -> Layout | None:
    """The layout of a call."""
    if any(reading(call.leaves[leaf]) is None for leaf in opened):
        return None
    # A `Padded` array without open axes has to be cut to its logical sizes, which handlers do only
    # for arguments with open axes.
    if Padded in map(type, call.leaves):
        known = set(opened)
        if any(type(x) is Padded and i not in known for i, x in enumerate(call.leaves)):
            return None
    found = []
    for argument in arguments:
        places = tuple((own, argument.start + own) for own in argument.own(opened))
        if places:
            is_bare = jax.tree_util.treedef_is_leaf(argument.tree)
            found.append(Opened(argument.where, argument.tree, places, is_bare))
    if not found:  # nothing to read: calls of all shapes would have the same key
        return None
    dynamic = None if len(call.dynamic) == len(args) else tuple(call.dynamic)
    statics: tuple[Where, ...] = (*call.statics.positional, *call.statics.keyword)
    return Layout(len(args), tuple(sorted(kwargs)), dynamic, statics, tuple(found))


def host_arguments(arguments: Sequence[Argument], opened: Sequence[int]) -> list[Where]:
    """The arguments that hold NumPy arrays without open axes; `preparing` says why it matters."""
    found: list[Where] = []
    for argument in arguments:
        if ARRAY not in map(type, argument.leaves):
            continue
        own = set(argument.own(opened))
        if any(type(x) is ARRAY and i not in own for i, x in enumerate(argument.leaves)):
            found.append(argument.where)
    return found


# --- new sizes ---

# Serves the first call of new sizes by what an earlier call of other sizes has found.
#
# Such a call differs from the earlier one in the sizes of its open axes alone. So its arguments
# without open axes are not looked at: the argument check of ``jax.jit`` compares their types.


_MOST_LEAST = 8  # smallest sizes of calls in a learnt bucket that are kept

Leaves = Mapping[int, Any]  # the arguments with open axes, by position among all leaves


def kind_of(
    layout: Layout, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Hashable, Leaves] | None:
    """What calls that differ in sizes alone have in common, and the leaves with open axes.

    None for a call of another layout, and for one whose leaves the slow path must look at.
    """
    if len(args) != layout.arity or len(kwargs) != len(layout.names):
        return None
    if layout.names and kwargs.keys() != set(layout.names):
        return None
    leaves: dict[int, Any] = {}
    for argument in layout.opened:
        where = argument.where
        value = args[where] if isinstance(where, int) else kwargs[where]
        if argument.is_bare:
            flat = [value]
        else:
            flat, tree = jax.tree_util.tree_flatten(value)
            if tree != argument.tree:
                return None
        for own, leaf in argument.leaves:
            leaves[leaf] = flat[own]
    kinds: list[Hashable] = []
    for value in leaves.values():
        kind = type(value)
        if kind is ARRAY:
            kinds.append((value.dtype, value.ndim))
        elif kind in (DEVICE_ARRAY, Padded):
            aval = on_one_device(value.array if kind is Padded else value)
            if aval is None:
                return None
            kinds.append((kind, aval.dtype, aval.ndim, aval.weak_type))
        elif kind is int:
            kinds.append(int)
        else:
            return None
    for where in layout.statics:
        kinds.append(reading_static(args[where] if isinstance(where, int) else kwargs[where]))
    return tuple(kinds), leaves


class NewSizes(NamedTuple):
    """A call that differs from earlier ones in its sizes alone.

    Attributes:
        table: The table of its layout.
        call: The call, without its leaves.
        leaves: The arguments with open axes.
        hosts: The arguments that hold NumPy arrays without open axes.
        key: The key of the executable of its bucket.
        slot: The place of that executable in the cache.
    """

    table: Any
    call: Call
    leaves: Leaves
    hosts: Sequence[Where]
    key: Any
    slot: Slot[Executable]


class OtherSizes:
    """What calls have found that holds for calls of other sizes.

    A strategy is monotone, and a bucket is its own bucket. So all sizes from that of a call to its
    bucket have this bucket, and no strategy is asked. Where buckets are learnt, that holds until
    there are others, and then ``clock`` is over.
    """

    def __init__(
        self, call: Call, program: Interface, hosts: Sequence[Where], clock: Clock | None
    ) -> None:
        self._clock = clock
        self._like = dataclasses.replace(call, leaves=[], program=None)
        self._program = weakref.ref(program)  # an evicted one is not kept for this
        self._hosts = hosts
        self._known: dict[Any, tuple[list[tuple[int, ...]], tuple[int, ...], Slot[Executable]]]
        self._known = {}

    def holds(self, call: Call, clock: Clock | None) -> bool:
        """Whether what is known is of the program, the open axes and the buckets of a call."""
        is_of_program = call.program is self._program() and call.tokens is self._like.tokens
        return is_of_program and self._clock is clock

    def learn(
        self, sizes: tuple[int, ...], bucket: tuple[int, ...], key: Any, slot: Slot[Executable]
    ) -> None:
        """Note that calls from these sizes up to these padded ones have an executable."""
        _, *rest = key  # without the program
        least = self._known[tuple(rest)][0] if tuple(rest) in self._known else []
        if self._clock is None:  # each variable has buckets of its own
            least = [tuple(map(min, *least, sizes))] if least else [sizes]
        else:
            others = (one for one in least if not all(map(operator.le, sizes, one)))
            least = [*others, sizes][-_MOST_LEAST:]
        self._known[tuple(rest)] = least, bucket, slot

    def _bucket_of(self, sizes: tuple[int, ...]) -> tuple[Any, Slot[Executable]] | None:
        """The key of the bucket of these sizes, without its program, and its place."""
        for key, (least, most, slot) in list(self._known.items()):
            if all(map(operator.le, sizes, most)):
                for low in least:
                    if all(map(operator.le, low, sizes)):
                        return key, slot
        return None

    def at(self, table: Any, leaves: Leaves) -> NewSizes | None:
        """The call with these leaves; None if its bucket is not compiled, or not known."""
        program, like, signature = self._program(), self._like, self._like.signature
        tokens = like.tokens
        if program is None or signature.tokens is not tokens:
            return None
        if self._clock is not None and self._clock.is_over:
            return None
        shapes = list(like.shapes)
        for leaf, value in leaves.items():
            shapes[leaf] = (value,) if type(value) is int else value.shape
        for leaf, axis, _ in places_of(tokens).static:
            if leaf in leaves and shapes[leaf][axis] != like.shapes[leaf][axis]:
                return None
        try:
            sizes = bind_sizes(tokens, shapes, signature.paths)
            signature.check_constraints(sizes)
        except ArgumentError:  # the slow path may open an axis, or raises it again
            return None
        call = dataclasses.replace(like, shapes=shapes, sizes=sizes, program=program)
        ordered = call.ordered
        bucket = self._bucket_of(ordered)
        if bucket is None:
            return None
        if min(ordered) < 1 or not program.admits(sizes):
            return None
        program.check_reshapes(sizes)
        key, slot = (program, *bucket[0]), bucket[1]
        return NewSizes(table, call, leaves, self._hosts, key, slot)


def other_sizes(
    call: Call, hosts: Sequence[Where], clock: Clock | None = None
) -> OtherSizes | None:
    """What a call that was masked tells of other sizes; None if each size has its own results."""
    program = call.program
    if program is None or program.pairing is not None or program.computed:
        return None
    if call.tokens is not call.signature.tokens:  # an axis is empty
        return None
    return OtherSizes(call, program, hosts, clock)
