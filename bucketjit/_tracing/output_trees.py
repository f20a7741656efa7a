"""How results nest, and what their trees hold besides: data that is no array.

A static field of a registered dataclass, the shape of a sparse matrix, what a closure of `jax.vjp`
closes over: JAX calls it the auxiliary data of a pytree. It is made while the function is traced,
and the tree of the trace is that of every result. A size in it would leave as an expression.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from bucketjit._errors import is_of_machine
from bucketjit._tracing.closures import holds_a_size

_STRUCTURAL = (type(None), list, tuple)  # what they hold besides their children: nothing


def flat(count: int) -> Any:
    """The tree of a tuple of so many leaves."""
    return jax.tree_util.tree_structure((0,) * count)


def same_tree(a: object, b: object) -> bool:
    """Whether two trees are equal, their data included."""
    try:
        return bool(a == b)
    except Exception as error:  # of data whose comparison answers with an array, or not at all
        if is_of_machine(error):
            raise
        return False


def tree_holds_a_size(tree: PyTreeDef, given: object) -> bool | None:
    """Whether the data of a tree holds a symbolic size.

    Args:
        tree: Tree of a result.
        given: Tree of the arguments. Data that came with them holds none.

    Returns:
        Whether it does; None if some of the data cannot be looked into.
    """
    answers: set[bool | None] = {False}
    came: list[Any] | None = None
    for data in _data(tree):
        answer = holds_a_size(data)
        if answer is None:
            came = list(_data(given)) if came is None else came
            answer = False if any(_same(data, other) for other in came) else None
        answers.add(answer)
    return True if True in answers else None if None in answers else False


def _data(tree: PyTreeDef) -> Iterator[Any]:
    """The data of each container of a tree."""
    node = tree.node_data()
    if node is None:
        return
    kind, data = node
    if kind not in _STRUCTURAL and data is not None:
        yield data
    for child in tree.children():
        yield from _data(child)


def _same(a: object, b: object) -> bool:
    try:
        return bool(a is b or a == b)
    except Exception as error:
        if is_of_machine(error):
            raise
        return False
