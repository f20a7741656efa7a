"""The warm path: from arguments to executable without flattening them.

A route serves the calls of one signature whose open axes all belong to plain array arguments.
It looks at those arguments only. Everything else (400 parameter arrays, say) is checked by the
executable's own C++ argument check, whose refusal (`SignatureChanged`) sends the call to the
slow path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit import _jax
from bucketjit._axes import STATIC
from bucketjit._family import Family, Tokens, variables_in
from bucketjit._signature import Statics

_MEMO_LIMIT = 4096


@dataclass(frozen=True)
class OpenArgument:
    """One array argument with open axes.

    Attributes:
        position: Among all positional arguments.
        leaf: Among the leaves of the call.
        is_jax: Whether it is a ``jax.Array`` or a NumPy array.
        dtype: Its dtype as it came.
        weak_type: JAX's weak type.
        rank: Number of axes.
        variables: ``(axis, index of the variable)``.
        static: ``(axis, size)``.
    """

    position: int
    leaf: int
    is_jax: bool
    dtype: Any
    weak_type: bool
    rank: int
    variables: tuple[tuple[int, int], ...]
    static: tuple[tuple[int, int], ...]


class Known(NamedTuple):
    """Sizes seen before.

    Attributes:
        key: Their key in the cache.
        ordered: Every logical size that results are cut by.
        sizes: The same as the executable takes them, on the device.
    """

    key: Any
    ordered: tuple[int, ...]
    sizes: Any


class Route:
    """How to read the sizes of one signature off its arguments.

    Attributes:
        family: The signature.
        tokens: A token per axis of each leaf.
        n_args: Number of positional arguments.
        dynamic: Positions of the arguments that are not static; None if all are dynamic.
        position_of_leaf: Argument position of each leaf with open axes.
        memo: Sizes seen before.
    """

    def __init__(
        self,
        family: Family,
        tokens: Tokens,
        n_args: int,
        dynamic: tuple[int, ...] | None,
        statics: Statics,
        arguments: Sequence[OpenArgument],
    ) -> None:
        self.family = family
        self.n_args = n_args
        self.dynamic = dynamic
        self.position_of_leaf = {a.leaf: a.position for a in arguments}
        self.memo: dict[tuple[int, ...], Known] = {}
        self.tokens = tokens
        self._statics = tuple(statics.positional.items())
        self._arguments = tuple(arguments)
        self._variables = variables_in(tokens)

    def sizes(self, args: tuple[Any, ...]) -> tuple[int, ...] | None:
        """The logical sizes of a call, or None if this route does not serve it."""
        if len(args) != self.n_args or self.family.tokens is not self.tokens:
            return None
        for position, value in self._statics:
            given = args[position]
            if given is not value and (type(given) is not type(value) or given != value):
                return None
        found = [-1] * len(self._variables)
        for a in self._arguments:
            value = args[a.position]
            if a.is_jax:
                if not _jax.is_concrete_array(value) or value.weak_type != a.weak_type:
                    return None
            elif type(value) is not np.ndarray:
                return None
            shape = value.shape
            if len(shape) != a.rank or value.dtype != a.dtype:
                return None
            for axis, size in a.static:
                if shape[axis] != size:
                    return None
            for axis, variable in a.variables:
                size = shape[axis]
                if found[variable] != size:
                    if found[variable] >= 0:
                        return None
                    found[variable] = size
        return tuple(found)

    def remember(self, sizes: Mapping[str, int], known: Known) -> None:
        """These sizes are served like this."""
        if len(self.memo) >= _MEMO_LIMIT:
            self.memo.clear()
        self.memo[tuple(sizes[v] for v in self._variables)] = known


def make_route(
    family: Family,
    tokens: Tokens,
    args: tuple[Any, ...],
    dynamic: Sequence[int],
    statics: Statics,
) -> Route | None:
    """A route for calls like this one, or None where the slow path must look closer.

    Args:
        family: The signature of the call.
        tokens: A token per axis of each leaf.
        args: All positional arguments.
        dynamic: Positions of those that are not static.
        statics: The static arguments; none of them may be a keyword.

    Returns:
        The route; None if an open axis is inside a container, an expression, or a size itself.
    """
    if statics.keyword or any(t.dtype is None for t in family.types):
        return None
    index = {v: i for i, v in enumerate(variables_in(tokens))}
    arguments: list[OpenArgument] = []
    leaf = 0
    for position in dynamic:
        value = args[position]
        count = len(jax.tree_util.tree_leaves(value))
        rows = tokens[leaf : leaf + count]
        if any(t != STATIC for row in rows for t in row):
            is_jax = _jax.is_concrete_array(value)
            if not is_jax and type(value) is not np.ndarray:
                return None
            row = rows[0]
            if any(t != STATIC and t not in index for t in row):
                return None
            arguments.append(
                OpenArgument(
                    position,
                    leaf,
                    is_jax,
                    value.dtype,
                    bool(value.weak_type) if is_jax else False,
                    value.ndim,
                    tuple((i, index[t]) for i, t in enumerate(row) if t != STATIC),
                    tuple((i, value.shape[i]) for i, t in enumerate(row) if t == STATIC),
                )
            )
        leaf += count
    if not arguments or {i for a in arguments for _, i in a.variables} != set(index.values()):
        return None
    every = tuple(dynamic)
    return Route(
        family, tokens, len(args), None if len(every) == len(args) else every, statics, arguments
    )
