"""Say in words how the arguments of a call differ from those that something was made for.

    made for    f(x: float32[b, 8], y: int32[b])
    called as   f(x: float16[4, 8])
    lines       x: compiled for float32[b, 8], called with float16[4, 8]
                y: compiled for int32[b], called without it

Both sides are plain values, so a file can hold one. A call is described without a `Signature`: its
arguments may fit none. Sizes of open axes are not compared here: binding them does that
(`bucketjit._tracing.binding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._tracing.leaf_types import LeafType, leaf_type
from bucketjit.errors import ArgumentError

Shape = tuple[int | str, ...]

_SHOWN = 8  # lines in one message: a model has hundreds of leaves
_LONGEST = 80  # characters of the value of a static argument


class LeafFacts(NamedTuple):
    """The type of one argument leaf, as text and numbers.

    Attributes:
        path: How errors name it, such as ``params['w']``.
        dtype: Name of its dtype; None for a Python int that is itself a size.
        shape: Its axes: a number where the size is fixed, else a variable or an expression of
            some. A size itself has one axis. The leaves of a call have numbers only.
        weak_type: JAX's weak type.
        placed: How it is sharded, in words, as far as that is part of its type; else empty.
        value: For a leaf of a call, its value if it is an int of Python or NumPy, which can be a
            size; else None.
        other: What it is, in words, if it is no array, so that it fits nothing; else empty.
    """

    path: str
    dtype: str | None
    shape: tuple[int | str, ...]
    weak_type: bool = False
    placed: str = ""
    value: int | None = None
    other: str = ""

    def __str__(self) -> str:
        if self.other:
            return self.other
        if self.dtype is None:
            return f"an int, the size {self.shape[0]}"
        shape = ", ".join(map(str, self.shape))
        weak = " of weak type" if self.weak_type else ""
        return f"{self.dtype}[{shape}]{weak}{' ' if self.placed else ''}{self.placed}"


class ArgumentFacts(NamedTuple):
    """The arguments of one call, or of every call that something was made for.

    Attributes:
        leaves: The leaves, in the order of ``tree``.
        tree: Tree of ``(args, kwargs)`` without static arguments; None if it is not known.
        arity: Number of positional arguments, without static ones.
        keywords: Names of the keyword arguments.
        nones: Paths at which there is None.
        positional_statics: Values of the static arguments that have a position, by name. A call
            leaves static arguments out.
        keyword_statics: Values of the static arguments given by name.
    """

    leaves: tuple[LeafFacts, ...]
    tree: PyTreeDef | None
    arity: int
    keywords: frozenset[str] = frozenset()
    nones: tuple[str, ...] = ()
    positional_statics: Mapping[str, Any] = {}
    keyword_statics: Mapping[str, Any] = {}


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
            placed(types[i]),
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
    return LeafFacts(path, str(kind.dtype), tuple(shape), kind.weak_type, placed(kind), number)


def placed(kind: LeafType) -> str:
    """How a leaf is sharded, in words, as far as that is part of its type; else empty."""
    if kind.sharding is not None:
        return f"sharded {kind.sharding.spec}"
    return "" if kind.partitions is None else f"cut into {kind.partitions} parts"


def mismatches(
    made_for: ArgumentFacts, called: ArgumentFacts, verb: str = "compiled for"
) -> list[str]:
    """How the arguments of a call differ from those that something was made for.

    Args:
        made_for: The arguments that it was made for.
        called: The arguments of the call.
        verb: What was done for the first ones, for the lines: ``"saved for"``, say.

    Returns:
        A line for each difference; empty if there is none.

    Examples:
        >>> made = ArgumentFacts((LeafFacts("x", "float32", ("b", 8)),), None, 1)
        >>> call = ArgumentFacts((LeafFacts("x", "float16", (4, 8)),), None, 1)
        >>> mismatches(made, call)
        ['x: compiled for float32[b, 8], called with float16[4, 8]']
    """
    if given := _given_statics(made_for, called, verb):
        return given
    same_places = [a.path for a in made_for.leaves] == [b.path for b in called.leaves]
    if same_places and made_for.nones == called.nones:
        lines = [
            _line(a.path, verb, a, _beside(a, b))
            for a, b in zip(made_for.leaves, called.leaves, strict=True)
            if not _fits(a, b)
        ]
        return [*_differently_passed(made_for, called, verb), *lines] or _other_tree(
            made_for, called, verb
        )
    # By name in place of by position, the same leaves have another order.
    return [*_at_other_places(made_for, called, verb)] or _differently_passed(
        made_for, called, verb
    )


def in_words(lines: Sequence[str]) -> str:
    """Lines of `mismatches` as one message, which shows the first few of them."""
    more = len(lines) - _SHOWN
    return "; ".join([*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _line(path: str, verb: str, made: object, given: object) -> str:
    return f"{path}: {verb} {made}, called with {given}"


def _beside(made: LeafFacts, given: LeafFacts) -> object:
    """How a leaf of a call is shown beside what should be there: of two sizes, the values."""
    return given if made.dtype is not None or given.value is None else given.value


def _fits(made: LeafFacts, given: LeafFacts) -> bool:
    if given.other:
        return False
    if made.dtype is None:
        is_open = isinstance(made.shape[0], str)
        return given.value is not None and (is_open or made.shape[0] == given.value)
    return (
        made.dtype == given.dtype
        and made.weak_type == given.weak_type
        and made.placed == given.placed
        and len(made.shape) == len(given.shape)
        and all(
            not isinstance(axis, int) or axis == size
            for axis, size in zip(made.shape, given.shape, strict=True)
        )
    )


def _given_statics(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> list[str]:
    """The static arguments that a call has all the same."""
    positional, named = made_for.positional_statics, made_for.keyword_statics
    found = {**positional, **named}
    found = {name: value for name, value in found.items() if name in called.keywords}
    # With as many arguments too many as there are static ones, it is these.
    if positional and called.arity == made_for.arity + len(positional):
        found = {**positional, **found}
    participle = verb.partition(" ")[0]
    return [
        f"static argument {name}={_short(value)} is part of what was {participle}; call it "
        f"without {name}"
        for name, value in found.items()
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _differently_passed(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> list[str]:
    """The arguments that are given by name in place of by position, or the other way round."""
    how = {True: "an argument given by name", False: "one given by position"}
    return [
        _line(name, verb, how[name in made_for.keywords], how[name in called.keywords])
        for name in sorted(made_for.keywords ^ called.keywords)
    ]


def _at_other_places(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> Iterator[str]:
    """The lines about arguments whose leaves are at different paths."""
    made, given = _by_path(made_for), _by_path(called)
    inside = set[str]()  # paths that are told of together with the container around them
    for path in dict.fromkeys([*made, *given]):
        if path in inside:
            continue
        below_made, below_given = _below(path, made), _below(path, given)
        inside.update(below_made, below_given)
        if path in made and path in given:
            a, b = made[path], given[path]
            if a is not b and (a is None or b is None or not _fits(a, b)):
                yield _line(path, verb, a, b if a is None or b is None else _beside(a, b))
        elif path in made and below_given:
            yield _line(path, verb, made[path], f"a container of {_listed(below_given)}")
        elif path in given and below_made:
            yield _line(path, verb, f"a container of {_listed(below_made)}", given[path])
        elif path in made:
            if not _is_in_container(path, given):
                yield f"{path}: {verb} {made[path]}, called without it"
        elif not _is_in_container(path, made):
            yield f"{path}: {verb} no such argument, called with {given[path]}"


def _by_path(facts: ArgumentFacts) -> dict[str, LeafFacts | None]:
    """The leaves, and the places of None, by path."""
    leaves: dict[str, LeafFacts | None] = {leaf.path: leaf for leaf in facts.leaves}
    return {**leaves, **dict.fromkeys(facts.nones)}


def _is_below(path: str, container: str) -> bool:
    return path.startswith(container) and path[len(container) :][:1] in ("[", ".")


def _below(container: str, every: Mapping[str, object]) -> list[str]:
    return [path for path in every if _is_below(path, container)]


def _is_in_container(path: str, every: Mapping[str, object]) -> bool:
    """Whether the other side has a leaf in the place of a container of this path."""
    return any(_is_below(path, other) for other in every)


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def _other_tree(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> list[str]:
    """The containers that differ where all leaves are at the same paths, such as list and tuple."""
    made, given = made_for.tree, called.tree
    if made is None or given is None or made == given:
        return []
    found = [
        _line(called.leaves[leaf].path, verb, f"an element of {a}", f"an element of {b}")
        for leaf, a, b in _other_containers(made, given, 0)
    ]
    return found or [_line("the arguments", verb, f"the tree {made}", f"the tree {given}")]


def _other_containers(made: Any, given: Any, first: int) -> Iterator[tuple[int, str, str]]:
    """The outermost containers that differ: the position of their first leaf, and both types."""
    if made == given or not given.num_leaves or made.num_leaves != given.num_leaves:
        return
    a, b = made.node_data(), given.node_data()
    if a is None or b is None:
        return
    if a != b:
        yield first, _kind(a), _kind(b)
        return
    for one, other in zip(made.children(), given.children(), strict=False):
        yield from _other_containers(one, other, first)
        first += other.num_leaves


def _kind(node: tuple[Any, Any]) -> str:
    """A container in words: the name of its type, and its static data if that is short."""
    kind, data = node
    if kind in (list, tuple, dict) or data is None or isinstance(data, type):
        named = data if isinstance(data, type) else kind
        return f"a {named.__name__}"
    return f"a {kind.__name__} with {_short(data)}"
