"""Compare the trees of results, and find sizes in their auxiliary data.

The auxiliary data of a pytree is what it holds besides arrays: a static field of a registered
dataclass, the shape of a sparse matrix, what a closure of `jax.vjp` closes over. It is made while
the function is traced, and every result gets the tree of the trace. So a symbolic size in it would
reach the user as an expression.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from bucketjit._ir.closures import holds_a_size
from bucketjit._raised import is_of_machine

_STRUCTURAL = (type(None), list, tuple)  # containers without auxiliary data


def flat(count: int) -> Any:
    """The tree of a tuple with ``count`` leaves."""
    return jax.tree_util.tree_structure((0,) * count)


def same_tree(a: object, b: object) -> bool:
    """Whether two trees are equal, their auxiliary data included."""
    try:
        return bool(a == b)
    except Exception as error:  # ``==`` of the data returns an array, or raises
        if is_of_machine(error):
            raise
        return False


def tree_holds_a_size(tree: PyTreeDef, given: object) -> bool | None:
    """Whether the auxiliary data of a tree holds a symbolic size."""
    answers: set[bool | None] = {False}
    came: list[Any] | None = None
    for data in _data(tree):
        answer = holds_a_size(data)
        if answer is None:  # opaque data that came with the arguments was made before the trace
            came = list(_data(given)) if came is None else came
            is_given = any(data is other or same_tree(data, other) for other in came)
            answer = False if is_given else None
        answers.add(answer)
    return True if True in answers else None if None in answers else False


def _data(tree: PyTreeDef) -> Iterator[Any]:
    """The auxiliary data of each container of a tree."""
    node = tree.node_data()
    if node is None:
        return
    kind, data = node
    if kind not in _STRUCTURAL and data is not None:
        yield data
    for child in tree.children():
        yield from _data(child)
