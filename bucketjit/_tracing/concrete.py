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
from bucketjit._jax.patches.patch import Noticing, SizeIsComputed
from bucketjit._raised import is_of_machine
from bucketjit._tracing.attempt import traced
from bucketjit._tracing.held_output import begin_trace, holding_output
from bucketjit._tracing.own_constants import own_constants
from bucketjit._tracing.skeleton import Skeleton, decompose

X = TypeVar("X")

_RECENT = 16  # traces that each tracer keeps whole

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Concrete:
    """A trace at concrete sizes.

    Attributes:
        jaxpr: The open jaxpr.
        consts: Values of its constants.
        out_tree: Tree of its outputs.
        skeleton: The jaxpr, decomposed.
    """

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
        self._fn = fn
        self._in_tree = in_tree
        self._leaves = tuple(leaves)
        texts = {d for leaf in leaves for d in leaf.shape if isinstance(d, str)}
        self.tokens = sorted(texts)
        self.variables = sorted({v for t in texts for v in variables_of(t)})
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
        begin_trace()
        inputs = [self._input(leaf, sizes) for leaf in self._leaves]
        out_tree: Any = None

        def finish(outs: Any) -> Any:
            nonlocal out_tree
            out_tree = jax.tree_util.tree_structure(outs)
            return outs

        try:
            closed = traced(self._fn, self._in_tree, inputs, finish, [Noticing().active()])
        except SizeIsComputed as error:
            refusal = TraceRefused(
                "a function that computes sizes is traced with symbolic sizes only",
                "avoid what symbolic sizes refuse",
            )
            refusal.computes_sizes = True
            raise refusal from error
        closed = without_hi_primitives(closed)
        jaxpr, consts = open_jaxpr(closed)
        refuse_tracers(consts)
        jaxpr, consts = own_constants(without_dead_code(jaxpr), consts)
        return Concrete(jaxpr, consts, out_tree, decompose(jaxpr, consts))

    @staticmethod
    def _input(leaf: Leaf, sizes: Sizes) -> Any:
        shape = leaf.at(sizes)
        return shape[0] if leaf.is_size else leaf.struct(shape)


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
        try:
            try:
                return ask()
            except Exception as error:
                if not is_of_machine(error):
                    raise
            return ask()
        except Exception as error:
            failed(error)
            return None
