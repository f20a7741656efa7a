"""Trace a function of one shard, whose collectives name the axis of the shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from bucketjit._config import Sharded
from bucketjit._ir.expressions import is_symbolic, variables_in
from bucketjit._ir.jax_patches import uneven_shards
from bucketjit._ir.primitives import Shards, tracing_for
from bucketjit._jax.config import named_axis


def on_shards(fn: Callable[..., Any], axis: Any, count: int) -> Callable[..., Any]:
    """A function of one shard, as it is traced: its collectives may name the axis."""

    @functools.wraps(fn, updated=())
    def of_one_shard(*args: Any, **kwargs: Any) -> Any:
        shards = _shards_of(axis, jax.tree_util.tree_leaves((args, kwargs)))
        with uneven_shards(), tracing_for(shards), named_axis(axis, count):
            try:
                return fn(*args, **kwargs)
            except NameError as error:
                if "axis name" in str(error):
                    error.add_note(f"with_processes: a function of one shard has the axis {axis!r}")
                raise

    return of_one_shard


def bound_axis(sharded: Sharded | None) -> AbstractContextManager[None]:
    """A context in which collectives may name the axis of the shards."""
    return nullcontext() if sharded is None else named_axis(sharded.axis, sharded.count)


def _shards_of(axis: Any, leaves: Sequence[Any]) -> Shards:
    """The axis, and the rows of a shard: the leading open axis of the arguments."""
    shapes = [tuple(getattr(x, "shape", ())) for x in leaves]
    sizes = [d for shape in shapes for d in shape if is_symbolic(d)]
    if not sizes:
        return Shards(axis, 1)  # a trace at concrete sizes, which shows errors and is not run
    leading = [shape[0] for shape in shapes if shape and is_symbolic(shape[0])]
    names = sorted(variables_in(leading))
    if len(names) > 1:
        why = f"the first axes of the arguments are {' and '.join(names)}"
        return Shards(axis, None, why, sizes[0])
    for size in leading:
        if str(size) == names[0]:
            return Shards(axis, size, "", size)
    return Shards(axis, None, "no argument has them as its first axis", sizes[0])
