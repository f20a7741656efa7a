"""Run a call: by an executable, whose arguments are padded and results cut; or without ``jit``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from bucketjit._arrays.padding import pad, pad_to_place, plain
from bucketjit._arrays.results import Change, as_numpy, as_padded, at_leaves
from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.executable import Executable
from bucketjit._config import Out
from bucketjit._ir.interface import Interface
from bucketjit._jax.compiler import failed_running
from bucketjit._raised import WithoutErrors, text_of
from bucketjit._runtime.counters import CallCounter, Counters
from bucketjit._runtime.fast_path.bucket_handler import give_away
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import bind_sizes
from bucketjit.errors import MaskingError, SelectionError

# The function is traced at sizes ``first * n + second * i`` for the i-th variable. Several factors,
# because a few rows more need not show in the shape of ``x[::2]``.
_LARGER = ((1, 1), (2, 7), (3, 5))


def open_outs(entry: Executable, call: Call) -> Sequence[int]:
    """The results whose shapes change with the sizes of the arguments.

    The function is traced at the sizes of a call and at several larger ones. If it fails at larger
    sizes, or returns another tree there, all results count as open.
    """
    if entry.open_outs is None:
        axes = open_axes(call)
        every = range(entry.out_tree.num_leaves)
        entry.open_outs = tuple(i for i in every if axes is None or axes[i])
    return entry.open_outs


def open_axes(call: Call) -> list[list[int]] | None:
    """The axes of each result that change with the sizes of the arguments; None if all may.

    Raises an error of the machine, such as exhausted memory; see `is_of_machine`.
    """
    from bucketjit._compile.bodies import result_types

    signature = call.signature
    tokens = signature.guessed_tokens(call.shapes)
    sizes = bind_sizes(tokens, call.shapes, signature.paths)
    larger = [
        {v: by * n + more * i for i, (v, n) in enumerate(sizes.items(), start=1)}
        for by, more in _LARGER
    ]
    traced = []
    with WithoutErrors():  # of the user's function, at sizes it was never called with
        traced = [result_types(at_sizes(call, tokens, each)) for each in (sizes, *larger)]
    if len(set(map(jax.tree_util.tree_structure, traced))) != 1:
        return None
    results = zip(*map(jax.tree_util.tree_leaves, traced), strict=True)
    shapes = [[t.shape for t in types] for types in results]
    if any(len(set(map(len, every))) > 1 for every in shapes):
        return None
    return [
        [axis for axis, sizes in enumerate(zip(*every, strict=True)) if len(set(sizes)) > 1]
        for every in shapes
    ]


def run_padded(entry: Executable, sizes: Any, call: Call, finish: Change | None) -> Any:
    """Pad the arguments of a call, run an executable, and cut its results."""
    shapes, placed, leaves = dict(entry.pads), entry.placed, list(call.leaves)
    for i, leaf in enumerate(call.leaves):
        if i not in shapes:
            leaves[i] = plain(leaf)
        elif i in placed:
            leaves[i] = pad_to_place(leaf, shapes[i], placed[i])
        else:
            leaves[i] = pad(leaf, shapes[i])
    args, kwargs = call.tree.unflatten(leaves)
    result = entry.run(sizes, args, kwargs)
    give_away([call.leaves[i] for i in entry.reused_leaves])
    return result if finish is None else finish(result)


def counter_of(entry: Executable, call: Call) -> CallCounter:
    """A call counter for calls like this one, served by this executable."""
    logical = dict(zip(call.variables, call.ordered, strict=True))
    real, shapes = 0, call.shapes
    for leaf, _ in entry.pads:
        real += math.prod(shapes[leaf])
    total = entry.padded_elements
    return CallCounter(logical, entry.sizes, real, total, key=call.shape_key)


@contextmanager
def counted(counters: Counters, line: CallCounter) -> Iterator[None]:
    """Count a call once its executable has run, or has failed to run."""
    try:
        yield
    except Exception as error:
        if failed_running(error):
            counters.call(line)
        raise
    counters.call(line)


def exact_finisher(
    entry: Executable, call: Call, program: Interface | None, out: Out
) -> Change | None:
    """What is done to the result of an exact run to give it the form ``out``; None if nothing."""
    if out is Out.JAX:
        return None
    change = as_numpy if out is Out.NUMPY else as_padded
    opened: Sequence[int] = range(entry.out_tree.num_leaves)
    if out is Out.PADDED:
        opened = open_outs(entry, call) if program is None else program.open_outs
    return at_leaves(entry.out_tree, dict.fromkeys(opened, change))


# --- without jit ---

OF_TRACERS = (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError)

NOT_PADDED = MaskingError(
    "it computes a size, and no axis is open",
    "open an axis in dynamic_axes, or leave dynamic_axes out",
)


def run_eagerly(call: Call, out: Out, reason: str | None) -> Any:
    from bucketjit._compile.bodies import eagerly

    try:
        result = eagerly(call)
    except (IndexError, TypeError, ValueError) as error:
        if reason is None:
            raise
        raised: Exception = error
        if isinstance(error, OF_TRACERS) or "Tracer" in text_of(error):
            raised = SelectionError(reason, "eager JAX cannot run it either; use jnp.where there")
        raised.add_note(f"bucketjit runs the function without jit, because: {reason}")
        if raised is error:
            raise
        raise raised from error
    if out is Out.JAX:
        return result
    return jax.tree_util.tree_map(as_numpy if out is Out.NUMPY else as_padded, result)
