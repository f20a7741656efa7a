"""One attempt to trace a function with symbolic sizes."""

from __future__ import annotations

import contextlib
import decimal
import itertools
import numbers
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import export
from jax.errors import InconclusiveDimensionOperation
from jax.tree_util import PyTreeDef

from bucketjit._ir.expressions import evaluate, is_symbolic, variables_of
from bucketjit._ir.guards import Guard
from bucketjit._ir.jax_patches import forgetful_jax, lenient_jax, selecting_jax
from bucketjit._ir.program import Leaf, TraceRefused
from bucketjit._jax.config import current_trace
from bucketjit._jax.size_hooks import watch_equalities
from bucketjit._jax.tracebacks import as_user_code, traced_anew
from bucketjit._jax.user_code import calling_line, raising_code, raising_function, raising_line
from bucketjit._tracing.computed.sizes import Noticing, counts_of_trace
from bucketjit._tracing.held_output import begin_trace


def leaf_struct(leaf: Leaf, scope: export.SymbolicScope) -> Any:
    """The abstract array of a leaf, or the expression of one that is a size itself."""
    dims: Sequence[Any] = leaf.shape
    if any(isinstance(d, str) for d in dims):
        dims = export.symbolic_shape(", ".join(map(str, dims)), scope=scope)
    return dims[0] if leaf.is_size else leaf.struct(dims)


def traced(
    fn: Callable[..., Any],
    in_tree: PyTreeDef,
    inputs: Sequence[Any],
    finish: Callable[[Any], Any],
    contexts: Sequence[AbstractContextManager[Any]],
) -> Any:
    """The closed jaxpr of a function, whose results `finish` gets.

    Abstract arrays among the inputs are traced, and other inputs are passed as they are.
    """
    is_traced = [isinstance(x, jax.ShapeDtypeStruct) for x in inputs]

    def flat(*values: object) -> Any:
        rest = iter(values)
        leaves = [next(rest) if of else x for x, of in zip(inputs, is_traced, strict=True)]
        args, kwargs = jax.tree_util.tree_unflatten(in_tree, leaves)
        return finish(fn(*args, **kwargs))

    begin_trace()
    args, kwargs = jax.tree_util.tree_unflatten(in_tree, inputs)
    as_user_code(flat, fn, args, kwargs, is_traced)
    with contextlib.ExitStack() as stack:
        # A trace that fails is freed. Selections come last: they make the sizes of other patches.
        for context in (forgetful_jax(), *contexts, selecting_jax(), traced_anew()):
            stack.enter_context(context)
        try:
            return jax.make_jaxpr(flat)(*itertools.compress(inputs, is_traced))
        except TypeError as error:
            if not selecting_jax.misses(raising_function(error)):
                raise
            raise TraceRefused(
                f"{raising_code(error)}: it computes a size, and the function was imported by name "
                f"before bucketjit could replace it [{raising_line(error)}]",
                "call it by its module, such as lax.slice",
                error,
            ) from None


class WrongBranch(Exception):
    """User code takes another branch than at the sizes of the call."""


class Attempt:
    """One attempt to trace.

    Attributes:
        sizes: The sizes of the call, and those that decide by computed sizes.
        variables: The dimension variables of the leaves.
        scope: The symbolic scope with the constraints so far.
        inputs: The abstract arrays, and expressions for leaves that are sizes.
        assumed: Guards ``!=`` for comparisons that JAX answered with False, by both sides.
        keys: Guards ``==`` for sizes that user code hashed, by the size.
        line: Where user code compared or hashed the size of the first of `equalities`.
        raised: Errors that sizes raised; user code may have caught them.
        texts: Lines where user code made a text of a size.
        out_tree: Tree of the outputs; None before the function has returned.
        sizing: Makes computed sizes, or notices that the function needs them.
        counts: The variables of the computed sizes whose counts follow the outputs.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        constraints: Sequence[str],
        sizes: dict[str, int],
        noticing: Noticing,
    ) -> None:
        self.sizes = sizes
        self.variables = sorted(
            {v for leaf in leaves for d in leaf.shape for v in variables_of(str(d))}
        )
        with lenient_jax():  # SymbolicScope compares the constraints, which are symbolic
            self.scope = export.SymbolicScope(tuple(constraints))
            self.inputs = [leaf_struct(leaf, self.scope) for leaf in leaves]
        self.assumed: dict[tuple[str, str], Guard] = {}
        self.keys: dict[str, Guard] = {}
        self.line = ""
        self.raised: list[Exception] = []
        self.texts: list[str] = []
        self.out_tree: Any = None
        self.sizing = noticing.sizing(self.scope, sizes, set(self.variables))
        self.counts: tuple[str, ...] = ()

    def unequal(self, left: Any, right: Any) -> None:
        """Note that JAX took a size to be different from another value, which may be wrong."""
        if not is_symbolic(right):
            right = whole_number(right)
            if right is None:
                return  # a size is equal to whole numbers only
            with contextlib.suppress(InconclusiveDimensionOperation):
                if left > right or left < right:
                    return  # never equal, so JAX is right
        guard = Guard(str(left), "!=", str(right))
        self.assumed.setdefault((guard.left, guard.right), guard)
        if not guard.holds(self.sizes):
            # The trace is useless, and may never end: a recursion that stops at ``n == 1``.
            self.line = calling_line()
            raise WrongBranch(f"{left} is taken to be different from {right}")

    def used_as_key(self, size: object) -> None:
        """Note that user code hashed a size, so that a dict look-up depends on its value."""
        self.line = self.line or calling_line()
        self.keys.setdefault(str(size), Guard(str(size), "==", str(evaluate(size, self.sizes))))

    def equalities(self) -> list[Guard]:
        """Guards for comparisons that JAX answered wrongly, and for sizes that were hashed."""
        assumed = [g for g in self.assumed.values() if not g.holds(self.sizes)]
        return [*(Guard(g.left, "==", g.right) for g in assumed), *self.keys.values()]

    def run(self, fn: Callable[..., Any], in_tree: PyTreeDef) -> tuple[Any, Exception | None]:
        """Trace the function. Returns a closed jaxpr, or what the function raises."""

        def finish(results: Any) -> list[Any]:
            outs, self.out_tree = jax.tree_util.tree_flatten(results)
            outs = [x.dimension_as_value() if is_symbolic(x) else x for x in outs]
            counts: dict[str, Any] = {}
            if not isinstance(self.sizing, Noticing):
                counts = counts_of_trace(self.sizing, outs, current_trace())
            self.counts = tuple(counts)
            return [*outs, *counts.values()]

        watched = watch_equalities(
            self.unequal, self.used_as_key, self.texts.append, self.raised.append
        )
        contexts = watched, lenient_jax(), self.sizing.active()
        try:
            return traced(fn, in_tree, self.inputs, finish, contexts), None
        except Exception as error:
            return None, error


def whole_number(value: object) -> int | None:
    """The int that a number is equal to; None if there is none."""
    with contextlib.suppress(TypeError):
        return operator.index(value)  # type: ignore[arg-type]
    if not isinstance(value, numbers.Number | decimal.Decimal):
        return None
    try:
        whole = int(value.real)  # type: ignore[union-attr]
    except (ValueError, OverflowError):  # NaN, infinity
        return None
    return whole if whole == value else None
