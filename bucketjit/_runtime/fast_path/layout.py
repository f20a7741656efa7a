"""Describes where in the arguments of a call the open axes are.

A call is flattened once, on the slow path; its `Layout` then lets the fast path read the leaves
with open axes without flattening the other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._arrays.padded import Padded
from bucketjit._jax.arrays import CONCRETE_ARRAY, KEY_ARRAY
from bucketjit._runtime.fast_path.bucket_handler import Prepare, Prepared, Where
from bucketjit._tracing.call import Call

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
