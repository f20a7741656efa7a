"""Where a value came from while a function is traced, and traces that no cache may return again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import jax
from jax.interpreters import partial_eval

from bucketjit._jax.config import unshared_keys
from bucketjit._jax.jaxprs import is_literal


class Typed(NamedTuple):
    """An operand, of which the type is known.

    Attributes:
        aval: Its type.
    """

    aval: Any


class Made(NamedTuple):
    """The equation that made a value, in the form of one of a jaxpr.

    Attributes:
        primitive: Its primitive.
        params: Its parameters.
        operands: Its operands: tracers, arrays or numbers.
        position: The position of the value among its results.
        outvars: The variables of its results.
    """

    primitive: Any
    params: Mapping[str, Any]
    operands: Sequence[Any]
    position: int
    outvars: Sequence[Any]

    @property
    def invars(self) -> list[Typed]:
        """The types of its operands."""
        return [Typed(jax.typeof(x)) for x in self.operands]


def equation_of(value: object) -> Made | None:
    """The equation that made a value while a function is traced to a jaxpr.

    No public name has the equations of a trace that is not finished
    (``partial_eval.DynamicJaxprTracer.parent``, since 0.7).
    """
    if not isinstance(value, partial_eval.DynamicJaxprTracer):
        return None
    equation: Any = getattr(value, "parent", None)
    if equation is None or equation.effects:
        return None
    places = [i for i, out in enumerate(equation.outvars) if out is value.val]
    if len(places) != 1:
        return None
    operands = list(equation.in_tracers)
    outvars = list(equation.outvars)
    return Made(equation.primitive, equation.params, operands, places[0], outvars)


def literal_of(value: object) -> Any | None:
    """The number that a tracer stands for, as a literal of a jaxpr; None if it stands for none.

    JAX keeps the literal in the tracer itself (``DynamicJaxprTracer.val``, since 0.7).
    """
    atom = getattr(value, "val", None)
    return atom if isinstance(value, jax.core.Tracer) and is_literal(atom) else None


def constant_of(value: object) -> Any | None:
    """The array that a tracer stands for, a constant of its trace; None if it stands for none.

    The frame of the trace has the constants (``frame.constvar_to_val``, since 0.2).
    """
    if not isinstance(value, partial_eval.DynamicJaxprTracer):
        return None
    frame = getattr(value._trace, "frame", None)
    return getattr(frame, "constvar_to_val", {}).get(value.val)


def trace_of(value: object) -> Any | None:
    """The trace of a value while a function is traced to a jaxpr (``Tracer._trace``, since 0.1).

    None for a number, an array or the tracer of another transformation.
    """
    return value._trace if isinstance(value, partial_eval.DynamicJaxprTracer) else None


def is_inside(trace: Any, outer: Any) -> bool:
    """Whether a trace is another one, or inside of it (``Trace.parent_trace``, since 0.4.36)."""
    while trace is not None and trace is not outer:
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


@contextmanager
def unshared_traces() -> Iterator[Callable[[], None]]:
    """A context whose traces are returned neither outside of it nor in another one.

    ``jit`` caches the programs of the functions that a traced function calls. A program that makes
    a size belongs to one call, so no other call may get it. The context gives a function: from its
    call on, nothing that was traced before is returned.
    """
    with ExitStack() as stack:

        def renew() -> None:
            stack.enter_context(unshared_keys(object()))

        renew()
        yield renew


def traces_are_unshared() -> bool:
    """Whether `unshared_traces` is active."""
    return unshared_keys.value is not None
