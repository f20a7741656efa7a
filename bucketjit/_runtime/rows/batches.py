"""Run one batch.

A batch fills a buffer for each argument, runs the executable, and cuts the results by rows:

rows       x: f32[3, d], f32[5, d]      bucket n <= 8, 2 rows
buffer     x: f32[2, 8, d]              each row at its place, zeros after its end
result     y: f32[2, 8]                 y[0, :3], y[1, :5] as views of one host array
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import cut, pad, plain
from bucketjit._compile.argument_types import is_open
from bucketjit._compile.executable import Executable
from bucketjit._compile.rows import batch_sizes
from bucketjit._config import Check, Out
from bucketjit._jax.arrays import host_placer, is_key, is_on_several_devices, key_impl, key_shape
from bucketjit._masking.checks import POISONS, compare, failed, poison_value
from bucketjit._runtime.checked_calls import is_of_jit
from bucketjit._runtime.counters import CountedBatch
from bucketjit._runtime.rows.kinds import Kinds, Row, placement_of
from bucketjit._tracing.call import Call


def _shared_leaves(kinds: Kinds, like: Call, pads: Mapping[int, tuple[int, ...]]) -> dict[int, Any]:
    """The leaves that all examples share, as an executable takes them; padded for it once."""
    leaves = {}
    for i, leaf in enumerate(like.leaves):
        if i in kinds.mapped:
            continue
        key = i, pads.get(i)
        if key not in kinds.shared:
            operand = plain(leaf) if key[1] is None else pad(leaf, key[1])
            # One copy for all batches, not one for each.
            is_host = type(operand) is np.ndarray and operand.dtype != jax.dtypes.float0
            kinds.shared[key] = jax.device_put(operand) if is_host else operand
        leaves[i] = kinds.shared[key]
    return leaves


def launch(
    entry: Executable, rows: Sequence[Row], kinds: Kinds, poison: tuple[int, str] | None = None
) -> list[Any]:
    """Run a batch without waiting. Rows after the last example repeat it: their loops end too."""
    assert entry.rows is not None
    index, filler = (None, None) if poison is None else poison
    like, pads = rows[0].like, dict(entry.pads)
    placement = placement_of(kinds.sharding, entry.rows)
    leaves = _shared_leaves(kinds, like, pads)
    for place, i in enumerate(kinds.mapped):
        values, dtype = [row.leaves[place] for row in rows], like.signature.types[i].dtype
        if dtype is None:  # a size: the executable reads it from the sizes of the rows
            leaves[i] = values[0]
        else:
            stacked = _stacked(values, pads[i], dtype, filler)
            leaves[i] = stacked if placement is None else jax.device_put(stacked, placement)
    args, kwargs = like.tree.unflatten([leaves[i] for i in range(len(leaves))])
    shapes, ordered = entry.size_constant_shapes, [row.kind.ordered for row in rows]
    constants = [row.kind.call.size_constants.values for row in rows] if shapes else []
    sizes = batch_sizes(ordered, constants, entry.rows, shapes, index)
    return jax.tree_util.tree_leaves(entry.run(sizes, args, kwargs))


def _stacked(leaves: Sequence[Any], shape: tuple[int, ...], dtype: Any, poison: str | None) -> Any:
    """One buffer with each leaf at its row, and the last one repeated to the end."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        words = [jax.random.key_data(leaf) for leaf in leaves]
        buffer = _stacked(words, (*shape, *key_shape(dtype)), np.dtype(np.uint32), None)
        return jax.random.wrap_key_data(buffer, impl=key_impl(dtype))
    if poison is None:
        buffer = np.zeros(shape, dtype)
    else:
        buffer = np.full(shape, poison_value(dtype, poison), dtype)
    row_shape = shape[1:]
    for r, leaf in enumerate(leaves):
        host = leaf if type(leaf) is np.ndarray else np.asarray(plain(leaf))
        if host.shape == row_shape:
            buffer[r] = host
        elif host.shape[1:] == row_shape[1:]:
            buffer[r, : len(host)] = host
        else:
            inside: Any = (r, *map(slice, host.shape))
            buffer[inside] = host
    buffer[len(leaves) :] = buffer[len(leaves) - 1]
    return buffer


def count(entry: Executable, rows: Sequence[Row], mapped: Sequence[int]) -> CountedBatch:
    """What the statistics know of a batch."""
    assert entry.rows is not None
    kinds = Counter(row.kind for row in rows)
    call = rows[0].kind.call
    opened = {i for i in mapped if any(map(is_open, call.tokens[i]))}
    computed = len(rows) if entry.in_turn else entry.rows
    total = sum(math.prod(shape) for i, shape in entry.pads if i in opened)
    return CountedBatch(
        rows=len(rows),
        logical=[(kind.call.sizes, n) for kind, n in kinds.items()],
        padded={v: entry.sizes[v] for v in call.sizes},
        padded_rows=computed,
        real=sum(kind.real * n for kind, n in kinds.items()),
        total=total * computed // entry.rows,
        keys=[kind.key for kind in kinds],
    )


# --- results ---


def results_of(entry: Executable, rows: Sequence[Row], outs: list[Any], out: Out) -> list[Any]:
    """The results of the examples of a batch, in their order; waits for them."""
    opened = {o.position: o.logical for o in entry.outs}
    columns = []
    for i, leaf in enumerate(outs):
        logical = opened.get(i)
        shapes = {row.kind: logical and logical(*row.kind.ordered) for row in rows}
        columns.append(_column(leaf, [shapes[row.kind] for row in rows], out))
    return [
        row.kind.call.out_tree.unflatten([column[r] for column in columns])
        for r, row in enumerate(rows)
    ]


def checked_results(entry: Executable, rows: Sequence[Row], kinds: Kinds, out: Out) -> list[Any]:
    """Run a batch, for tests, and compare each row with other runs of itself, by `Check`."""
    engine = kinds.engine
    check = engine.config.check
    poisons: list[Any] = list(enumerate(POISONS)) if check is Check.POISON else [None]
    results, *others = (
        results_of(entry, rows, launch(entry, rows, kinds, poison), out) for poison in poisons
    )
    for row, poisoned, repeated in zip(rows, results, *others, strict=True) if others else ():
        if problem := compare(poisoned, repeated, "the same example with other padding", True):
            engine.serve(kinds.call_of(row), None, out)  # blames an equation
            raise failed(f"{engine.name}.map", problem, "")
    if others or (check is Check.EXACT and entry.checked):
        return results
    for row, result in zip(rows, results, strict=True):
        call = kinds.call_of(row)
        problem = compare(result, engine.run_unpadded(call), "it alone", False)
        if problem and not is_of_jit(engine.name, problem, call, result):
            raise failed(f"{engine.name}.map", problem, "")
    entry.checked = True
    return results


def checked_sums(entry: Executable, rows: Sequence[Row], kinds: Kinds) -> list[Any]:
    """Run a batch that is summed, for tests, and compare the sums by other padding."""
    engine = kinds.engine
    sums, repeated = (launch(entry, rows, kinds, poison) for poison in enumerate(POISONS))
    if problem := compare(sums, repeated, "the same batch with other padding", True):
        for row in rows:
            engine.serve(kinds.call_of(row))  # blames an equation
        raise failed(f"{engine.name}.map", problem, "")
    return sums


def _column(leaf: Any, shapes: Sequence[tuple[int, ...] | None], out: Out) -> list[Any]:
    """One result of all examples: the rows of an array, cut to their logical shapes."""
    if is_key(leaf):
        words = _column(
            jax.random.key_data(leaf), [s and (*s, *key_shape(leaf.dtype)) for s in shapes], Out.JAX
        )
        return [jax.random.wrap_key_data(w, impl=key_impl(leaf.dtype)) for w in words]
    host = np.asarray(leaf)
    rows, logical = [host[r, ...] for r in range(len(shapes))], [s for s in shapes if s is not None]
    if host.dtype == jax.dtypes.float0:
        return rows
    cuts = list(map(cut, rows, logical)) if logical else rows
    if out is Out.NUMPY:
        return cuts
    like, sharding, weak = leaf, leaf.sharding, bool(leaf.weak_type)
    if isinstance(sharding, NamedSharding) and is_on_several_devices(sharding):
        whole = NamedSharding(sharding.mesh, PartitionSpec())  # a copy on each of its devices
        like = jax.device_put(np.zeros((), host.dtype), whole)
    placers: dict[tuple[int, ...], Callable[[np.ndarray], Any]] = {}

    def placed(row: np.ndarray) -> Any:
        if row.shape not in placers:
            placers[row.shape] = host_placer(row.shape, row.dtype, weak, like)
        return placers[row.shape](row if row.flags.c_contiguous else row.copy())

    if logical and out is Out.PADDED:
        return [Padded.of_result(placed(row), s) for row, s in zip(rows, logical, strict=True)]
    return list(map(placed, cuts))
