"""Sizes that a program computes, while it is traced: selections by masks, `sized`.

    y = x[x > 0]        k = sum(x > 0), positions of the True entries by cumsum and scatter
                        sized[variable=size_1] k positions, then a gather

`bucketjit._jax.patches.selections` calls `Sizing` in the place of JAX's functions, which ask for
concrete masks and sizes. Each size has a dimension variable of its own. Equal numbers of rows share
one: `ValueNumbers` tells which integers and masks are equal. What is made of sizes, as what follows
the first ``k`` positions is, has an expression of them. `Bounds` says how large a size can be.

The caches of ``jit`` must not hold a program that makes a size. So a function is traced in two
steps: `Noticing` stops the first trace where a size would be made, and the second one runs with
`Sizing`, under `unshared_traces`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from bucketjit._ir.expressions import Dim, bind_unique_names, evaluate
from bucketjit._ir.interface import Computed
from bucketjit._ir.primitives import sized_p, unsized_p
from bucketjit._ir.ranges import Range, is_at_most, is_within_type, sum_of
from bucketjit._jax import tracers
from bucketjit._jax.config import current_trace
from bucketjit._jax.patches.patch import as_open, as_value
from bucketjit._jax.user_code import calling_line
from bucketjit._tracing.computed import values
from bucketjit.errors import MaskingError

_DEEPEST = 6  # sums of sizes inside of sums that are looked at


class _FactsOfTrace:
    """What is known in one trace. It holds values of the trace, so it must not outlive it.

    Attributes:
        trace: The trace.
        values: Which of its values are equal.
        bounds: Their bounds.
        positions: The positions that a mask selects, by the mask.
        variables: The variables of computed sizes, by the number of rows and, of those that are
            checked, the bound.
        numbers: The numbers of rows that are values of the trace, by variable.
    """

    def __init__(self, trace: Any) -> None:
        self.trace = trace
        self.values, self.bounds = values.ValueNumbers(), values.Bounds()
        self.positions: dict[int, tuple[Any, ...]] = {}
        self.variables: dict[tuple[int, str], str] = {}
        self.numbers: dict[str, Any] = {}


class Sizing:
    """Makes the sizes of one trace.

    Attributes:
        computed: The computed sizes, by variable.
        dims: The dimension of each.
    """

    def __init__(self, scope: Any, sizes: dict[str, int], taken: Set[str]) -> None:
        self._scope, self._sizes, self._taken = scope, sizes, taken
        self._of_traces: dict[int, _FactsOfTrace] = {}  # by `id`; the traces that have not ended
        self._renew_traces: Callable[[], None] | None = None
        self.computed: dict[str, Computed] = {}
        self.dims: dict[str, Any] = {}

    def _facts(self, trace: Any = None) -> _FactsOfTrace:
        """What is known in a trace, or in the one that records operations now."""
        trace = current_trace() if trace is None else trace
        if id(trace) not in self._of_traces:
            self._of_traces[id(trace)] = _FactsOfTrace(trace)
        return self._of_traces[id(trace)]

    def _bounds(self, n: Any) -> Range:
        return self._facts().bounds.of(n)

    def numbers_in(self, trace: Any) -> Mapping[str, Any]:
        """The numbers of rows that are values of a trace, by variable."""
        return self._facts(trace).numbers

    def ended(self, trace: Any) -> None:
        """Drop what is known in a trace and in those inside of it, which holds their values."""
        facts = self._of_traces.items()
        self._of_traces = {key: of for key, of in facts if not tracers.is_inside(of.trace, trace)}

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which selections of this thread make sizes."""
        with as_open(self), tracers.unshared_traces() as self._renew_traces:
            yield

    def nonzero(self, array: Any) -> tuple[Any, ...]:
        """The positions of the entries that are not zero, one array for each axis."""
        mask = array if array.dtype == bool else array != 0
        facts = self._facts()
        number = facts.values.of(mask)
        if number not in facts.positions:
            facts.positions[number] = self._positions(mask)
        return facts.positions[number]

    def _positions(self, mask: Any) -> tuple[Any, ...]:
        flat = mask if mask.ndim == 1 else mask.reshape(-1)
        total = flat.shape[0]
        ranks = jnp.cumsum(flat, dtype=np.int32)
        # Without a sort: each position is written to the place that is its rank.
        place = jnp.where(flat, ranks - 1, as_value(total))
        positions = lax.broadcasted_iota(np.int32, (total,), 0)
        every = jnp.zeros((total,), np.int32)
        every = every.at[place].set(positions, mode="drop", unique_indices=False)
        # As users count: `jnp.arange(mask.sum())` has the size of `x[mask]`.
        (selected,) = self._cut([every], jnp.sum(mask))
        selected = lax.convert_element_type(selected, jax.dtypes.canonicalize_dtype(np.int64))
        outs = []
        for size in reversed(mask.shape[1:]):
            outs.append(selected % as_value(size, selected.dtype))
            selected = selected // as_value(size, selected.dtype)
        return (selected, *reversed(outs))

    def refuse(self, reason: str, remedy: str) -> NoReturn:
        """Give up: what is asked for cannot be computed in the program."""
        raise MaskingError(reason, remedy)

    def cut(self, arrays: list[Any], n: Any) -> list[Any]:
        """The first ``n`` rows of arrays; ``n`` is checked when the program has run."""
        is_checked = not _is_within(self._bounds(n), arrays[0].shape[0])
        return self._shared(arrays, _int32(n), is_checked=is_checked)

    def first(self, array: Any, n: Any, axis: int) -> Any:
        """The first ``n`` positions of an axis, or all if there are fewer."""
        n, size = _widened(n), array.shape[axis]
        if not _is_within(self._bounds(n), size):
            n = lax.max(n, np.zeros((), n.dtype))
            n = _int32(lax.min(n, as_value(size, n.dtype)))
        (out,) = self._cut([jnp.moveaxis(array, axis, 0)], n)
        return jnp.moveaxis(out, 0, axis)

    def _cut(self, arrays: list[Any], n: Any) -> list[Any]:
        dim = self._made_of_sizes(n)
        if dim is None:
            return self._shared(arrays, _int32(n))
        return _cut_to(_int32(n), arrays, dim)

    def size(self, n: Any, of: str, by: str = "k", *, is_clamped: bool = False) -> Dim:
        """A traced integer as a size."""
        bounds = self._bounds(n)
        has_variable = self._variable_of(n) is not None  # then a run checks that it is not negative
        if has_variable or is_at_most(0, bounds.low):
            size = self._made_of_sizes(n)
            if size is not None:
                return size
        if bounds.high is None:
            self.refuse(
                f"{of}: its size is computed, and nothing in the program bounds it",
                f"bound {by}, as in jnp.minimum({by}, most), or cut an array that is large enough "
                "by bucketjit.sized(array, k), where k is the size; an int that the caller "
                "passes can be static (static_argnames), or a size (an entry such as 'k' in "
                "dynamic_axes)",
            )
        if is_at_most(bounds.high, 0):
            return 0
        is_checked = not is_at_most(0, bounds.low)
        if is_checked and is_clamped:
            n, is_checked = lax.max(n, np.zeros((), n.dtype)), False
        places = lax.broadcasted_iota(np.int32, (bounds.high,), 0)
        (out,) = self._shared([places], _int32(n), is_checked=is_checked)
        return out.shape[0]

    def _variable_of(self, n: Any) -> str | None:
        facts = self._facts()
        return facts.variables.get((facts.values.of_integer(n), ""))

    def _made_of_sizes(self, n: Any, depth: int = 0) -> Dim | None:
        """A traced integer as an expression of sizes; None if it is none.

        What follows the first ``k`` of ``n`` positions has ``n - k`` of them, so that both parts
        make ``n`` again.
        """
        n = values.unconverted(n)
        if not isinstance(n, jax.core.Tracer):
            return operator.index(n)
        if (literal := tracers.literal_of(n)) is not None:
            return operator.index(np.asarray(literal.val)[()])
        variable = self._variable_of(n)
        if variable is not None:
            return self.dims[variable]
        eqn = tracers.equation_of(n)
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name == "dim_as_value":
            return eqn.params["dim"]
        if jnp.iinfo(n.dtype).bits < values.BITS_OF_SIZES:
            return None  # it may wrap around
        if name == "reduce_sum" and (mask := values.negated_mask(eqn)) is not None:
            return math.prod(mask.shape) - self.size(jnp.sum(mask), "")
        if name not in ("add", "sub") or depth == _DEEPEST:
            return None
        left, right = (self._made_of_sizes(x, depth + 1) for x in eqn.operands)
        if name == "add":
            if left is None and isinstance(right, int):
                left = self._new_size(eqn.operands[0])
            total = sum_of(left, right)
            return total if is_within_type(Range(total, total), n.dtype) else None
        if left is None or not _is_within(self._bounds(eqn.operands[1]), left):
            return None
        right = self._new_size(eqn.operands[1]) if right is None else right
        return None if right is None else left - right

    def _new_size(self, n: Any) -> Dim | None:
        """A size for an integer that is never negative and has a bound; None for another one."""
        bounds = self._bounds(n)
        return self.size(n, "") if is_at_most(0, bounds.low) and bounds.high is not None else None

    def position(self, end: Any, size: Dim) -> Any:
        """A traced end of a slice as a position of an axis.

        Nothing is computed where the program bounds it: equal ends are to have equal equations.
        """
        end = _widened(end)
        has_sign = jnp.iinfo(end.dtype).min < 0
        if has_sign and not is_at_most(0, self._bounds(end).low):
            end = jnp.where(end < 0, end + as_value(size, end.dtype), end)
        bounds = self._bounds(end)
        if has_sign and not is_at_most(0, bounds.low):
            end = lax.max(end, np.zeros((), end.dtype))
        if not is_at_most(bounds.high, size):
            end = lax.min(end, as_value(size, end.dtype))
        return _int32(end)

    def extend(self, array: Any, axis: int, n: Any, size: Dim) -> Any:
        """An axis with zeros after it, up to a size."""
        rows = jnp.moveaxis(array, axis, 0)
        params = {"variable": "", "is_checked": False, "defines": False}
        (out,) = unsized_p.bind(_int32(n), rows, dim=rows.shape[0], bound=size, **params)
        return jnp.moveaxis(out, 0, axis)

    def _shared(self, arrays: list[Any], n: Any, *, is_checked: bool = False) -> list[Any]:
        """Cut arrays to ``n`` rows: by the variable of an equal ``n``, or by a new one."""
        bound, facts = arrays[0].shape[0], self._facts()
        if is_at_most(bound, 0) and not is_checked:
            return arrays
        number = facts.values.of_integer(n)
        key = number, str(bound) if is_checked else ""
        is_new = key not in facts.variables
        if is_new:
            facts.variables[key] = self._new(n, bound, is_checked)
            facts.variables.setdefault((number, ""), facts.variables[key])
        variable = facts.variables[key]
        return _cut_to(n, arrays, self.dims[variable], variable, is_checked, is_new)

    def _new(self, n: Any, bound: Dim, is_checked: bool) -> str:
        name = f"size_{len(self.computed) + 1}"
        name = bind_unique_names(name, {*self._taken, *self.computed})
        (dim,) = export.symbolic_shape(f"{name} - 1", scope=self._scope)
        # Half of the rows decide comparisons: neither they nor the rest are none, if there are two.
        self._sizes[name] = (evaluate(bound, self._sizes) + 1) // 2 + 1
        self.computed[name] = Computed(str(bound), calling_line(), is_checked)
        self.dims[name] = dim
        if (trace := tracers.trace_of(n)) is not None:
            self._facts(trace).numbers[name] = n
        assert self._renew_traces is not None
        self._renew_traces()
        return name


def _cut_to(
    n: Any,
    arrays: Sequence[Any],
    dim: Dim,
    variable: str = "",
    is_checked: bool = False,
    defines: bool = False,
) -> list[Any]:
    params = {"variable": variable, "is_checked": is_checked, "defines": defines}
    return list(sized_p.bind(n, *arrays, dim=dim, bound=arrays[0].shape[0], **params))


def _is_within(bounds: Range, size: Dim) -> bool:
    return is_at_most(0, bounds.low) and is_at_most(bounds.high, size)


def _widened(n: Any) -> Any:
    return _int32(n) if jnp.iinfo(n.dtype).bits < values.BITS_OF_SIZES else n


def _int32(n: Any) -> Any:
    return lax.convert_element_type(n, np.int32)
