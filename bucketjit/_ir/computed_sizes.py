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
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from bucketjit._ir.expressions import Dim, bind_unique_names, evaluate, is_symbolic
from bucketjit._ir.primitives import cut_to_size, extended
from bucketjit._ir.ranges import Range, is_at_most, is_within_type
from bucketjit._ir.value_bounds import Bounds
from bucketjit._ir.value_numbers import ValueNumbers, negated_mask, unconverted
from bucketjit._jax.config import current_trace
from bucketjit._jax.patches.patch import as_open
from bucketjit._jax.tracers import (
    Unshared,
    equation_of,
    is_inside,
    literal_of,
    trace_of,
    unshared_traces,
)
from bucketjit._jax.user_code import calling_line
from bucketjit.errors import MaskingError

_BITS_OF_SIZES = 32
_DEEPEST = 6  # sums of sizes inside of sums that are looked at


@dataclass(frozen=True)
class Computed:
    """A size that a program computes.

    Attributes:
        bound: The number of rows that it is chosen from, as text of an expression.
        line: The line of user code that computes it; ``""`` if it is not known.
        is_checked: Whether user code has given it, so that it may be out of bounds.
    """

    bound: str
    line: str = ""
    is_checked: bool = False


class _OfTrace:
    """What is known in one trace. It holds values of the trace, so it must not outlive it.

    Attributes:
        trace: The trace.
        values: Which of its values are equal.
        bounds: Their bounds.
        seen: The positions that a mask selects, by the mask.
        variables: The variables of computed sizes, by the number of rows.
        checked: Those that are checked, by that and their bound.
        numbers: The numbers of rows that are values of the trace, by variable.
    """

    def __init__(self, trace: Any) -> None:
        self.trace = trace
        self.values, self.bounds = ValueNumbers(), Bounds()
        self.seen: dict[int, tuple[Any, ...]] = {}
        self.variables: dict[int, str] = {}
        self.checked: dict[tuple[int, str], str] = {}
        self.numbers: dict[str, Any] = {}


class Sizing:
    """Makes the sizes of one trace.

    Attributes:
        computed: The computed sizes, by variable.
        dims: The dimension of each.
    """

    def __init__(self, scope: Any, sizes: dict[str, int], taken: Set[str]) -> None:
        self._scope, self._sizes, self._taken = scope, sizes, taken
        self._of_traces: dict[int, _OfTrace] = {}  # by `id`; the traces that have not ended
        self._unshared: Unshared | None = None
        self.computed: dict[str, Computed] = {}
        self.dims: dict[str, Any] = {}

    @property
    def _known(self) -> _OfTrace:
        """What is known in the trace that records operations now."""
        return self._in(current_trace())

    def _in(self, trace: Any) -> _OfTrace:
        known = self._of_traces.get(id(trace))
        if known is None:
            known = self._of_traces[id(trace)] = _OfTrace(trace)
        return known

    def numbers_in(self, trace: Any) -> Mapping[str, Any]:
        """The numbers of rows that are values of a trace, by variable."""
        return self._in(trace).numbers

    def ended(self, trace: Any) -> None:
        """Drop what is known in a trace and in those inside of it, which holds their values."""
        self._of_traces = {
            k: known for k, known in self._of_traces.items() if not is_inside(known.trace, trace)
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which selections of this thread make sizes."""
        with as_open(self), unshared_traces() as self._unshared:
            yield

    def nonzero(self, array: Any) -> tuple[Any, ...]:
        """The positions of the entries that are not zero, one array for each axis."""
        mask = array if array.dtype == bool else array != 0
        known = self._known
        number = known.values.of(mask)
        if number not in known.seen:
            known.seen[number] = self._positions(mask)
        return known.seen[number]

    def _positions(self, mask: Any) -> tuple[Any, ...]:
        flat = mask if mask.ndim == 1 else mask.reshape(-1)
        total = flat.shape[0]
        ranks = jnp.cumsum(flat, dtype=np.int32)
        # Without a sort: each position is written to the place that is its rank.
        place = jnp.where(flat, ranks - 1, _value(total))
        positions = lax.broadcasted_iota(np.int32, (total,), 0)
        every = (
            jnp.zeros((total,), np.int32)
            .at[place]
            .set(positions, mode="drop", unique_indices=False)
        )
        # As users count: `jnp.arange(mask.sum())` has the size of `x[mask]`.
        (found,) = self._cut([every], jnp.sum(mask))
        found = lax.convert_element_type(found, jax.dtypes.canonicalize_dtype(np.int64))
        outs = []
        for size in reversed(mask.shape[1:]):
            outs.append(found % _value(size, found.dtype))
            found = found // _value(size, found.dtype)
        return (found, *reversed(outs))

    def refuse(self, reason: str, remedy: str) -> NoReturn:
        """Give up: what is asked for cannot be computed in the program."""
        raise MaskingError(reason, remedy)

    def cut(self, arrays: list[Any], n: Any) -> list[Any]:
        """The first ``n`` rows of arrays; ``n`` is checked when the program has run."""
        known = self._known.bounds.of(n)
        within = is_at_most(0, known.low) and is_at_most(known.high, arrays[0].shape[0])
        return self._shared(arrays, _int32(n), is_checked=not within)

    def first(self, array: Any, n: Any, axis: int) -> Any:
        """The first ``n`` positions of an axis, or all if there are fewer."""
        if jnp.iinfo(n.dtype).bits < _BITS_OF_SIZES:
            n = _int32(n)
        size, known = array.shape[axis], self._known.bounds.of(n)
        if not (is_at_most(0, known.low) and is_at_most(known.high, size)):
            n = lax.max(n, np.zeros((), n.dtype))
            n = _int32(lax.min(n, _value(size, n.dtype)))
        (out,) = self._cut([jnp.moveaxis(array, axis, 0)], n)
        return jnp.moveaxis(out, 0, axis)

    def _cut(self, arrays: list[Any], n: Any) -> list[Any]:
        """The first ``n`` rows of arrays that have so many."""
        made = self._made_of_sizes(n)
        if made is None:
            return self._shared(arrays, _int32(n))
        return cut_to_size(
            _int32(n), arrays, dim=made, variable="", is_checked=False, defines=False
        )

    def size(self, n: Any, of: str, by: str = "k", *, is_clamped: bool = False) -> Dim:
        """A traced integer as a size."""
        known = self._known.bounds.of(n)
        is_known = self._variable_of(n) is not None  # then a run checks that it is not negative
        if is_known or is_at_most(0, known.low):
            size = self._made_of_sizes(n)
            if size is not None:
                return size
        if known.high is None:
            self.refuse(
                f"{of}: its size is computed, and nothing in the program bounds it",
                f"bound {by}, as in jnp.minimum({by}, most), or cut an array that is large enough "
                "by bucketjit.sized(array, k), where k is the size; an int that the caller "
                "passes can be static (static_argnames), or a size (an entry such as 'k' in "
                "dynamic_axes)",
            )
        if is_at_most(known.high, 0):
            return 0
        is_checked = not is_at_most(0, known.low)
        if is_checked and is_clamped:
            n, is_checked = lax.max(n, np.zeros((), n.dtype)), False
        places = lax.broadcasted_iota(np.int32, (known.high,), 0)
        (out,) = self._shared([places], _int32(n), is_checked=is_checked)
        return out.shape[0]

    def _variable_of(self, n: Any) -> str | None:
        return self._known.variables.get(self._known.values.of_integer(n))

    def _made_of_sizes(self, n: Any, depth: int = 0) -> Dim | None:
        """A traced integer as an expression of sizes; None if it is none.

        What follows the first ``k`` of ``n`` positions has ``n - k`` of them, so that both parts
        make ``n`` again.
        """
        n = unconverted(n)
        if not isinstance(n, jax.core.Tracer):
            return operator.index(n)
        if (literal := literal_of(n)) is not None:
            return operator.index(np.asarray(literal.val)[()])
        variable = self._variable_of(n)
        if variable is not None:
            return self.dims[variable]
        made = equation_of(n)
        if made is None:
            return None
        name = made.primitive.name
        if name == "dim_as_value":
            return made.params["dim"]
        if jnp.iinfo(n.dtype).bits < _BITS_OF_SIZES:
            return None  # it may wrap around
        if name == "reduce_sum" and (mask := negated_mask(made)) is not None:
            return math.prod(mask.shape) - self.size(jnp.sum(mask), "")
        if name not in ("add", "sub") or depth == _DEEPEST:
            return None
        one, other = (self._made_of_sizes(x, depth + 1) for x in made.operands)
        if name == "add":
            if one is None and isinstance(other, int):
                one = self._new_size(made.operands[0])
            whole = None if one is None or other is None else one + other
            return whole if is_within_type(Range(whole, whole), n.dtype) else None
        taken = self._known.bounds.of(made.operands[1])
        if one is None or not (is_at_most(0, taken.low) and is_at_most(taken.high, one)):
            return None
        other = self._new_size(made.operands[1]) if other is None else other
        return None if other is None else one - other

    def _new_size(self, n: Any) -> Dim | None:
        """A size for an integer that is never negative and has a bound; None for another one."""
        known = self._known.bounds.of(n)
        return self.size(n, "") if is_at_most(0, known.low) and known.high is not None else None

    def position(self, end: Any, size: Dim) -> Any:
        """A traced end of a slice as a position of an axis.

        Nothing is computed where the program bounds it: equal ends are to have equal equations.
        """
        if jnp.iinfo(end.dtype).bits < _BITS_OF_SIZES:
            end = _int32(end)
        if not is_at_most(0, self._known.bounds.of(end).low) and jnp.iinfo(end.dtype).min < 0:
            end = jnp.where(end < 0, end + _value(size, end.dtype), end)
        known = self._known.bounds.of(end)
        if not is_at_most(0, known.low) and jnp.iinfo(end.dtype).min < 0:
            end = lax.max(end, np.zeros((), end.dtype))
        if not is_at_most(known.high, size):
            end = lax.min(end, _value(size, end.dtype))
        return _int32(end)

    def extend(self, array: Any, axis: int, n: Any, size: Dim) -> Any:
        """An axis with zeros after it, up to a size."""
        rows = jnp.moveaxis(array, axis, 0)
        out = extended(_int32(n), rows, dim=rows.shape[0], bound=size)
        return jnp.moveaxis(out, 0, axis)

    def _shared(self, arrays: list[Any], n: Any, *, is_checked: bool = False) -> list[Any]:
        """Cut arrays to ``n`` rows: by the variable of an equal ``n``, or by a new one."""
        if is_at_most(arrays[0].shape[0], 0) and not is_checked:
            return arrays
        known = self._known
        number = known.values.of_integer(n)
        bound = arrays[0].shape[0]
        checked = number, str(bound)
        variable = known.checked.get(checked) if is_checked else known.variables.get(number)
        is_new = variable is None
        if variable is None:
            variable = self._new(n, bound, is_checked)
            if is_checked:
                known.checked[checked] = variable
            known.variables.setdefault(number, variable)
        dim = self.dims[variable]
        return cut_to_size(
            n, arrays, dim=dim, variable=variable, is_checked=is_checked, defines=is_new
        )

    def _new(self, n: Any, bound: Dim, is_checked: bool) -> str:
        name = f"size_{len(self.computed) + 1}"
        name = bind_unique_names(name, {*self._taken, *self.computed})
        (dim,) = export.symbolic_shape(f"{name} - 1", scope=self._scope)
        # Half of the rows decide comparisons: neither they nor the rest are none, if there are two.
        self._sizes[name] = (evaluate(bound, self._sizes) + 1) // 2 + 1
        self.computed[name] = Computed(str(bound), calling_line(), is_checked)
        self.dims[name] = dim
        if (trace := trace_of(n)) is not None:
            self._in(trace).numbers[name] = n
        assert self._unshared is not None
        self._unshared.renew()
        return name


def _value(size: Dim, dtype: Any = np.int32) -> Any:
    """A size as a scalar of the program."""
    if is_symbolic(size):
        return lax.convert_element_type(size.dimension_as_value(), dtype)
    return np.asarray(size, dtype)


def _int32(n: Any) -> Any:
    return lax.convert_element_type(n, np.int32)
