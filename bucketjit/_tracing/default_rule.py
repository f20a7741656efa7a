"""The default rule: which axes are open in the first call, if the user names none.

Axis 0 of every argument that is an array is open, and containers are static until a size in them
varies: most hold parameters, which never do. But a container of data, such as a batch in a dict,
varies in the next call. What is compiled for it as it is could serve that call no more. So a
container is taken for data, and axis 0 of its arrays is opened, if

- all its arrays have one size along axis 0, and
- there is no array among the arguments, and no other such container comes after it; or an array
  among the arguments has the same size along axis 0, and comes before it or the container has
  several arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bucketjit._arrays.padded import Padded
from bucketjit._ir.dynamic_axes import Anonymous, LeafSpec

_OPEN = Anonymous((0,))
_GUESSED = Anonymous((0,), is_guessed=True)


def default_entries(values: Sequence[Any]) -> list[LeafSpec]:
    """The entry of each leaf of the arguments under the default rule."""
    rows = [_sizes(value) for value in values]
    bare = [
        (i, value.shape[0])
        for i, value in enumerate(values)
        if _is_array(value) and value.ndim > 0 and not _may_be_key(value)
    ]
    data = [
        i
        for i, (value, sizes) in enumerate(zip(values, rows, strict=True))
        if sizes and not _is_array(value) and _holds_data(value) and len(set(sizes)) == 1
    ]
    opened: set[int] = set()
    if bare:
        for i in data:
            many = len(rows[i]) > 1
            if any(n == rows[i][0] and (many or before < i) for before, n in bare):
                opened.add(i)
    elif data:
        containers = [i for i, sizes in enumerate(rows) if sizes and not _is_array(values[i])]
        if data[-1] == containers[-1]:
            opened = {i for i in data if rows[i][0] == rows[data[-1]][0]}
    specs: list[LeafSpec] = []
    for i, value in enumerate(values):
        entry = _GUESSED if i in opened else _OPEN if _is_array(value) else None
        specs += [entry if np.ndim(leaf) > 0 else None for leaf in jax.tree_util.tree_leaves(value)]
    return specs


def _sizes(value: Any) -> list[int]:
    """The size along axis 0 of each array of an argument."""
    return [
        leaf.shape[0]
        for leaf in jax.tree_util.tree_leaves(value)
        if hasattr(leaf, "shape") and len(leaf.shape) > 0
    ]


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | Padded)


def _may_be_key(value: Any) -> bool:
    """Whether an array may be a random key of ``jax.random.PRNGKey``."""
    return value.shape == (2,) and value.dtype == np.uint32


def _holds_data(value: Any) -> bool:
    """Whether a container may be data: a plain one, or one with arrays of the host."""
    plain = isinstance(value, dict | list | tuple)
    return plain or all(isinstance(x, np.ndarray) for x in jax.tree_util.tree_leaves(value))
