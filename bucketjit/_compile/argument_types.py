"""What a kernel takes: the types that it is lowered for, and the transform of its arguments.

`Expected` checks later arguments. A `Transform` is here that of one call; others take many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.backend import get_default_device

from bucketjit._arrays.padded import Padded
from bucketjit._compile.executable import Pads, SignatureChanged, sizes_argument
from bucketjit._events import shown
from bucketjit._ir.bounds import upper_bound_text
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.dynamic_axes import STATIC, Tokens
from bucketjit._ir.expressions import evaluate_text
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import explicit_sharding, sharding_for
from bucketjit._jax.config import jit_disabled, trace_context
from bucketjit._jax.serialization import NotPlain, Placement
from bucketjit._tracing.call import Call
from bucketjit._tracing.leaf_types import can_be
from bucketjit.errors import SpecError, StrategyContractError

if TYPE_CHECKING:
    from bucketjit._tracing.shards import Shardings


def is_open(token: str) -> bool:
    """Whether a token of an axis names a size that varies."""
    return token != STATIC and not token.isdigit()


def padded_leaf_shapes(call: Call, bucket: Mapping[str, int]) -> Pads:
    """Position and padded shape of each leaf that has open axes."""
    assert call.program is not None
    lower = {v: call.program.lower.get(v, 1) for v in bucket}
    rooms = call.program.rooms(bucket)
    pads = []
    rows = zip(call.tokens, call.shapes, call.signature.types, strict=True)
    for i, (row, shape, kind) in enumerate(rows):
        if kind.dtype is not None and any(map(is_open, row)):
            padded = tuple(
                rooms.get(t) or upper_bound_text(t, lower, bucket) if is_open(t) else n
                for t, n in zip(row, shape, strict=True)
            )
            if not can_be(padded, kind.dtype):
                raise StrategyContractError(
                    f"the bucket {shown(bucket)} pads an argument of shape {tuple(shape)} to "
                    f"{padded}, which no array of {kind.dtype} can have; choose smaller buckets"
                )
            pads.append((i, padded))
    return tuple(pads)


def at_sizes(call: Call, tokens: Tokens, sizes: Mapping[str, int]) -> Call:
    """The same call at other sizes. Leaves whose shape changes become types without contents."""
    shapes: list[tuple[int, ...]] = []
    leaves: list[Any] = []
    rows = zip(tokens, call.shapes, call.leaves, call.signature.types, strict=True)
    for row, shape, leaf, kind in rows:
        new = tuple(
            n if t == STATIC else evaluate_text(t, sizes) for t, n in zip(row, shape, strict=True)
        )
        if kind.dtype is not None and not can_be(new, kind.dtype):
            raise SpecError(f"no array of {kind.dtype} can have the shape {new}")
        shapes.append(new)
        if kind.dtype is None:
            leaves.append(new[0])
        elif new == shape:
            leaves.append(leaf)
        else:
            is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
            committed = is_struct or (isinstance(leaf, jax.Array) and leaf.committed)
            sharding = leaf.sharding if committed else None
            weak = kind.weak_type
            leaves.append(jax.ShapeDtypeStruct(new, kind.dtype, sharding=sharding, weak_type=weak))
    return dataclasses.replace(call, leaves=leaves, shapes=shapes)


def abstract(call: Call, padded: Mapping[int, tuple[int, ...]]) -> list[Any]:
    """The types that ``jit`` lowers for; Python scalars and size arguments stay values."""
    leaves: list[Any] = []
    placed = call.signature.placed if padded else {}
    for i, (x, kind) in enumerate(zip(call.leaves, call.signature.types, strict=True)):
        if kind.dtype is None or isinstance(x, bool | int | float | complex):
            leaves.append(x)
            continue
        shape = padded.get(i, call.shapes[i])
        array = x.array if isinstance(x, Padded) else x
        # Padding makes an array strongly typed, and the program was traced with its own type.
        weak = kind.weak_type and i not in padded
        sharding = getattr(array, "sharding", None)
        if isinstance(array, jax.core.Tracer):
            sharding = kind.sharding
        elif (isinstance(array, jax.Array) and not array.committed) or (
            i in placed and i in padded
        ):
            sharding = None
        # The sharding fits the array's shape, and ``shape`` may be that of another bucket.
        elif isinstance(x, Padded) and sharding is not None:
            sharding = sharding_for(sharding, shape)
        leaves.append(jax.ShapeDtypeStruct(shape, kind.dtype, sharding=sharding, weak_type=weak))
    return leaves


def without_values(call: Call) -> Call:
    """The same call with types in the place of its arrays, so that it keeps none of them alive."""
    return dataclasses.replace(call, leaves=abstract(call, {}))


def placement_of(leaves: Sequence[Any], said: Shardings | None = None) -> Placement:
    """Where ``jit`` would run a call; raises `NotPlain` if that is neither a device nor a mesh."""
    shardings = [getattr(x, "sharding", None) for x in leaves]
    shardings += [] if said is None else [*said.leaves, *jax.tree.leaves(said.results)]
    placed: set[Any] = {s for s in shardings if s is not None}
    if not placed:
        return Placement.on(get_default_device())
    meshes = {getattr(s, "mesh", None) for s in placed}
    if len(meshes) == 1 and isinstance(mesh := meshes.pop(), jax.sharding.Mesh):
        return Placement(tuple(mesh.devices.flat), mesh)
    if len(placed) > 1 or not isinstance(s := placed.pop(), jax.sharding.SingleDeviceSharding):
        raise NotPlain("its arguments are on several devices, but not placed by one mesh")
    return Placement.on(*s.device_set)


def device_of(leaves: Sequence[Any]) -> Any:
    """The device that ``jit`` would run a call on; raises `NotPlain` if that is not just one."""
    placement = placement_of(leaves)
    if placement.mesh is not None:
        raise NotPlain("its arguments are placed by a mesh")
    return placement.device


class Expected:
    """The argument types of an executable's first trace. A retrace with others raises.

    The weak types of padded arguments are not compared: padding makes an array strongly typed, and
    the program was traced with the types of the signature.
    """

    def __init__(self, padded: set[int]) -> None:
        self._padded = padded
        self._first: Any = None

    def check(self, args: object, kwargs: object) -> list[Any]:
        """Remember the types of the first arguments, and compare those of later ones with them."""
        if jit_disabled():
            raise SignatureChanged
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        types = map(jax.typeof, leaves)
        now = (
            tree,
            trace_context(),
            tuple(
                (
                    *(x.shape, x.dtype, i not in self._padded and getattr(x, "weak_type", False)),
                    explicit_sharding(x),
                )
                for i, x in enumerate(types)
            ),
        )
        if self._first is None:
            self._first = now
        elif self._first != now:
            raise SignatureChanged
        return leaves


# Computes the results of a program at padded sizes, flat, with its counts after them, of the vector
# of the sizes, the size constants, the arrays, and in checked calls a poison.
Body = Callable[..., list[Any]]


class Transform:
    """What a kernel takes: here the arguments of one call.

    Attributes:
        count: How many examples the kernel takes; None if it takes one call.
        in_turn: Whether its examples are computed one after the other.
        summed: Whether it returns the sum over its examples in place of each result.
        uneven: The mesh axis along which shards have sizes of their own, if there is one.
    """

    count: int | None = None
    in_turn: bool = False
    summed: bool = False
    uneven: tuple[str, ...] = ()

    def refuse(self, what: str) -> None:
        """Raise a `SpecError` if what was asked for has no form of this kind."""

    def details(self) -> Any:
        """What tells executables of this kind in files from others; None for a single call."""

    def options(self, is_kept: bool) -> Mapping[str, Any]:
        """Options of XLA for kernels of this kind; ``is_kept`` says that they go into files."""
        return {}

    def bucket(self, bucket: Mapping[str, int]) -> Mapping[str, int]:
        """The sizes that messages and statistics name the kernel by."""
        return bucket

    def pads(self, call: Call, pads: Pads) -> Pads:
        """Position and shape of each leaf that is padded, from those of one call."""
        return pads

    def leaves(self, call: Call) -> Sequence[int]:
        """The leaves of a call that the kernel takes."""
        return range(len(call.leaves))

    def types(
        self, call: Call, pads: Mapping[int, tuple[int, ...]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The types of the arguments: positional and by keyword."""
        return call.tree.unflatten(abstract(call, pads))

    def sizes(self, call: Call, constants: Sequence[tuple[int, ...]], poison: int | None) -> Any:
        """The first argument, or its type; ``constants`` are the padded shapes of these."""
        return sizes_argument(call, constants, poison)

    def donated(self, call: Call, pads: Mapping[int, tuple[int, ...]]) -> Iterable[int]:
        """The arguments that are donated, with the padded copies among their leaves."""
        return call.donate

    def results(self, program: Interface, padded_sizes: BucketSizes) -> list[jax.ShapeDtypeStruct]:
        """The types of the results, without the counts."""
        front = () if self.count is None else (self.count,)
        return [
            jax.ShapeDtypeStruct((*front, *padded_sizes.padded_shape(shape)), d, weak_type=weak)
            for shape, (d, weak) in zip(program.out_shapes, program.out_types, strict=True)
        ]

    def of_host(self, consts: Sequence[Any]) -> Sequence[Any]:
        """The constants of a program, where the kernel may use them."""
        return consts

    def run(
        self, body: Body, program: Interface, leaves: Sequence[int], opened: Collection[int]
    ) -> Callable[..., Any]:
        """The transformed body, as a function of the first argument and the arrays."""

        def one_call(sizes: Any, arrays: Sequence[Any], is_poisoned: bool) -> list[Any]:
            vector, constants = sizes if isinstance(sizes, tuple) else (sizes, ())
            # In checked calls the index of the poison follows the sizes; see `sizes_argument`.
            return body(vector, constants, arrays, vector[-1] if is_poisoned else None)

        return one_call


ONE = Transform()
