"""Finds which results of a function have open axes when there is no program to read it from.

Calls at their exact shape need it to return `Padded` results: only those with open axes are.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.bodies import result_types
from bucketjit._compile.executable import Executable
from bucketjit._raised import is_of_machine
from bucketjit._tracing.binding import bind_sizes
from bucketjit._tracing.call import Call

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


def has_empty_axis(shapes: Sequence[Sequence[int]]) -> bool:
    """Whether one of the shapes has an axis of size 0."""
    return any(0 in shape for shape in shapes)


def open_axes(call: Call) -> list[list[int]] | None:
    """The axes of each result that change with the sizes of the arguments; None if all may.

    Raises an error of the machine, such as exhausted memory; see `is_of_machine`.
    """
    signature = call.signature
    tokens = signature.guessed_tokens(call.shapes)
    sizes = bind_sizes(tokens, call.shapes, signature.paths)
    larger = [
        {v: by * n + more * i for i, (v, n) in enumerate(sizes.items(), start=1)}
        for by, more in _LARGER
    ]
    try:
        found = [result_types(at_sizes(call, tokens, at)) for at in (sizes, *larger)]
    except Exception as error:  # from the user's function, at sizes it was never called with
        if is_of_machine(error):
            raise
        return None
    if len(set(map(jax.tree_util.tree_structure, found))) > 1:
        return None
    results = zip(*map(jax.tree_util.tree_leaves, found), strict=True)
    shapes = [[t.shape for t in types] for types in results]
    if any(len(set(map(len, every))) > 1 for every in shapes):
        return None
    return [
        [axis for axis, sizes in enumerate(zip(*every, strict=True)) if len(set(sizes)) > 1]
        for every in shapes
    ]
