"""What a kernel takes: the protocol of a body, and the transform of one call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax

from bucketjit._compile.argument_types import abstract, device_of
from bucketjit._compile.executable import Pads, sizes_argument
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.interface import Interface
from bucketjit._jax.serialization import Placement
from bucketjit._tracing.call import Call


class Body(Protocol):
    """Computes the results of a program at padded sizes, flat, with its counts after them."""

    def __call__(
        self, vector: Any, constants: Sequence[Any], arrays: Sequence[Any], poison: Any = None
    ) -> list[Any]:
        """Compute the results."""


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

    def given(self, call: Call) -> Sequence[int]:
        """The leaves of a call that the kernel takes."""
        return range(len(call.leaves))

    def types(
        self, call: Call, pads: Mapping[int, tuple[int, ...]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The types of the arguments: positional and by keyword."""
        found: tuple[tuple[Any, ...], dict[str, Any]]
        found = call.tree.unflatten(abstract(call, pads))
        return found

    def sizes(self, call: Call, constants: Sequence[tuple[int, ...]], poison: int | None) -> Any:
        """The first argument, or its type; ``constants`` are the padded shapes of these."""
        return sizes_argument(call, constants, poison)

    def donated(self, call: Call, pads: Mapping[int, tuple[int, ...]]) -> Iterable[int]:
        """The arguments that are donated, with the padded copies among their leaves."""
        return call.donate

    def placed(self, leaves: Sequence[Any], program: Interface) -> Placement:
        """Where the kernel runs, and where its arguments and results are."""
        return Placement.on(device_of(leaves))

    def results(self, program: Interface, at: BucketSizes) -> list[jax.ShapeDtypeStruct]:
        """The types of the results, without the counts."""
        front = () if self.count is None else (self.count,)
        return [
            jax.ShapeDtypeStruct((*front, *at.padded_shape(shape)), d, weak_type=weak)
            for shape, (d, weak) in zip(program.out_shapes, program.out_types, strict=True)
        ]

    def of_host(self, consts: Sequence[Any]) -> Sequence[Any]:
        """The constants of a program, where the kernel may use them."""
        return consts

    def run(
        self, body: Body, program: Interface, leaves: Sequence[int], opened: Collection[int]
    ) -> Callable[..., Any]:
        """The transformed body, as a function of the first argument and the arrays."""

        def one(sizes: Any, arrays: Sequence[Any], is_poisoned: bool) -> list[Any]:
            vector, constants = sizes if isinstance(sizes, tuple) else (sizes, ())
            # In checked calls the index of the poison follows the sizes; see `sizes_argument`.
            return body(vector, constants, arrays, vector[-1] if is_poisoned else None)

        return one


ONE = Transform()
