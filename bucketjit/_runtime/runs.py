"""Run one executable: pad its arguments, cut its results, make a counter for calls like it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bucketjit._arrays.padding import pad, plain
from bucketjit._arrays.results import Change, as_numpy, as_padded, at_leaves
from bucketjit._compile.executable import Executable
from bucketjit._config import Out
from bucketjit._ir.interface import Interface
from bucketjit._jax.compiler import failed_running
from bucketjit._runtime.call_counts import CallCounter
from bucketjit._runtime.counters import Counters
from bucketjit._runtime.fast_path.bucket_handler import give_away
from bucketjit._runtime.open_outputs import open_outs
from bucketjit._tracing.call import Call


def run_padded(entry: Executable, sizes: Any, call: Call, finish: Change | None) -> Any:
    """Pad the arguments of a call, run an executable, and cut its results."""
    args, kwargs = call.tree.unflatten(_padded(call.leaves, entry.pads))
    result = entry.run(sizes, args, kwargs)
    give_away([call.leaves[i] for i in entry.donated_leaves])
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
    """Count a call once its executable has run, even if running it failed.

    Errors from before the run, such as `SignatureChanged`, are not counted.
    """
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


def _padded(leaves: Sequence[Any], pads: Sequence[tuple[int, tuple[int, ...]]]) -> list[Any]:
    """The leaves of a call as an executable takes them."""
    shapes = dict(pads)
    return [pad(x, shapes[i]) if i in shapes else plain(x) for i, x in enumerate(leaves)]
