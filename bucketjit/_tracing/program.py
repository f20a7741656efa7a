"""The traced program: a jaxpr with symbolic sizes, and the guards that decide what it serves.

`bucketjit._tracing.symbolic` and `bucketjit._tracing.concrete` make programs.
"""

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
from bucketjit._sizes.guards import Guard

_BYTES_OF_TREE = 1 << 14  # an estimate: the closure of a `jax.vjp` holds a small program


@dataclass(frozen=True)
class Leaf:
    """The name, shape and type of one argument leaf, for tracing.

    Attributes:
        path: How errors name it, such as ``params['w']``.
        shape: Its sizes: ints, or text of an expression (``"2*b + 1"``).
        dtype: Its dtype; None for a Python int that is itself a size.
        weak_type: JAX's weak type.
        sharding: How it is sharded over explicit axes of a mesh; None if it is not.
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
        """An abstract array of the leaf's type.

        Args:
            shape: Its sizes, ints or symbolic ones.

        Returns:
            The abstract array.
        """
        given = {"weak_type": self.weak_type, "sharding": self.sharding}
        return jax.ShapeDtypeStruct(shape, self.dtype, **given)


@dataclass(frozen=True)
class SizeConstants:
    """What a program needs at certain logical sizes and cannot compute from them.

    Attributes:
        sizes: The unfitted sizes, in the order of `Program.unfitted`.
        values: Constants that depend on the sizes: scalars, or arrays of logical shape.
        out_tree: Tree of the outputs if its auxiliary data depends on the sizes, else None.
    """

    sizes: tuple[int, ...] = ()
    values: tuple[np.ndarray, ...] = ()
    out_tree: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the constants, plus an estimate for the tree."""
        tree = 0 if self.out_tree is None else _BYTES_OF_TREE
        return sum(v.nbytes for v in self.values) + tree


NO_SIZE_CONSTANTS = SizeConstants()


class Pairing(Protocol):
    """The concrete traces that a program was made from.

    `bucketjit._tracing.pairing.Pairing` implements it.
    """

    @property
    def samples(self) -> Sequence[Mapping[str, int]]:
        """The sizes that the traces were made at."""

    @property
    def num_size_constants(self) -> int:
        """How many constants depend on the logical sizes."""

    @property
    def nests_by_size(self) -> bool:
        """Whether auxiliary data in the tree of the outputs depends on the logical sizes."""

    @property
    def why(self) -> str:
        """Why the function is not traced with symbolic sizes."""

    def size_constants(self, sizes: Mapping[str, int]) -> SizeConstants | None:
        """The size constants at these logical sizes; None if the program does not serve them."""

    def unfitted_sizes(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """The unfitted sizes at these padded sizes; None if the program does not serve them."""


@dataclass(frozen=True, eq=False)
class Program:
    """A function as a jaxpr with symbolic sizes, and the sizes at which it may be used.

    Attributes:
        jaxpr: The open jaxpr; its shapes hold symbolic dimensions.
        consts: Values of its constants, which nobody else can write to.
        in_shapes: Shapes of the input arrays. Leaves that are sizes themselves are left out.
        out_shapes: Shapes of the outputs.
        out_types: dtype and weak type of each output.
        out_tree: Tree of the outputs; a flat tuple if the tree depends on the logical sizes.
        guards: Conditions that the logical sizes of a call must meet.
        lower: Smallest size of each variable, 1 unless a guard demands more.
        reshapes: The two shapes of each reshape whose element counts are equal at some sizes only.
        unfitted: Additional variables, for sizes that no expression of the others fits.
        size_constant_shapes: Shape of each of `SizeConstants.values`.
        pairing: The concrete traces it was made from; None if it was traced symbolically.
        may_hold_sizes: Whether some data in ``out_tree`` cannot be searched for sizes.
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
        """The size constants of a call.

        Args:
            sizes: The logical size of each dimension variable.

        Returns:
            The size constants; None if the program does not serve these sizes.

        Raises:
            Exception: An error of the machine (`is_of_machine`), if the function is traced here.
        """
        if not self.admits(sizes):
            return None
        return NO_SIZE_CONSTANTS if self.pairing is None else self.pairing.size_constants(sizes)

    def unfitted_sizes(self, bucket: Mapping[str, int]) -> dict[str, int] | None:
        """The padded values of the unfitted sizes.

        Args:
            bucket: The padded size of each dimension variable.

        Returns:
            Size by name; None if the program does not hold at these sizes.
        """
        return {} if self.pairing is None else self.pairing.unfitted_sizes(bucket)

    def fits(self, bucket: Mapping[str, int]) -> bool:
        """Whether the program may be built at the padded sizes of a bucket.

        Its shapes were simplified under its guards, so they must hold for padded sizes too. A guard
        ``!=`` comes from a comparison in user code. It concerns logical sizes only.
        """
        return all(g.op == "!=" or g.holds(bucket) for g in self.guards)

    def check_reshapes(self, sizes: Mapping[str, int]) -> None:
        """Raise the error of a reshape that fails at these logical sizes in the exact run.

        JAX does not check a reshape of symbolic sizes: ``x.reshape(s // 2, 2)`` is traced for all
        ``s``, but the exact run raises if ``s`` is odd.

        Args:
            sizes: The logical size of each dimension variable.

        Raises:
            ShapeCheckError: The element counts of the two shapes differ.
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

    Args:
        reason: Why, in words.
        remedy: What the user can change.
        cause: What JAX or the function raised; None if nothing was raised.

    Attributes:
        cause: What JAX or the function raised; None if nothing was raised.
    """

    def __init__(self, reason: str, remedy: str, cause: BaseException | None = None) -> None:
        super().__init__(reason, remedy)
        self.cause = cause

    def placed(self, fn: Callable[..., Any]) -> TraceRefused:
        """A refusal whose reason names a line: if it names none, the function's first line.

        Args:
            fn: The function that was traced.

        Returns:
            A new refusal, with the same remedy and cause.
        """
        line = "" if self.names_a_line else defining_line(fn)
        reason = f"{self.reason} [{line}]" if line else self.reason
        return TraceRefused(reason, self.remedy, self.cause)

    def without_frames(self) -> Self:
        """A copy without its traceback and its cause, which would keep frames alive."""
        kept = super().without_frames()
        kept.cause = None
        return kept


def size_in_data() -> TraceRefused:
    """The refusal of a function that returns a symbolic size in data that is no array."""
    return TraceRefused(
        "the result holds a size in what is not an array, such as a static field or a closure",
        "return the size as an array, such as jnp.shape(x)[0]",
    )


def refuse_tracers(consts: Sequence[Any]) -> None:
    """Refuse a program that closes over tracers: in later calls they have no value.

    Args:
        consts: Values of the program's constants.

    Raises:
        TraceRefused: One of them is a tracer, of ``jax.grad`` for example.
    """
    for traced in (c for c in consts if isinstance(c, jax.core.Tracer)):
        raise TraceRefused(
            f"the function closes over a value that is being differentiated, {traced.aval}",
            "pass the value as an argument",
        )


def unchecked_reshapes(jaxpr: Jaxpr) -> list[tuple[Shape, Shape]]:
    """The reshapes that fail at some sizes.

    Args:
        jaxpr: An open jaxpr.

    Returns:
        The two shapes of each reshape whose element counts are not equal as expressions.
    """
    found: list[tuple[Shape, Shape]] = []
    for eqn in all_equations(jaxpr):
        if name_of(eqn) == "reshape":
            before: tuple[Dim, ...] = tuple(shape_of(eqn.invars[0]))
            after: tuple[Dim, ...] = tuple(shape_of(eqn.outvars[0]))
            if _product(before) != _product(after):
                found.append((before, after))
    return found
