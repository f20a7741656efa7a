"""The traced program: a jaxpr with symbolic sizes, its guards, and how it serves a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import jax
import numpy as np
from jax.extend.core import Jaxpr

from bucketjit._errors import MaskingError, ShapeCheckError
from bucketjit._jax.jaxprs import all_equations, shape_of
from bucketjit._jax.primitives import name_of
from bucketjit._jax.user_code import defining_line
from bucketjit._sizes.expressions import Dim, Shape, evaluate, is_symbolic
from bucketjit._sizes.guards import (
    Guard,
)

_BYTES_OF_TREE = 1 << 14  # the closure of a `jax.vjp` holds a small program


@dataclass(frozen=True)
class Leaf:
    """What is known of one argument leaf while tracing.

    Attributes:
        path: How an error names it, such as ``params['w']``.
        shape: Sizes: ints, or text of an expression (``"2*b + 1"``).
        dtype: Its dtype; None for a Python int that is itself a size.
        weak_type: JAX's weak type.
        sharding: How it is sharded over explicit axes of a mesh, if it is.
    """

    path: str
    shape: tuple[int | str, ...]
    dtype: Any
    weak_type: bool = False
    sharding: Any = None

    @property
    def is_size(self) -> bool:
        """True if the leaf is a Python int that is a size itself."""
        return self.dtype is None

    def struct(self, shape: Sequence[Any]) -> jax.ShapeDtypeStruct:
        """An abstract array of its type, of sizes that are known or symbolic."""
        given = {"weak_type": self.weak_type, "sharding": self.sharding}
        return jax.ShapeDtypeStruct(shape, self.dtype, **given)


@dataclass(frozen=True)
class SizeConstants:
    """What a program needs to know of the logical sizes that it cannot compute from them.

    Attributes:
        sizes: The program's *unfitted* sizes, see `Program`.
        values: Constants that depend on the sizes: scalars, or arrays of logical shape.
        out_tree: How the outputs nest, if the data in it depends on the sizes.
    """

    sizes: tuple[int, ...] = ()
    values: tuple[np.ndarray, ...] = ()
    out_tree: Any = None

    @property
    def nbytes(self) -> int:
        """Memory that the constants take, and about what a tree takes."""
        tree = 0 if self.out_tree is None else _BYTES_OF_TREE
        return sum(v.nbytes for v in self.values) + tree


NO_SIZE_CONSTANTS = SizeConstants()


class Pairing(Protocol):
    """Concrete traces that a program was made from; see `bucketjit._tracing.concrete`."""

    @property
    def samples(self) -> Sequence[Mapping[str, int]]:
        """The sizes they were made at."""

    @property
    def num_size_constants(self) -> int:
        """How many constants depend on the logical sizes."""

    @property
    def nests_by_size(self) -> bool:
        """Whether data in the tree of the outputs depends on the logical sizes."""

    @property
    def why(self) -> str:
        """Why the function is not traced with symbolic sizes."""

    def size_constants(self, sizes: Mapping[str, int]) -> SizeConstants | None:
        """What to know at these sizes; None if the program does not serve them."""

    def unfitted_sizes(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """The unfitted sizes at these sizes; None if the program does not serve them."""


@dataclass(frozen=True, eq=False)
class Program:
    """A function traced with symbolic sizes.

    Attributes:
        jaxpr: The open jaxpr; its shapes hold symbolic dimensions.
        consts: Arrays it closes over, which nobody else can write to.
        in_shapes, out_shapes: Shapes of the inputs (sizes left out) and outputs.
        out_types: dtype and weak type of each output.
        out_tree: How outputs nest; a tuple of them if that depends on the logical sizes.
        guards: What must hold of the sizes of a call.
        lower: Smallest size of each variable, 1 unless a guard says more.
        reshapes: Pairs of shapes of one reshape that are equal only at some sizes.
        unfitted: Variables of its own: sizes that no expression of the others gives.
        size_constant_shapes: Shape of each such constant, see `SizeConstants`.
        pairing: The concrete traces it was made from; None if it was traced symbolically.
        may_hold_sizes: Whether there is data in ``out_tree`` that cannot be looked into.
    """

    jaxpr: Any
    consts: Sequence[Any]
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]
    out_types: tuple[tuple[Any, bool], ...]
    out_tree: Any
    guards: tuple[Guard, ...]
    lower: Mapping[str, int]
    reshapes: tuple[tuple[Shape, Shape], ...] = field(default=())
    unfitted: tuple[str, ...] = ()
    size_constant_shapes: tuple[Shape, ...] = ()
    pairing: Pairing | None = None
    may_hold_sizes: bool = False

    @property
    def open_outs(self) -> tuple[int, ...]:
        """Positions of the outputs with open axes."""
        return tuple(i for i, shape in enumerate(self.out_shapes) if any(map(is_symbolic, shape)))

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Whether every guard holds at these sizes."""
        return all(g.holds(sizes) for g in self.guards)

    def size_constants(self, sizes: Mapping[str, int]) -> SizeConstants | None:
        """What to know besides the sizes; None if the program does not serve them."""
        if not self.admits(sizes):
            return None
        return NO_SIZE_CONSTANTS if self.pairing is None else self.pairing.size_constants(sizes)

    def unfitted_sizes(self, bucket: Mapping[str, int]) -> dict[str, int] | None:
        """Padded values of the unfitted sizes; None if they are not known for this bucket."""
        return {} if self.pairing is None else self.pairing.unfitted_sizes(bucket)

    def fits(self, bucket: Mapping[str, int]) -> bool:
        """Whether the program may be built at these padded sizes.

        The constraints its shapes were simplified by must hold of them; what user code only
        compared (``!=``) speaks of logical sizes.
        """
        return all(g.op == "!=" or g.holds(bucket) for g in self.guards)

    def check_reshapes(self, sizes: Mapping[str, int]) -> None:
        """Raise what the exact run would raise for a reshape that does not fit.

        JAX does not check a reshape of symbolic sizes, so ``x.reshape(s // 2, 2)`` traces for
        odd ``s``, where running it raises.
        """
        for before, after in self.reshapes:
            a, b = ([evaluate(d, sizes) for d in shape] for shape in (before, after))
            if _product(a) != _product(b):
                raise ShapeCheckError(
                    f"cannot reshape array of shape {tuple(a)} (size {_product(a)}) into shape "
                    f"{tuple(b)} (size {_product(b)}), with sizes {dict(sizes)}"
                )


def _product(sizes: Sequence[Any]) -> Any:
    total: Any = 1
    for d in sizes:
        total = total * d
    return total


class TraceRefused(MaskingError):
    """The function cannot be traced with symbolic sizes.

    Attributes:
        cause: What JAX or the function itself raised.
    """

    def __init__(self, reason: str, remedy: str, cause: BaseException | None = None) -> None:
        super().__init__(reason, remedy)
        self.cause = cause

    def placed(self, fn: Callable[..., Any]) -> TraceRefused:
        """The same; a reason that names no line names that of the function."""
        line = "" if self.names_a_line else defining_line(fn)
        reason = f"{self.reason} [{line}]" if line else self.reason
        return TraceRefused(reason, self.remedy, self.cause)

    def without_frames(self) -> Self:
        """The same, without its cause."""
        kept = super().without_frames()
        kept.cause = None
        return kept


def size_in_data() -> TraceRefused:
    """Why a function is not traced with symbolic sizes that returns one beside its arrays."""
    return TraceRefused(
        "the result holds a size in what is not an array, such as a static field or a closure",
        "return the size as an array, such as jnp.shape(x)[0]",
    )


def refuse_tracers(consts: Sequence[Any]) -> None:
    """A program is kept for later calls; what is being transformed now has no value then.

    Raises:
        TraceRefused: The function closes over such a value.
    """
    for traced in (c for c in consts if isinstance(c, jax.core.Tracer)):
        raise TraceRefused(
            f"the function closes over a value that is being differentiated, {traced.aval}",
            "pass the value as an argument",
        )


def unchecked_reshapes(jaxpr: Jaxpr) -> list[tuple[Shape, Shape]]:
    """Every reshape whose two shapes are not equal in size for all sizes."""
    found: list[tuple[Shape, Shape]] = []
    for eqn in all_equations(jaxpr):
        if name_of(eqn) == "reshape":
            before: tuple[Dim, ...] = tuple(shape_of(eqn.invars[0]))
            after: tuple[Dim, ...] = tuple(shape_of(eqn.outvars[0]))
            if _product(before) != _product(after):
                found.append((before, after))
    return found
