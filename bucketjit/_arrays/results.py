"""The last step of a call: cut the results of an executable to their logical sizes.

Results come in one of the three forms of `bucketjit._config.Out`. Only the containers around a
result with open axes are rebuilt, so 400 parameter arrays next to it cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import cut, of_words, plain, unpad, unpadder
from bucketjit._config import Out
from bucketjit._jax.arrays import array_from_host, is_key

Change = Callable[[Any], Any]


def finisher(
    tree: PyTreeDef,
    logical: Mapping[int, tuple[int, ...]],
    padded: Mapping[int, tuple[int, ...]],
    weak: Mapping[int, bool],
    out: Out,
) -> Change | None:
    """Make the function that turns the result of an executable into that of the call."""
    changes: dict[int, Change] = {}
    if out is Out.NUMPY:
        changes = {i: as_numpy for i in range(tree.num_leaves)}
    for i, shape in logical.items():
        if out is Out.PADDED:
            changes[i] = _padded(shape)
        elif shape != padded[i]:
            by_host = out is Out.NUMPY
            changes[i] = _cut_numpy(shape) if by_host else unpadder(padded[i], shape, weak[i])
    return at_leaves(tree, changes)


def as_numpy(value: Any) -> Any:
    """A result without padding as a host array; typed keys, which NumPy lacks, stay as they are."""
    return value if is_key(value) else np.asarray(value)


def joined(parts: Sequence[Padded], weak_type: bool, out: Out) -> Any:
    """Join results along their leading axis, on the host: nothing is compiled for their number."""
    array = parts[0].array
    if is_key(array):
        words = [jax.random.key_data(plain(p)) for p in parts]
        every = array_from_host(np.concatenate(words), False, words[0])
        whole = of_words(array, lambda _: every)
    else:
        host = np.concatenate([cut(np.asarray(p.array), p.sizes) for p in parts])
        if out is Out.NUMPY or host.dtype == jax.dtypes.float0:  # JAX has no arrays of float0
            return host
        whole = array_from_host(host, weak_type, array)
    return as_padded(whole) if out is Out.PADDED else whole


def as_padded(value: Any) -> Any:
    """A result without padding as a `Padded` array; a scalar, which has no axes, is unchanged."""
    return Padded.of_result(value, value.shape) if value.ndim else value


# Closures, which are faster than partial functions: warm calls run them.


def _padded(shape: tuple[int, ...]) -> Change:
    return lambda value: Padded.of_result(value, shape)


def _cut_numpy(shape: tuple[int, ...]) -> Change:
    """A change that cuts a leaf to this shape as a host array; typed keys stay arrays of JAX."""

    def cut_numpy(value: object) -> Any:
        host = as_numpy(value)
        return cut(host, shape) if isinstance(host, np.ndarray) else unpad(value, shape)

    return cut_numpy


def at_leaves(tree: PyTreeDef, changes: Mapping[int, Change]) -> Change | None:
    """Make a function that applies changes to some leaves of a tree."""
    if not changes:
        return None
    if jax.tree_util.treedef_is_leaf(tree):
        return changes[0]
    kind, keys = tree.node_data()
    if kind not in (tuple, list, dict):  # a registered type: only JAX can rebuild it
        return _anywhere(tree, changes)
    inner: list[tuple[Any, Change]] = []
    start = 0
    for place, child in enumerate(tree.children()):
        end = start + child.num_leaves
        own = {i - start: c for i, c in changes.items() if start <= i < end}
        change = at_leaves(child, own)
        if change is not None:
            inner.append((keys[place] if kind is dict else place, change))
        start = end

    def inside(result: Any) -> Any:
        new = list(result) if kind is tuple else result
        for place, change in inner:
            new[place] = change(new[place])
        return tuple(new) if kind is tuple else new

    return inside


def _anywhere(tree: PyTreeDef, changes: Mapping[int, Change]) -> Change:
    """Apply changes to a tree of any type by flattening all of it."""

    def inside(result: object) -> Any:
        leaves = tree.flatten_up_to(result)
        for i, change in changes.items():
            leaves[i] = change(leaves[i])
        return tree.unflatten(leaves)

    return inside
