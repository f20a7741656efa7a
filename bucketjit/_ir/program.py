"""The traced program: a jaxpr with symbolic sizes, and the guards that decide what it serves.

`bucketjit._tracing.symbolic` and `bucketjit._tracing.concrete` make programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
from jax.extend.core import Jaxpr

from bucketjit._ir.expressions import Shape, evaluate_text
from bucketjit._ir.guards import Guard
from bucketjit._ir.interface import Interface
from bucketjit._jax.jaxprs import all_equations, name_of, shape_of
from bucketjit._jax.user_code import defining_line, in_brackets, source_line
from bucketjit.errors import MaskingError


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

    def at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape at some sizes."""
        return tuple(d if isinstance(d, int) else evaluate_text(d, sizes) for d in self.shape)

    def struct(self, shape: Sequence[Any]) -> jax.ShapeDtypeStruct:
        """An abstract array of the leaf's type."""
        more = {"weak_type": self.weak_type, "sharding": self.sharding}
        return jax.ShapeDtypeStruct(shape, self.dtype, **more)


@dataclass(frozen=True, eq=False, kw_only=True)
class Program(Interface):
    """A function as a jaxpr with symbolic sizes, and the sizes at which it may be used.

    Attributes:
        jaxpr: The open jaxpr; its shapes hold symbolic dimensions.
        consts: Values of its constants, which nobody else can write to.
        may_hold_sizes: Whether some data in ``out_tree`` cannot be searched for sizes.
        computes_sizes: Whether the function computes sizes, even if they are all 0.
        places: In brackets the line of user code that each guard comes from, if it is known.
    """

    jaxpr: Any
    consts: Sequence[Any]
    may_hold_sizes: bool = False
    computes_sizes: bool = False
    places: Mapping[Guard, str] = field(default_factory=dict)

    @property
    def constant_bytes(self) -> int:
        """Bytes of the arrays that it closes over."""
        return sum(getattr(c, "nbytes", 0) for c in self.consts)


class TraceRefused(MaskingError):
    """The function cannot be traced with symbolic sizes.

    Attributes:
        cause: What JAX or the function raised; None if nothing was raised.
        computes_sizes: Whether the function computes sizes, so that ``jit`` cannot trace it either.
    """

    def __init__(
        self,
        reason: str,
        remedy: str,
        cause: BaseException | None = None,
        computes_sizes: bool = False,
    ) -> None:
        super().__init__(reason, remedy)
        self.cause, self.computes_sizes = cause, computes_sizes

    def placed(self, fn: Callable[..., Any]) -> TraceRefused:
        """A refusal whose reason names a line: if it names none, the function's first line."""
        line = "" if self.names_a_line else defining_line(fn)
        reason = f"{self.reason}{in_brackets(line)}"
        return TraceRefused(reason, self.remedy, self.cause, self.computes_sizes)

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
    """Refuse a program that closes over tracers: in later calls they have no value."""
    for traced in (c for c in consts if isinstance(c, jax.core.Tracer)):
        raise TraceRefused(
            f"the function closes over a value that is being differentiated, {traced.aval}",
            "pass the value as an argument",
        )


def unchecked_reshapes(jaxpr: Jaxpr) -> dict[tuple[Shape, Shape], str]:
    """The reshapes that fail at some sizes, each with the first line of code that does it."""
    lines: dict[tuple[Shape, Shape], str] = {}
    for eqn in all_equations(jaxpr):
        if name_of(eqn) == "reshape":
            before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
            if math.prod(before) != math.prod(after):
                lines.setdefault((before, after), source_line(eqn))
    return lines
