"""Describes where in the arguments of a call the open axes are.

A call is flattened once, on the slow path; its `Layout` then lets the fast path read the leaves
with open axes without flattening the other arguments.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

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

NAMED = jax.sharding.NamedSharding


def reading_static(value: object) -> Hashable:
    """The part of the key for a static argument: its type and value."""
    return type(value), value


def reading(value: Any) -> Hashable:
    """The part of the key for a leaf: shape and type; None if the slow path must handle it.

    Types are compared by identity, so an instance of a subclass, such as a masked array, takes the
    slow path.
    """
    kind = type(value)
    if kind is CONCRETE_ARRAY:
        aval, placed = value.aval, value.sharding
        if type(placed) is NAMED:  # a mesh may split the array: its sharding is part of its type
            return aval.shape, aval.dtype, aval.weak_type, placed
        return aval.shape, aval.dtype, aval.weak_type
    if kind is ARRAY:
        return value.shape, value.dtype
    if kind is Padded:
        array = value.array
        return value.sizes, array.shape, array.dtype, value.weak_type, type(array)
    if kind is KEY_ARRAY:
        return value.shape, value.dtype
    return value if kind is int else None


class Opened(NamedTuple):
    """An argument with open axes: for each leaf with some, its place in it and in the call."""

    where: Where
    tree: Any
    leaves: tuple[tuple[int, int], ...]
    is_bare: bool

    @property
    def read(self) -> Reader:
        """The function that reads, of such an argument, what a handler depends on."""
        if self.is_bare:
            return reading
        tree, places, flatten = self.tree, [i for i, _ in self.leaves], jax.tree_util.tree_flatten

        def read(value: object) -> Hashable:
            leaves, structure = flatten(value)
            if structure != tree:
                return None
            parts = [reading(leaves[i]) for i in places]
            return None if None in parts else tuple(parts)

        return read


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

    def differs_from(self, layout: Layout) -> bool:
        """Whether what is read of a call tells the two apart."""
        trees = {argument.where: argument.tree for argument in self.opened}
        is_like = (self.arity, self.names) == (layout.arity, layout.names)
        return not is_like or any(trees.get(o.where, o.tree) != o.tree for o in layout.opened)

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


def layout_of(
    call: Call, opened: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Layout, list[Where]] | None:
    """The layout of a call, and its arguments of NumPy without open axes; see `preparing`."""
    leaves, open_leaves = call.leaves, set(opened)
    if any(reading(leaves[leaf]) is None for leaf in opened):
        return None
    # A `Padded` array without open axes has to be cut to its logical sizes, which handlers do only
    # for arguments with open axes.
    if any(type(x) is Padded and i not in open_leaves for i, x in enumerate(leaves)):
        return None
    positional, named = call.tree.children()
    names = [*call.dynamic, *named.node_data()[1]]
    start, arguments, hosts = 0, [], []
    for where, tree in zip(names, (*positional.children(), *named.children()), strict=True):
        stop = start + tree.num_leaves
        places = tuple((leaf - start, leaf) for leaf in opened if start <= leaf < stop)
        if places:
            arguments.append(Opened(where, tree, places, jax.tree_util.treedef_is_leaf(tree)))
        if any(type(leaves[i]) is ARRAY and i not in open_leaves for i in range(start, stop)):
            hosts.append(where)
        start = stop
    if not arguments:  # nothing to read: calls of all shapes would have the same key
        return None
    dynamic = None if len(call.dynamic) == len(args) else tuple(call.dynamic)
    statics: tuple[Where, ...] = (*call.statics.positional, *call.statics.keyword)
    return Layout(len(args), tuple(sorted(kwargs)), dynamic, statics, tuple(arguments)), hosts


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
        for position, leaf in argument.leaves:
            leaves[leaf] = flat[position]
    kinds: list[Hashable] = []
    for value in leaves.values():
        kind = type(value)
        if kind is ARRAY:
            kinds.append((value.dtype, value.ndim))
        elif kind in (CONCRETE_ARRAY, Padded):
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


class OtherSizes:
    """What calls have found that holds for calls of other sizes.

    A strategy is monotone, and a bucket is its own bucket. So all sizes from that of a call to its
    bucket have this bucket, and no strategy is asked. Where buckets are learnt, that holds until
    there are others, and then ``clock`` is over.

    Attributes:
        hosts: The arguments that hold NumPy arrays without open axes.
    """

    def __init__(
        self, call: Call, program: Interface, hosts: Sequence[Where], clock: Clock | None
    ) -> None:
        self._clock = clock
        self._like = dataclasses.replace(call, leaves=[], program=None)
        self._program = weakref.ref(program)  # an evicted one is not kept for this
        self.hosts = hosts
        self._buckets: dict[Any, tuple[list[tuple[int, ...]], tuple[int, ...], Slot[Executable]]]
        self._buckets = {}

    def holds(self, call: Call, clock: Clock | None) -> bool:
        """Whether what is known is of the program, the open axes and the buckets of a call."""
        is_of_program = call.program is self._program() and call.tokens is self._like.tokens
        return is_of_program and self._clock is clock

    def learn(
        self, sizes: tuple[int, ...], bucket: tuple[int, ...], key: Any, slot: Slot[Executable]
    ) -> None:
        """Note that calls from these sizes up to these padded ones have an executable."""
        _, *rest = key  # without the program
        least = self._buckets[tuple(rest)][0] if tuple(rest) in self._buckets else []
        if self._clock is None:  # each variable has buckets of its own
            least = [tuple(map(min, *least, sizes))] if least else [sizes]
        else:
            others = (low for low in least if not all(map(operator.le, sizes, low)))
            least = [*others, sizes][-_MOST_LEAST:]
        self._buckets[tuple(rest)] = least, bucket, slot

    def _bucket_of(self, sizes: tuple[int, ...]) -> tuple[Any, Slot[Executable]] | None:
        """The key of the bucket of these sizes, without its program, and its place."""
        for key, (least, most, slot) in list(self._buckets.items()):
            if all(map(operator.le, sizes, most)):
                for low in least:
                    if all(map(operator.le, low, sizes)):
                        return key, slot
        return None

    def call_with(self, leaves: Leaves) -> tuple[Call, Any, Slot[Executable]] | None:
        """The call with these leaves, and the key and the place of the executable of its bucket.

        The call is without its leaves. None if the bucket is not known.
        """
        program, like, signature = self._program(), self._like, self._like.signature
        tokens = like.tokens
        is_over = self._clock is not None and self._clock.is_over
        if program is None or signature.tokens is not tokens or is_over:
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
        if bucket is None or min(ordered) < 1 or not program.admits(sizes):
            return None
        program.check_reshapes(sizes)
        return call, (program, *bucket[0]), bucket[1]


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
