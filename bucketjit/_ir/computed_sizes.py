"""Sizes that a program computes, while it is traced: selections by masks, `sized`.

    y = x[x > 0]        k = sum(x > 0), positions of the True entries by cumsum and scatter
                        sized[variable=size_1] k positions, then a gather

`bucketjit._jax.patches.selections` calls `Sizing.nonzero` in the place of JAX's function, which
asks for a concrete mask. Each selection has a dimension variable of its own. Equal selections share
one: `ValueNumbers` tells which masks are equal.

The caches of ``jit`` must not hold a program that makes a size. So a function is traced in two
steps: `Noticing` stops the first trace where a size would be made, and the second one runs with
`Sizing`, under `unshared_traces`.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from bucketjit._ir.sized import sized_p
from bucketjit._jax.jaxprs import is_jaxpr
from bucketjit._jax.tracers import Unshared, equation_of, literal_of, unshared_traces
from bucketjit._jax.transformations import current_trace
from bucketjit._jax.user_code import calling_line
from bucketjit._sizes.expressions import Dim, bind_unique_names, evaluate, is_symbolic


class SizeIsComputed(Exception):
    """The function computes a size, and is traced where it cannot."""


class Open(Protocol):
    """What a selection does in this thread while a function is traced."""

    def nonzero(self, array: Any) -> tuple[Any, ...]:
        """The positions of the entries that are not zero, one array for each axis."""

    def cut(self, arrays: list[Any], n: Any) -> list[Any]:
        """The first ``n`` rows of arrays."""


_of_thread = threading.local()


def selecting() -> Open | None:
    """What selections do in this thread; None if JAX's own functions are to run."""
    return getattr(_of_thread, "open", None)


@contextmanager
def _as_open(value: Open | None) -> Iterator[None]:
    before = selecting()
    _of_thread.open = value
    try:
        yield
    finally:
        _of_thread.open = before


class Noticing:
    """Stops a trace where it would compute a size.

    Attributes:
        noticed: Whether it has stopped one. User code may have caught the error.
    """

    def __init__(self) -> None:
        self.noticed = False

    def nonzero(self, array: Any) -> tuple[Any, ...]:
        """Raise `SizeIsComputed`."""
        self.noticed = True
        raise SizeIsComputed

    def cut(self, arrays: list[Any], n: Any) -> list[Any]:
        """Raise `SizeIsComputed`."""
        self.noticed = True
        raise SizeIsComputed

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which traces of this thread stop."""
        with _as_open(self):
            yield


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


class Sizing:
    """Makes the sizes of one trace.

    Args:
        scope: The symbolic scope of the trace.
        sizes: The size of each dimension variable. The presumed values of computed sizes are added.
        taken: Names of variables that no computed size may have.
        presumed: Presumed values of computed sizes; by default everything is selected.

    Attributes:
        computed: The computed sizes, by variable.
        numbers: The number of rows of each, an int32 tracer.
        dims: The dimension of each.
    """

    def __init__(
        self,
        scope: Any,
        sizes: dict[str, int],
        taken: Set[str],
        presumed: Mapping[str, int],
    ) -> None:
        self._scope, self._sizes, self._taken, self._presumed = scope, sizes, taken, presumed
        self._values = ValueNumbers()
        self._seen: dict[Any, tuple[Any, ...]] = {}
        self._kept: list[Any] = []  # traces, whose `id` is part of a key
        self._unshared: Unshared | None = None
        self.computed: dict[str, Computed] = {}
        self.numbers: dict[str, Any] = {}
        self.dims: dict[str, Any] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which selections of this thread make sizes."""
        with _as_open(self), unshared_traces() as self._unshared:
            yield

    def nonzero(self, array: Any) -> tuple[Any, ...]:
        """The positions of the entries that are not zero, one array for each axis.

        Args:
            array: The array. It has an axis at least.

        Returns:
            Arrays of one computed size. For an equal array they are the same.
        """
        mask = array if array.dtype == bool else array != 0
        trace = current_trace()
        key = id(trace), self._values.of(mask)
        if key not in self._seen:
            self._kept.append(trace)
            self._seen[key] = self._positions(mask)
        return self._seen[key]

    def _positions(self, mask: Any) -> tuple[Any, ...]:
        flat = mask.reshape(-1)
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
        (found,) = self._cut([every], jnp.sum(flat, dtype=np.int32), is_checked=False)
        found = lax.convert_element_type(found, jax.dtypes.canonicalize_dtype(np.int64))
        outs = []
        for size in reversed(mask.shape[1:]):
            outs.append(found % _value(size, found.dtype))
            found = found // _value(size, found.dtype)
        return (found, *reversed(outs))

    def cut(self, arrays: list[Any], n: Any) -> list[Any]:
        """The first ``n`` rows of arrays; ``n`` is checked when the program has run.

        Args:
            arrays: The arrays, of an equal number of rows.
            n: An integer scalar.
        """
        return self._cut(arrays, lax.convert_element_type(n, np.int32), is_checked=True)

    def _cut(self, arrays: list[Any], n: Any, is_checked: bool) -> list[Any]:
        bound = arrays[0].shape[0]
        name = f"size_{len(self.computed) + 1}"
        name = bind_unique_names(name, {*self._taken, *self.computed})
        (dim,) = export.symbolic_shape(f"{name} - 1", scope=self._scope)
        most = evaluate(bound, self._sizes) + 1
        self._sizes[name] = self._presumed.get(name, most)
        self.computed[name] = Computed(str(bound), calling_line(), is_checked)
        self.numbers[name], self.dims[name] = n, dim
        assert self._unshared is not None
        self._unshared.renew()
        outs = sized_p.bind(n, *arrays, variable=name, dim=dim, bound=bound, is_checked=is_checked)
        return list(outs)


def _value(size: Dim, dtype: Any = np.int32) -> Any:
    """A size as a scalar of the program."""
    if is_symbolic(size):
        return lax.convert_element_type(size.dimension_as_value(), dtype)
    return np.asarray(size, dtype)


_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.dtype, np.generic, enum.Enum, type)


class ValueNumbers:
    """Numbers the values of a trace: equal equations of equal operands have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, tuple[Any, int]] = {}  # by `id`; the value is kept alive

    def of(self, value: Any) -> int:
        """The number of a value.

        Args:
            value: A tracer, an array or a number.
        """
        stack = [value]  # no recursion: programs are deeper than Python's stack
        while stack:
            one = stack[-1]
            if id(one) in self._known:
                stack.pop()
                continue
            made = equation_of(one)
            missing = [x for x in (made.operands if made else ()) if id(x) not in self._known]
            if missing:
                stack += missing
                continue
            stack.pop()
            self._known[id(one)] = one, self._number(self._key(one, made))
        return self._known[id(value)][1]

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _key(self, value: Any, made: Any) -> Any:
        if made is not None:
            operands = tuple(self._known[id(x)][1] for x in made.operands)
            params = tuple((k, self._param(v)) for k, v in sorted(made.params.items()))
            return made.primitive.name, made.position, params, operands
        literal = literal_of(value)
        if literal is not None:
            return "literal", str(literal.aval), repr(np.asarray(literal.val).tolist())
        if not isinstance(value, jax.core.Tracer) and np.ndim(value) == 0:
            return "number", str(jax.typeof(value)), repr(np.asarray(value).tolist())
        return "one", id(value)

    def _param(self, value: Any) -> Any:
        """The key of a parameter: by value if it is a plain one, else by identity."""
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(self._param, value))
        if is_symbolic(value) or (isinstance(value, _PLAIN) and not is_jaxpr(value)):
            return type(value).__name__, repr(value)
        self._known[id(value)] = value, -1  # kept alive
        return id(value)
