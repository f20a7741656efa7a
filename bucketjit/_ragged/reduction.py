"""Sums and means of the results of many examples, without a result for each of them.

The executable of a batch adds the results of its rows up (`bucketjit._compile.rows`), and the
sums of batches are added here. So the gradients of a loss take the memory of one gradient, however
many examples there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._compile.executable import SignatureChanged
from bucketjit._compile.rows import sum_dtype
from bucketjit._config import Check, Out
from bucketjit._masking.checks import POISONS, compare, failed
from bucketjit._ragged.batches import SharedArguments, counted_batch, launch
from bucketjit._ragged.kinds import Alone, Batched, Row
from bucketjit._ragged.run import PLACED, MapCall
from bucketjit._runtime.engine import Engine
from bucketjit._sizes.expressions import is_symbolic
from bucketjit._tracing.interface import Interface
from bucketjit.errors import ArgumentError, MaskingError


def reduced(call: MapCall, engine: Engine, mean: bool, out: Out) -> Any:
    """The sum or the mean of the results of a call of `map`."""
    total = _Total()
    check = engine.config.check
    if check in (Check.EXACT, Check.EXACT_ALWAYS):  # each example is compared
        for result in call.results():
            total.add_result(result)
    else:
        for window in call.windows():
            programs = dict.fromkeys(row.kind.call.program for row in window)
            for program in programs:
                if program is not None:
                    _refuse_open_results(program)
            for part in _Window(call, engine, window).parts():
                part(total)
    return total.finished(mean, out)


class _Total:
    """The sum so far."""

    def __init__(self) -> None:
        self.count = 0
        self._tree: Any = None
        self._dtypes: list[Any] = []
        self._sums: list[Any] | None = None

    def add(self, tree: Any, dtypes: Sequence[Any], sums: list[Any], rows: int) -> None:
        """Add the sum over some examples."""
        self.count += rows
        if self._sums is None:
            self._tree, self._dtypes, self._sums = tree, list(dtypes), sums
            return
        shapes = [[np.shape(x) for x in every] for every in (self._sums, sums)]
        if tree != self._tree or shapes[0] != shapes[1]:
            raise ArgumentError(
                "map: results that differ between examples cannot be added: "
                f"{self._tree.unflatten(shapes[0])} and {tree.unflatten(shapes[1])}"
            )
        self._sums = _adding()(self._sums, sums)

    def add_result(self, result: Any) -> None:
        """Add the result of one example."""
        leaves, tree = jax.tree_util.tree_flatten(result)
        arrays = [jnp.asarray(x) for x in leaves]
        sums = [x.astype(sum_dtype(x.dtype)) for x in arrays]
        self.add(tree, [x.dtype for x in arrays], sums, 1)

    def finished(self, mean: bool, out: Out) -> Any:
        """The result."""
        if self._sums is None:
            raise no_examples()
        found = []
        for total, dtype in zip(self._sums, self._dtypes, strict=True):
            value = total / self.count if mean else total
            is_float = jnp.issubdtype(dtype, jnp.inexact)
            value = value.astype(dtype) if is_float else value
            found.append(np.asarray(value) if out is Out.NUMPY else value)
        return self._tree.unflatten(found)


class _Window:
    """The sums of the examples of one window."""

    def __init__(self, call: MapCall, engine: Engine, window: Sequence[Row]) -> None:
        self._call, self._engine, self._window = call, engine, window
        self._shared = SharedArguments(call.mapped)

    def parts(self) -> Iterator[Callable[[_Total], None]]:
        """What adds each batch, and each example that runs alone, to a total."""
        for planned in self._call.plan(self._window, summed=True):
            for count, members in planned.batches():
                rows = [self._window[i] for i in members]
                yield functools.partial(self._batch, planned.way, count, rows)
        for row in self._window:
            if isinstance(row.kind.way, Alone):
                yield functools.partial(self._alone, [row], row.kind.way.why)

    def _alone(self, rows: Iterable[Row], why: MaskingError | None, total: _Total) -> None:
        for row in rows:
            for result in self._call.run_alone([row], why):
                total.add_result(result)

    def _batch(self, way: Batched, count: int, rows: Sequence[Row], total: _Total) -> None:
        call, engine = self._call, self._engine
        found = call.executable(way, call.kinds.rows(count, summed=True), rows[0])
        if isinstance(found, Alone):
            return self._alone(rows, found.why, total)
        entry, _ = found
        given = entry, rows, call.kinds, self._shared
        try:
            if engine.config.check is Check.POISON:
                sums, other = (launch(*given, poison).outs for poison in enumerate(POISONS))
                if problem := compare(sums, other, "the same batch with other padding", True):
                    for row in rows:  # the call of one of them blames an equation
                        call.run_alone([row], None)
                    raise failed(f"{engine.name}.map", problem, "")
            else:
                sums = launch(*given).outs
        except SignatureChanged:
            return self._alone(rows, PLACED, total)
        engine.counters.batch(counted_batch(entry, rows, call.mapped))
        program = way.program
        dtypes = [dtype for dtype, _ in program.out_types]
        total.add(rows[0].kind.call.out_tree, dtypes, sums, len(rows))
        return None


def no_examples() -> ArgumentError:
    """The error of a reduction without examples."""
    return ArgumentError("map: there are no examples to reduce; give at least one")


def _refuse_open_results(program: Interface) -> None:
    """Refuse a program whose results cannot be added."""
    paths = jax.tree_util.tree_leaves_with_path(
        program.out_tree.unflatten(range(program.out_tree.num_leaves))
    )
    for (path, _), shape, (dtype, _) in zip(
        paths, program.out_shapes, program.out_types, strict=True
    ):
        what = f"result{jax.tree_util.keystr(path)}"
        if any(map(is_symbolic, shape)):
            raise ArgumentError(
                f"map: {what} is {dtype}[{', '.join(map(str, shape))}], so it differs between "
                "examples and cannot be added; reduce it in the function"
            )
        if dtype == jax.dtypes.float0 or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            raise ArgumentError(f"map: {what} is of dtype {dtype}, which cannot be added")


@functools.cache
def _adding() -> Callable[[list[Any], list[Any]], list[Any]]:
    """A function that adds two lists of arrays, and reuses the first one's memory."""

    def add(one: list[Any], other: list[Any]) -> list[Any]:
        return [x + y for x, y in zip(one, other, strict=True)]

    return jax.jit(add, donate_argnums=0)
