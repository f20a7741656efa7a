"""Trace a function at concrete sizes, and keep the traces.

`bucketjit._tracing.pairing` makes a program of several of them, where symbolic sizes are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import cachetools
import jax
from jax.tree_util import PyTreeDef

from bucketjit._ir.expressions import variables_of
from bucketjit._ir.program import Leaf, TraceRefused, refuse_tracers
from bucketjit._jax.jaxprs import open_jaxpr, without_dead_code, without_hi_primitives
from bucketjit._raised import is_of_machine
from bucketjit._tracing.attempt import traced
from bucketjit._tracing.computed.sizes import Noticing, SizeIsComputed
from bucketjit._tracing.held_output import holding_output
from bucketjit._tracing.own_constants import own_constants
from bucketjit._tracing.skeleton import Skeleton, decompose

X = TypeVar("X")

_RECENT = 16  # traces that each tracer keeps whole

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Concrete:
    """A trace at concrete sizes."""

    jaxpr: Any
    consts: Sequence[Any]
    out_tree: Any
    skeleton: Skeleton


class Tracer:
    """Traces one function at concrete sizes.

    Attributes:
        tokens: Every size expression in the shapes of the leaves, sorted.
        variables: The dimension variables in them, sorted.
    """

    def __init__(self, fn: Callable[..., Any], in_tree: PyTreeDef, leaves: Sequence[Leaf]) -> None:
        self._fn, self._in_tree, self._leaves = fn, in_tree, tuple(leaves)
        self.tokens = sorted({d for leaf in leaves for d in leaf.shape if isinstance(d, str)})
        self.variables = sorted({v for token in self.tokens for v in variables_of(token)})
        self._recent: Any = cachetools.LRUCache(_RECENT)
        self._lock = threading.RLock()

    def at(self, sizes: Sizes) -> Concrete:
        """The trace at these sizes; the last `_RECENT` traces are kept and returned again.

        Tracing twice at one size may fail: user code that caches what it makes by size
        (``table[n] = jnp.arange(n)``) would read a tracer of the first trace in the second.
        """
        key = tuple(sizes[v] for v in self.variables)
        with self._lock:
            if key not in self._recent:
                self._recent[key] = self._trace(sizes)
            return self._recent[key]

    def _trace(self, sizes: Sizes) -> Concrete:
        shapes = [leaf.at(sizes) for leaf in self._leaves]
        pairs = zip(self._leaves, shapes, strict=True)
        inputs = [shape[0] if leaf.is_size else leaf.struct(shape) for leaf, shape in pairs]
        out_tree: Any = None

        def finish(outs: Any) -> Any:
            nonlocal out_tree
            out_tree = jax.tree_util.tree_structure(outs)
            return outs

        try:
            closed = traced(self._fn, self._in_tree, inputs, finish, [Noticing().active()])
        except SizeIsComputed as error:
            raise TraceRefused(
                "a function that computes sizes is traced with symbolic sizes only",
                "avoid what symbolic sizes refuse",
                computes_sizes=True,
            ) from error
        jaxpr, consts = open_jaxpr(without_hi_primitives(closed))
        refuse_tracers(consts)
        jaxpr, consts = own_constants(without_dead_code(jaxpr), consts)
        return Concrete(jaxpr, consts, out_tree, decompose(jaxpr, consts))


def at_other_sizes(
    ask: Callable[[], X], failed: Callable[[Exception], object] = lambda error: None
) -> X | None:
    """The result of a trace at sizes other than those of a call; None if it fails.

    The caller did not ask for these sizes, so no error is raised. After an error of the machine,
    which may be gone a moment later, the trace is tried once more. An error that comes again is
    due to the sizes (an array of ``n`` times ``n`` numbers).
    """
    with holding_output() as held:
        held.is_dropped = True
        for is_last in (False, True):
            try:
                return ask()
            except Exception as error:
                if is_last or not is_of_machine(error):
                    failed(error)
                    break
        return None
