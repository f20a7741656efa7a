"""Choose which axes of a signature's arguments are open, and which variables they get.

The user names the open axes, or lists them without names, or leaves them to the default rule (axis
0 of every array). Everything here is a function of shapes. The state, such as the shapes of earlier
calls, is kept by `bucketjit._tracing.signature` and passed as an argument.

The default rule: axis 0 of every argument that is an array is open, and containers are static until
a size in them varies, since most hold parameters, which never do. But a container of data, such as
a batch in a dict, varies in the next call, which then needs another program. So a container is
taken for data, and axis 0 of its arrays is opened, if

- all its arrays have one size along axis 0, and
- there is no array among the arguments, and no other such container comes after it; or an array
  among the arguments has the same size along axis 0, and comes before it or the container has
  several arrays.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bucketjit._arrays.padded import Padded
from bucketjit._ir.dynamic_axes import STATIC, Anonymous, LeafSpec, Tokens, places_of, tokens_of
from bucketjit._ir.expressions import bind_unique_names
from bucketjit._tracing.resolution import check_declared
from bucketjit.errors import ArgumentError

Shapes = Sequence[tuple[int, ...]]
Place = tuple[int, int]  # a leaf, and one of its axes

_MAX_GUESSES = 64  # each is a trace, in the first call of a function that refuses all of them


# A token per axis of each leaf, and why each variable is new, in words.
Renamed = tuple[Tokens, list[str]]


class AxisGuesses:
    """The axes of the arguments of one signature.

    Attributes:
        specs: What the user says of the axes of each leaf.
        paths: How errors name each leaf.
        learns: Whether axes that vary get a variable.
        are_named: Whether the user names all open axes, so that nothing is guessed.
    """

    def __init__(self, specs: Sequence[LeafSpec], paths: Sequence[str], learns: bool) -> None:
        self.specs = tuple(specs)
        self.paths = tuple(paths)
        self.learns = learns
        self.are_named = not learns and not any(isinstance(s, Anonymous) for s in specs)
        # Every word in the user's entries. Some are no names, which does no harm: they are avoided.
        entries = [s for s in specs if not isinstance(s, Anonymous)]
        self._declared = frozenset(re.findall(r"\w+", repr(entries)))

    def tokens(self, shapes: Shapes, names: Mapping[Place, str]) -> Tokens:
        """A token per axis of each leaf: those of the user, and names for axes without one."""
        rows = []
        for leaf, (spec, shape) in enumerate(zip(self.specs, shapes, strict=True)):
            if isinstance(spec, Anonymous):
                rows.append(tuple(names.get((leaf, i), STATIC) for i in range(len(shape))))
            else:
                rows.append(tokens_of(spec, self.paths[leaf], shape))
        for leaf, axis, token in places_of(tuple(rows)).opened:
            if token.isdigit():
                check_declared(token, shapes[leaf][axis], f"axis {axis} of {self.paths[leaf]}")
        return tuple(rows)

    def anonymous(self, shapes: Shapes) -> list[Place]:
        """The axes that the user lists as open, without a name."""
        axes = []
        for leaf, spec in enumerate(self.specs):
            if isinstance(spec, Anonymous):
                rank = len(shapes[leaf])
                for axis in spec.axes:
                    if not -rank <= axis < rank:
                        raise ArgumentError(
                            f"{self.paths[leaf]}: dynamic axis {axis} does not exist in an array "
                            f"of shape {tuple(shapes[leaf])}"
                        )
                    axes.append((leaf, axis % rank))
        return axes

    def guesses(self, shapes: Shapes, wanted: Sequence[Place]) -> Iterator[dict[Place, str]]:
        """Sets of axes to open, with their names, best first: more open axes are better.

        The order is: all axes, where axes of equal number and size share a variable; the same
        without those that the default rule guesses to be data, which are left out from there on;
        all axes, each with its own variable; without some groups that share a variable (weights
        beside data); without single axes (a weight that happens to have the size of the batch).
        """
        shared = self._shared(wanted, shapes)
        if not shared:
            return
        yield shared
        listed = [(leaf, axis) for leaf, axis in wanted if not self.specs[leaf].is_guessed]
        if len(listed) < len(wanted):
            if listed and all(tuple(shapes[leaf]) == (2,) for leaf, _ in listed):  # a random key
                yield self._shared([place for place in wanted if place not in listed], shapes)
            wanted, shared = listed, self._shared(listed, shapes)
            if not shared:
                return
            yield shared
        apart: dict[Place, str] = {}
        for place in wanted:
            apart[place] = self._new_name(place[1], apart)
        if apart != shared:
            yield apart
        groups = list(dict.fromkeys(shared.values()))
        seen = [set(wanted)]
        trials = itertools.chain(
            ([k for k in wanted if shared[k] in some] for some in _smaller_subsets(groups)),
            _smaller_subsets(wanted),
        )
        for kept in itertools.islice(trials, _MAX_GUESSES):
            if kept and set(kept) not in seen:
                seen.append(set(kept))
                yield self._shared(kept, shapes)

    def _shared(self, places: Sequence[Place], shapes: Shapes) -> dict[Place, str]:
        """Names for axes, where axes of equal number and size share one."""
        names: dict[Place, str] = {}
        for leaf, axis in places:
            size = shapes[leaf][axis]
            alike = (n for (i, its), n in names.items() if its == axis and shapes[i][axis] == size)
            names[leaf, axis] = next(alike, None) or self._new_name(axis, names)
        return names

    def _new_name(self, axis: int, names: Mapping[Place, str]) -> str:
        return bind_unique_names(_base_name(axis), {*names.values(), *self._declared})

    def unnamed(self, shapes: Shapes) -> list[Place]:
        """The axes without a name of the user's, which are opened or renamed as calls vary them."""
        if self.learns:
            return [(leaf, axis) for leaf, shape in enumerate(shapes) for axis in range(len(shape))]
        return self.anonymous(shapes)

    def without_shared_names(self, tokens: Tokens, shapes: Shapes) -> Renamed | None:
        """Split a variable that several axes share, where their sizes differ in a call."""
        seen: dict[str, int] = {}
        rows = [list(row) for row in tokens]
        renamed: dict[tuple[str, int], str] = {}
        reasons: dict[tuple[str, int], str] = {}
        for leaf, axis in self.unnamed(shapes):
            token, size = rows[leaf][axis], shapes[leaf][axis]
            # The first axis keeps the variable; those of another size share a new one.
            if token == STATIC or seen.setdefault(token, size) == size:
                continue
            name = renamed.setdefault((token, size), _unused_name(axis, rows))
            seen[name] = size
            reason = f"axis {axis} of {self.paths[leaf]} is {size} where {token} is {seen[token]}"
            reasons.setdefault((token, size), f"traced anew: {reason}: opened as {name}")
            rows[leaf][axis] = name
        return (tuple(map(tuple, rows)), list(reasons.values())) if renamed else None

    def opened(
        self, tokens: Tokens, before: Shapes, now: Shapes, places: Sequence[Place]
    ) -> Renamed:
        """Open static axes whose size has changed.

        Axes with the same old and the same new size share a variable. It is that of an open axis
        with these two sizes, if there is one.
        """
        rows = [list(row) for row in tokens]
        moved: dict[tuple[int, int], str] = {}  # the first variable of an axis that had both sizes
        for leaf, axis, token in places_of(tokens).opened:
            if token.isidentifier():
                moved.setdefault((before[leaf][axis], now[leaf][axis]), token)
        names: dict[tuple[int, int], str] = {}
        varied = []
        for leaf, axis in places:
            old, new = before[leaf][axis], now[leaf][axis]
            name = names.get((old, new)) or moved.get((old, new))
            names[old, new] = rows[leaf][axis] = name or _unused_name(axis, rows)
            varied.append(
                f"traced anew: axis {axis} of {self.paths[leaf]} varies ({old}, then {new})"
            )
        return tuple(map(tuple, rows)), varied


def _unused_name(axis: int, rows: Sequence[Sequence[str]]) -> str:
    return bind_unique_names(_base_name(axis), {token for row in rows for token in row})


def _smaller_subsets(items: Sequence[Any]) -> Iterator[list[Any]]:
    """Proper, non-empty subsets: larger ones first, and of one size those of later items first."""
    for size in range(len(items) - 1, 0, -1):
        for kept in sorted(itertools.combinations(range(len(items)), size), reverse=True):
            yield [items[i] for i in kept]


def _base_name(axis: int) -> str:
    return "batch" if axis == 0 else f"axis{axis}"


def is_default_name(name: str) -> bool:
    """Whether an axis without a name of the user's may get this name."""
    return re.fullmatch(r"(batch|axis[1-9]\d*)(_\d+)?", name) is not None


_OPEN = Anonymous((0,))
_GUESSED = Anonymous((0,), is_guessed=True)


def default_entries(values: Sequence[Any]) -> list[LeafSpec]:
    """The entry of each leaf of the arguments under the default rule."""
    rows = [_sizes(value) for value in values]
    bare = [
        (i, value.shape[0])
        for i, value in enumerate(values)
        if _is_array(value) and value.ndim > 0
        # A key of `jax.random.PRNGKey` is none.
        if value.shape != (2,) or value.dtype != np.uint32
    ]
    containers = [i for i, sizes in enumerate(rows) if sizes and not _is_array(values[i])]
    data = [i for i in containers if _holds_data(values[i]) and len(set(rows[i])) == 1]
    opened: set[int] = set()
    if bare:
        for i in data:
            many = len(rows[i]) > 1
            if any(n == rows[i][0] and (many or before < i) for before, n in bare):
                opened.add(i)
    elif data and data[-1] == containers[-1]:
        opened = {i for i in data if rows[i][0] == rows[data[-1]][0]}
    specs: list[LeafSpec] = []
    for i, value in enumerate(values):
        entry = _GUESSED if i in opened else _OPEN if _is_array(value) else None
        specs += [entry if np.ndim(leaf) > 0 else None for leaf in jax.tree_util.tree_leaves(value)]
    return specs


def _sizes(value: Any) -> list[int]:
    shapes: list[Any] = [getattr(x, "shape", ()) for x in jax.tree_util.tree_leaves(value)]
    return [shape[0] for shape in shapes if len(shape) > 0]


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | Padded | jax.ShapeDtypeStruct)


def _holds_data(value: Any) -> bool:
    """Whether a container may be data: a plain one, or one with arrays of the host."""
    of_host = np.ndarray | jax.ShapeDtypeStruct
    leaves = jax.tree_util.tree_leaves(value)
    return isinstance(value, dict | list | tuple) or all(isinstance(x, of_host) for x in leaves)
