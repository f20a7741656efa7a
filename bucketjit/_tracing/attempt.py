"""One attempt to trace a function with symbolic sizes."""

from __future__ import annotations

import contextlib
import decimal
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export
from jax.errors import InconclusiveDimensionOperation
from jax.tree_util import PyTreeDef

from bucketjit._ir.computed_sizes import Sizing
from bucketjit._ir.expressions import evaluate, is_symbolic
from bucketjit._ir.guards import (
    Guard,
)
from bucketjit._ir.jax_patches import forgetful_jax, lenient_jax, selecting_jax
from bucketjit._ir.open_sizes import Noticing
from bucketjit._ir.program import (
    Leaf,
)
from bucketjit._jax.debug_info import as_user_code, traced_anew
from bucketjit._jax.size_hooks import watch_equalities
from bucketjit._jax.transformations import current_trace
from bucketjit._tracing.computed_sizes import (
    counts_of,
)
from bucketjit._tracing.held_output import begin_trace
from bucketjit._tracing.presumed_sizes import PresumedSizes


def leaf_struct(leaf: Leaf, scope: export.SymbolicScope) -> Any:
    """The abstract array of a leaf, or the expression of one that is a size itself."""
    dims: Sequence[Any] = leaf.shape
    if any(isinstance(d, str) for d in dims):
        dims = export.symbolic_shape(", ".join(map(str, dims)), scope=scope)
    if leaf.is_size:
        return dims[0]
    return leaf.struct(dims)


class WrongBranch(Exception):
    """User code takes another branch than at the sizes of the call."""


class Attempt:
    """One attempt to trace.

    Attributes:
        sizes: The sizes of the call.
        scope: The symbolic scope with the constraints so far.
        inputs: The abstract arrays, and expressions for leaves that are sizes.
        assumed: Guards ``!=`` for comparisons that JAX answered with False, by both sides.
        keys: Guards ``==`` for sizes that user code hashed, by the size.
        raised: Errors that sizes raised; user code may have caught them.
        texts: Lines where user code made a text of a size.
        out_tree: Tree of the outputs; None before the function has returned.
        sizing: Makes computed sizes, or notices that the function needs them.
        counts: The variables of the computed sizes whose counts follow the outputs.
    """

    def __init__(
        self, leaves: Sequence[Leaf], constraints: Sequence[str], sizes: PresumedSizes
    ) -> None:
        self.sizes = sizes.known
        with lenient_jax():  # SymbolicScope compares the constraints, which are symbolic
            self.scope = export.SymbolicScope(tuple(constraints))
            self.inputs = [leaf_struct(leaf, self.scope) for leaf in leaves]
        self.assumed: dict[tuple[str, str], Guard] = {}
        self.keys: dict[str, Guard] = {}
        self.raised: list[Exception] = []
        self.texts: list[str] = []
        self.out_tree: Any = None
        self.sizing: Noticing | Sizing = Noticing()
        if sizes.are_computed:
            presumed = {**sizes.guessed, **sizes.presumed}
            self.sizing = Sizing(self.scope, sizes.known, sizes.of_call, presumed)
        self.counts: tuple[str, ...] = ()

    @property
    def lacks_sizes(self) -> bool:
        """Whether the function computes sizes, which this attempt could not do."""
        return isinstance(self.sizing, Noticing) and self.sizing.noticed

    def unequal(self, left: Any, right: Any) -> None:
        """Note that JAX took a size to be different from another value, which may be wrong."""
        if not is_symbolic(right):
            if isinstance(right, float) and right.is_integer():
                right = int(right)
            try:
                right = operator.index(right)
                if left > right or left < right:
                    return  # never equal, so JAX is right
            except TypeError:
                right = whole_number(right)
                if right is None:
                    return  # a size is equal to whole numbers only
            except InconclusiveDimensionOperation:
                pass
        guard = Guard(str(left), "!=", str(right))
        self.assumed.setdefault((guard.left, guard.right), guard)
        if not guard.holds(self.sizes):
            # The trace is useless, and may never end: a recursion that stops at ``n == 1``.
            raise WrongBranch(f"{left} is taken to be different from {right}")

    def used_as_key(self, size: object) -> None:
        """Note that user code hashed a size, so that a dict look-up depends on its value."""
        self.keys.setdefault(str(size), Guard(str(size), "==", str(evaluate(size, self.sizes))))

    def run(self, fn: Callable[..., Any], in_tree: PyTreeDef) -> Any:
        """Trace the function. Returns a closed jaxpr, or raises what the function raises."""
        arrays = [x for x in self.inputs if isinstance(x, jax.ShapeDtypeStruct)]

        def flat(*values: object) -> list[Any]:
            rest = iter(values)
            leaves = [next(rest) if isinstance(x, jax.ShapeDtypeStruct) else x for x in self.inputs]
            args, kwargs = jax.tree_util.tree_unflatten(in_tree, leaves)
            outs, self.out_tree = jax.tree_util.tree_flatten(fn(*args, **kwargs))
            outs = [x.dimension_as_value() if is_symbolic(x) else x for x in outs]
            counts: dict[str, Any] = {}
            if isinstance(self.sizing, Sizing):
                counts = counts_of(self.sizing, outs, current_trace())
            self.counts = tuple(counts)
            return [*outs, *counts.values()]

        args, kwargs = jax.tree_util.tree_unflatten(in_tree, self.inputs)
        traced = [isinstance(x, jax.ShapeDtypeStruct) for x in self.inputs]
        as_user_code(flat, fn, args, kwargs, traced)
        watched = watch_equalities(
            self.unequal, self.used_as_key, self.texts.append, self.raised.append
        )
        patched = lenient_jax(), forgetful_jax(), selecting_jax(), traced_anew()
        with contextlib.ExitStack() as stack:
            for context in (watched, *patched, self.sizing.active()):
                stack.enter_context(context)
            return jax.make_jaxpr(flat)(*arrays)

    def outcome(self, fn: Callable[..., Any], in_tree: PyTreeDef) -> tuple[Any, Exception | None]:
        """Trace the function. Returns a closed jaxpr, or what the function raises."""
        begin_trace()
        try:
            return self.run(fn, in_tree), None
        except Exception as error:
            return None, error


def whole_number(value: object) -> int | None:
    """The int that a complex number, a fraction or a decimal is equal to; None if there is none."""
    if not isinstance(value, numbers.Number | decimal.Decimal):
        return None
    try:
        whole = int(value.real)  # type: ignore[union-attr]
    except (ValueError, OverflowError):  # NaN, infinity
        return None
    return whole if whole == value else None
