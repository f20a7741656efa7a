"""What `bucketjit._signature.mismatches` compares, made from the arguments of a call.

A call of something that was compiled or saved before is described without a `Signature`: its
arguments may fit none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._signature.leaf_types import LeafType, leaf_type
from bucketjit._signature.mismatches import ArgumentFacts, LeafFacts
from bucketjit._sizes.dynamic_axes import STATIC
from bucketjit.errors import ArgumentError

Shape = tuple[int | str, ...]


def facts_of_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], name: Callable[[int], str]
) -> ArgumentFacts:
    """The facts of a call's arguments. What is no array is described, not refused."""
    places = _with_paths(args, kwargs, name)
    return ArgumentFacts(
        tuple(_leaf_facts(path, value) for path, value in places if value is not None),
        jax.tree_util.tree_structure((tuple(args), dict(kwargs))),
        len(args),
        frozenset(kwargs),
        tuple(path for path, value in places if value is None),
    )


def facts_made_for(
    tree: PyTreeDef,
    types: Sequence[LeafType],
    shapes: Sequence[Shape],
    name: Callable[[int], str],
    positional_statics: Mapping[str, Any] | None = None,
    keyword_statics: Mapping[str, Any] | None = None,
) -> ArgumentFacts:
    """The facts of the arguments that something is made for."""
    args, kwargs = tree.unflatten(range(tree.num_leaves))
    places = _with_paths(args, kwargs, name)
    leaves = tuple(
        LeafFacts(
            path,
            None if types[i].dtype is None else str(types[i].dtype),
            shapes[i],
            types[i].weak_type,
            _placed(types[i]),
        )
        for path, i in places
        if i is not None
    )
    return ArgumentFacts(
        leaves,
        tree,
        len(args),
        frozenset(kwargs),
        tuple(path for path, i in places if i is None),
        positional_statics or {},
        keyword_statics or {},
    )


def open_shapes(
    tokens: Sequence[Sequence[str]], shapes: Sequence[Sequence[int]]
) -> tuple[Shape, ...]:
    """Shapes with variables and expressions in the place of the sizes of open axes."""
    return tuple(
        tuple(
            size if token == STATIC or token.isdigit() else token
            for token, size in zip(row, shape, strict=True)
        )
        for row, shape in zip(tokens, shapes, strict=True)
    )


def _with_paths(
    args: Sequence[Any], kwargs: Mapping[str, Any], name: Callable[[int], str]
) -> list[tuple[str, Any]]:
    """The leaves with their paths, in the order of ``jax.tree_util``; None counts as a leaf."""
    named = [(name(i), value) for i, value in enumerate(args)]
    named += [(key, kwargs[key]) for key in sorted(kwargs)]
    return [
        (path + jax.tree_util.keystr(keys), leaf)
        for path, value in named
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_none)[0]
    ]


def _is_none(value: object) -> bool:
    return value is None


def _leaf_facts(path: str, value: Any) -> LeafFacts:
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    number = int(value) if is_int else None
    try:
        kind, shape = leaf_type(value, path)
    except ArgumentError:
        of = f" of {value.dtype!r}" if isinstance(value, np.ndarray) else ""
        return LeafFacts(path, None, (), other=f"{type(value).__name__}{of}")
    return LeafFacts(path, str(kind.dtype), tuple(shape), kind.weak_type, _placed(kind), number)


def _placed(kind: LeafType) -> str:
    if kind.sharding is not None:
        return f"sharded {kind.sharding.spec}"
    return "" if kind.partitions is None else f"cut into {kind.partitions} parts"
