"""The whole of a call of `map`: its options, and the results in the form that the user chose.

An explanation says here what a call would do, and a warm-up learns which batches it compiles.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._compile.rows import Rows, sum_dtype
from bucketjit._config import Check, Out, is_int_from
from bucketjit._events import counted, shown
from bucketjit._ir.expressions import is_symbolic
from bucketjit._ir.interface import Interface
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.rows.examples import Examples, mapped_leaves
from bucketjit._runtime.rows.kinds import Alone, placement_of, rows_sharding
from bucketjit._runtime.rows.run import MapCall, Summed
from bucketjit._runtime.rows.stacked import Ragged, stacked
from bucketjit._runtime.statistics import FrozenDict, share
from bucketjit._tracing.call import Call
from bucketjit._tracing.signer import Signer
from bucketjit.errors import ArgumentError, SpecError

STACKED = "stacked"


@dataclass(frozen=True)
class MapOptions:
    """What the user chose for one call of `map`; ``out`` is the form of each result."""

    out: Out
    is_stacked: bool = False
    token_budget: int | None = None
    reduce: str | None = None


def options_of(configured: Out, reduce: Any, token_budget: Any, out: Any) -> MapOptions:
    if reduce is not None and reduce not in ("sum", "mean"):
        raise SpecError(f"map: reduce must be 'sum', 'mean' or None, got {reduce!r}")
    if token_budget is not None and not is_int_from(token_budget, 1):
        raise SpecError(
            f"map: token_budget must be an int of at least 1, or None, got {token_budget!r}"
        )
    if out is not None and out not in (*(form.value for form in Out), STACKED):
        raise SpecError(f"map: out must be 'jax', 'numpy', 'padded' or 'stacked', got {out!r}")
    if reduce is not None and out in (STACKED, Out.PADDED.value):
        raise SpecError(f"map: a result that is reduced has no rows; out={out!r} is for rows")
    if out == STACKED:
        form = Out.NUMPY if configured is Out.NUMPY else Out.JAX
        return MapOptions(form, True, token_budget)
    return MapOptions(configured if out is None else Out(out), False, token_budget, reduce)


def map_examples(
    engine: Engine,
    examples: Examples,
    options: MapOptions,
    inside: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None,
) -> Any:
    """Run a call of `map`; ``inside`` of a transformation, the function for each example."""
    if inside is not None and options.is_stacked:
        raise SpecError("map: out='stacked' is not for calls inside of jit, grad and the like")
    if inside is not None:
        results = [inside(*examples.call(values)) for values in examples]
        if options.reduce is None:
            return results
        if not results:
            raise _nothing_to_reduce()
        total = functools.reduce(functools.partial(jax.tree_util.tree_map, operator.add), results)
        by = len(results) if options.reduce == "mean" else None
        return total if by is None else jax.tree_util.tree_map(lambda x: x / by, total)
    out = Out.NUMPY if options.is_stacked else options.out
    call = MapCall(engine, examples, out, options.token_budget, options.is_stacked)
    if options.reduce is not None:
        return _reduced(call, options)
    results = call.results()
    if not options.is_stacked:
        return results
    if not results:  # of what tree nobody knows
        return Ragged(np.zeros((0, 0), np.float32), np.zeros(0, np.int32))
    return stacked(results, call.open_axes, options.out is Out.JAX)


# --- explanations ---


@dataclass(frozen=True)
class ExplainedGroup:
    """Examples of one bucket, and the batches that they run in.

    Attributes:
        bucket: The padded size of each variable.
        examples: How many examples there are.
        batches: How many rows the executable of each batch takes.
        missing: The row counts that have no executable yet.
        tokens: Padded tokens of one example.
        real: Elements of the examples that are not padding.
        total: Elements of all batches, padding and spare rows included.
    """

    bucket: Mapping[str, int]
    examples: int
    batches: tuple[int, ...]
    missing: tuple[int, ...]
    tokens: int
    real: int
    total: int

    def __str__(self) -> str:
        batches = Counter(self.batches).items()
        rows = ", ".join(f"{n} x {counted(count, 'row')}" for count, n in batches)
        text = f"{shown(self.bucket)}: {counted(self.examples, 'example')} in {rows}"
        new = f", to compile: {', '.join(map(str, self.missing))} rows" if self.missing else ""
        return f"{text}, {share(self.total - self.real, self.total):.0%} padding{new}"


@dataclass(frozen=True)
class MapExplanation:
    """What a call of `BucketedExec.map` would do. ``print`` it.

    Attributes:
        mapped: The arguments that are lists of examples.
        shared: The other arguments.
        examples: How many examples there are.
        groups: The examples that run in batches, by bucket.
        alone: How many examples run one by one, by reason.
    """

    mapped: tuple[str, ...]
    shared: tuple[str, ...]
    examples: int
    groups: tuple[ExplainedGroup, ...]
    alone: Mapping[str, int]

    @property
    def padding_waste(self) -> float:
        """Share of padding in what the batches compute, 0 to 1."""
        total = sum(group.total for group in self.groups)
        return share(total - sum(group.real for group in self.groups), total)

    def __str__(self) -> str:
        lines = [
            f"{counted(self.examples, 'example')}; lists: {', '.join(self.mapped)}; "
            f"shared: {', '.join(self.shared) or 'none'}"
        ]
        lines += [f"  {group}" for group in self.groups]
        alone = self.alone.items()
        lines += [f"  one by one, {counted(count, 'example')}: {why}" for why, count in alone]
        if self.groups:
            lines.append(f"  padding: {self.padding_waste:.0%} of what is computed")
        return "\n".join(lines)


def explain_map(engine: Engine, examples: Examples, options: MapOptions) -> MapExplanation:
    call = MapCall(engine, examples, options.out, options.token_budget, options.is_stacked)
    summed = options.reduce is not None
    count, groups, alone = 0, [], Counter[str]()
    for window in call.windows():
        count += len(window)
        call.expect(window)
        ways = (row.kind.way for row in window)
        alone.update(way.reason for way in ways if isinstance(way, Alone))
        for planned in call.plan(window, summed):
            way, how = planned.way, (summed, planned.in_turn)
            of_bucket = functools.partial(engine.requests.masked_key, way.program, way.bucket)
            keys = {n: of_bucket(call.kinds.rows(n, *how)) for n in planned.rows}
            groups.append(
                ExplainedGroup(
                    bucket=FrozenDict(way.bucket),
                    examples=len(planned.members),
                    batches=tuple(planned.rows),
                    missing=tuple(n for n, key in keys.items() if key not in engine.cache),
                    tokens=way.tokens,
                    real=sum(window[i].kind.real for i in planned.members),
                    total=sum(planned.rows) * way.elements,
                )
            )
    shared = tuple(examples.words[n] for n in examples.arguments if n not in examples.mapped)
    return MapExplanation(examples.names, shared, count, tuple(groups), FrozenDict(alone))


# --- sums and means ---


def _nothing_to_reduce() -> ArgumentError:
    return ArgumentError("map: there are no examples to reduce; give at least one")


def _reduced(call: MapCall, options: MapOptions) -> Any:
    """The sum or the mean of the results, without a result for each of them.

    The executable of a batch adds the results of its rows up (`bucketjit._compile.rows`), and the
    sums of batches are added here. So the gradients of a loss take the memory of one gradient.
    """
    if (total := functools.reduce(_added, _parts(call), None)) is None:
        raise _nothing_to_reduce()
    leaves = []
    for value, dtype in zip(total.values, total.dtypes, strict=True):
        value = value / total.rows if options.reduce == "mean" else value
        value = value.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else value
        leaves.append(np.asarray(value) if options.out is Out.NUMPY else value)
    return total.tree.unflatten(leaves)


def _parts(call: MapCall) -> Iterator[Summed]:
    """The sums over some examples; each result, where it is compared with an exact one."""
    for window in call.windows():
        for program in dict.fromkeys(row.kind.call.program for row in window):
            if program is not None:
                _refuse_open_results(program)
        is_compared = call.engine.config.check in (Check.EXACT, Check.EXACT_ALWAYS)
        for _, parts in call.run(window, summed=not is_compared):
            yield from (part if isinstance(part, Summed) else _of_one(part) for part in parts)


def _of_one(result: Any) -> Summed:
    leaves, tree = jax.tree_util.tree_flatten(result)
    arrays = [jnp.asarray(x) for x in leaves]
    return Summed(
        tree, [x.dtype for x in arrays], [x.astype(sum_dtype(x.dtype)) for x in arrays], 1
    )


_add = jax.jit(lambda xs, ys: list(map(operator.add, xs, ys)), donate_argnums=0)


def _added(total: Summed | None, part: Summed) -> Summed:
    """The sum of two sums; the memory of the first one is used again."""
    if total is None:
        return part
    shapes = [[np.shape(x) for x in s.values] for s in (total, part)]
    if total.tree != part.tree or shapes[0] != shapes[1]:
        raise ArgumentError(
            "map: results that differ between examples cannot be added: "
            f"{total.tree.unflatten(shapes[0])} and {part.tree.unflatten(shapes[1])}"
        )
    return total._replace(values=_add(total.values, part.values), rows=total.rows + part.rows)


def _refuse_open_results(program: Interface) -> None:
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


# --- warming up ---


def rows_to_compile(
    signer: Signer,
    call: Call,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: object,
    in_axes: object,
) -> list[Rows]:
    """The batches that a warm-up asks for."""
    mapped = mapped_leaves(signer, call, args, kwargs, in_axes)
    sharding = rows_sharding(leaf for i, leaf in enumerate(call.leaves) if i not in mapped)
    return [
        Rows(count, mapped, placement=placement_of(sharding, count)) for count in _row_counts(rows)
    ]


def _row_counts(rows: object) -> list[int]:
    """Numbers of rows, each rounded up to a power of two."""
    every = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, str) else [rows]
    rounded: dict[int, None] = {}
    for count in every:
        if not is_int_from(count, 1):
            raise SpecError(f"warmup: rows must be ints of at least 1, got {count!r}")
        assert isinstance(count, int)
        rounded[1 << (count - 1).bit_length()] = None
    if not rounded:
        raise SpecError("warmup: rows names no number of rows; give at least one")
    return list(rounded)
