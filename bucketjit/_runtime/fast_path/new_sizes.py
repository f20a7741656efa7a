"""Serves the first call of new sizes by what an earlier call of other sizes has found.

Such a call differs from the earlier one in the sizes of its open axes alone. So its arguments
without open axes are not looked at: the argument check of ``jax.jit`` compares their types.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from bucketjit._arrays.padded import Padded
from bucketjit._compile.cache import Slot
from bucketjit._compile.executable import Executable
from bucketjit._ir.dynamic_axes import places_of
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import on_one_device
from bucketjit._runtime.fast_path.bucket_handler import Clock, Where
from bucketjit._runtime.fast_path.layout import ARRAY, DEVICE_ARRAY, Layout, reading_static
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import bind_sizes
from bucketjit.errors import ArgumentError

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
