"""Say in words how the arguments of a call differ from those that something was made for.

    made for    f(x: float32[b, 8], y: int32[b])
    called as   f(x: float16[4, 8])
    lines       x: compiled for float32[b, 8], called with float16[4, 8]
                y: compiled for int32[b], called without it

Both sides are plain values, so a file can hold one. A call is described without a `Signature`: its
arguments may fit none. Sizes of open axes are not compared here: binding them does that
(`bucketjit._tracing.resolution`). Why a signature is new is said in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._jax.arrays import names_of
from bucketjit._tracing.leaf_types import LeafType, leaf_type, with_paths
from bucketjit._tracing.parameters import Key, Parameters
from bucketjit.errors import ArgumentError

Shape = tuple[int | str, ...]

_SHOWN = 8  # lines in one message: a model has hundreds of leaves
_LONGEST = 80  # characters of the value of a static argument

_TRACED = "traced for"

_UNSEEN = "another mesh, another configuration of JAX, or a static argument of the same text"

_CHANGES = 3  # of the arguments, in one line of a log


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
        leaves: The leaves, in the order of ``tree``; None counts as one.
        tree: Tree of ``(args, kwargs)`` without static arguments; None if it is not known.
        arity: Number of positional arguments, without static ones.
        keywords: Names of the keyword arguments.
        positional_statics: Values of the static arguments that have a position, by name. A call
            leaves static arguments out.
        keyword_statics: Values of the static arguments given by name.
    """

    leaves: tuple[LeafFacts, ...]
    tree: PyTreeDef | None
    arity: int
    keywords: frozenset[str] = frozenset()
    positional_statics: Mapping[str, Any] = {}
    keyword_statics: Mapping[str, Any] = {}


def facts_of_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], name: Callable[[int], str]
) -> ArgumentFacts:
    """The facts of a call's arguments. What is no array is described, not refused."""
    leaves = tuple(_leaf_facts(path, value) for path, value in _with_paths(args, kwargs, name))
    tree = jax.tree_util.tree_structure((tuple(args), dict(kwargs)))
    return ArgumentFacts(leaves, tree, len(args), frozenset(kwargs))


def facts_made_for(
    tree: PyTreeDef,
    types: Sequence[LeafType],
    shapes: Sequence[Shape],
    name: Callable[[int], str],
    positional_statics: Mapping[str, Any] | None = None,
    keyword_statics: Mapping[str, Any] | None = None,
) -> ArgumentFacts:
    """The facts of the arguments that something is made for."""

    def facts(path: str, i: int | None) -> LeafFacts:
        if i is None:
            return LeafFacts(path, None, (), other="None")
        kind = types[i]
        dtype = None if kind.dtype is None else str(kind.dtype)
        return LeafFacts(path, dtype, shapes[i], kind.weak_type, placed(kind))

    args, kwargs = tree.unflatten(range(tree.num_leaves))
    leaves = tuple(facts(path, i) for path, i in _with_paths(args, kwargs, name))
    statics = positional_statics or {}, keyword_statics or {}
    return ArgumentFacts(leaves, tree, len(args), frozenset(kwargs), *statics)


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
    """The leaves with their paths; None counts as a leaf."""
    names = [*map(name, range(len(args))), *sorted(kwargs)]
    values = [*args, *(kwargs[key] for key in sorted(kwargs))]
    return with_paths(names, values, lambda x: x is None)


def _leaf_facts(path: str, value: Any) -> LeafFacts:
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    try:
        kind, shape = leaf_type(value, path, structs=True)
    except ArgumentError:
        of = f" of {value.dtype!r}" if isinstance(value, np.ndarray) else ""
        other = "None" if value is None else f"{type(value).__name__}{of}"
        return LeafFacts(path, None, (), other=other)
    number = int(value) if is_int else None
    return LeafFacts(path, str(kind.dtype), tuple(shape), kind.weak_type, placed(kind), number)


def placed(kind: LeafType) -> str:
    """How a leaf is sharded, in words, as far as that is part of its type; else empty."""
    if kind.target is not None:
        return f"on {names_of(kind.target.device_set)}"
    if kind.sharding is not None:
        return f"sharded {kind.sharding.spec}"
    return "" if kind.partitions is None else f"cut into {kind.partitions} parts"


def mismatches(
    made_for: ArgumentFacts, called: ArgumentFacts, verb: str = "compiled for"
) -> list[str]:
    """How the arguments of a call differ from those that something was made for, a line each."""
    return _given_statics(made_for, called, verb) or _differences(made_for, called, verb)


def in_words(lines: Sequence[str], shown: int = _SHOWN) -> str:
    """Lines of `mismatches` as one message, which shows the first few of them."""
    more = [f"and {len(lines) - shown} more"] if len(lines) > shown else []
    return "; ".join([*lines[:shown], *more])


def _line(path: str, verb: str, made: object, given: object) -> str:
    return f"{path}: {verb} {made}, called with {given}"


def _given_statics(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> list[str]:
    """The static arguments that a call has all the same."""
    positional = made_for.positional_statics
    every = {**positional, **made_for.keyword_statics}
    # With as many arguments too many as there are static ones, it is these.
    too_many = positional and called.arity == made_for.arity + len(positional)
    made = verb.partition(" ")[0]
    return [
        f"static argument {name}={_short(value)} is part of what was {made}; call it without {name}"
        for name, value in every.items()
        if name in called.keywords or (too_many and name in positional)
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _differences(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> list[str]:
    """The arguments that are passed in another way, or else the leaves that differ."""
    how = {True: "an argument given by name", False: "one given by position"}
    passed = [
        _line(name, verb, how[name in made_for.keywords], how[name in called.keywords])
        for name in sorted(made_for.keywords ^ called.keywords)
    ]
    if [leaf.path for leaf in made_for.leaves] == [leaf.path for leaf in called.leaves]:
        pairs = zip(made_for.leaves, called.leaves, strict=True)
        lines = [_line(a.path, verb, a, _beside(a, b)) for a, b in pairs if not _fits(a, b)]
        return [*passed, *lines] or _other_tree(made_for, called, verb)
    # By name in place of by position, the same leaves have another order.
    return list(_at_other_places(made_for, called, verb)) or passed


def _beside(made: LeafFacts, given: LeafFacts) -> object:
    """How a leaf of a call is shown beside what should be there: of two sizes, the values."""
    is_size = made.dtype is None and not made.other and given.value is not None
    return given.value if is_size else given


def _fits(made: LeafFacts, given: LeafFacts) -> bool:
    if given.other or made.other:
        return given.other == made.other
    if made.dtype is None:
        is_open = isinstance(made.shape[0], str)
        return given.value is not None and (is_open or made.shape[0] == given.value)
    return (
        made.dtype == given.dtype
        and made.weak_type == given.weak_type
        and made.placed == given.placed
        and len(made.shape) == len(given.shape)
        and all(n == m or isinstance(n, str) for n, m in zip(made.shape, given.shape, strict=True))
    )


def _at_other_places(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> Iterator[str]:
    """The lines about arguments whose leaves are at different paths."""
    made, given = ({leaf.path: leaf for leaf in side.leaves} for side in (made_for, called))
    for path in {**made, **given}:
        a, b = made.get(path), given.get(path)
        if a is not None and b is not None:
            if not _fits(a, b):
                yield _line(path, verb, a, _beside(a, b))
        elif inside := _inside(path, made if a is None else given):
            yield _line(path, verb, *((inside, b) if a is None else (a, inside)))
        elif any(_is_below(path, other) for other in (made if a is None else given)):
            continue  # the line of the container tells of it
        elif a is not None:
            yield f"{path}: {verb} {a}, called without it"
        else:
            yield _line(path, verb, "no such argument", b)


def _is_below(path: str, container: str) -> bool:
    return path.startswith(container) and path[len(container) :][:1] in ("[", ".")


def _inside(container: str, every: Iterable[str]) -> str:
    """The container of this path in words; empty if there is none."""
    paths = [path for path in every if _is_below(path, container)]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"a container of {', '.join(paths[:3])}{more}" if paths else ""


def _other_tree(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> list[str]:
    """The first container that differs where all leaves are at the same paths: list and tuple."""
    made, given = made_for.tree, called.tree
    if made is None or given is None or made == given:
        return []
    leaf, old, new = _where_they_part(made, given, 0)
    if not new.num_leaves or _kind(old) == _kind(new):
        return [_line("the arguments", verb, f"the tree {made}", f"the tree {given}")]
    path = [x.path for x in called.leaves if x.other != "None"][leaf]
    return [_line(path, verb, f"an element of {_kind(old)}", f"an element of {_kind(new)}")]


def _where_they_part(made: Any, given: Any, first: int) -> tuple[int, Any, Any]:
    """The outermost containers that differ, and the position of their first leaf."""
    leaf = first
    for one, other in zip(made.children(), given.children(), strict=False):
        if one != other and made.node_data() == given.node_data():
            return _where_they_part(one, other, leaf)
        leaf += one.num_leaves
    return first, made, given


def _kind(tree: Any) -> str:
    """A container in words: the name of its type, and its static data."""
    kind, data = tree.node_data() or (type(None), None)
    if isinstance(data, type):  # a named tuple
        return f"a {data.__name__}"
    return f"a {kind.__name__}" if data is None else f"a {kind.__name__} with {_short(data)}"


def why_new(before: Iterable[Key], now: Key, parameters: Parameters) -> str:
    """Why a call has a new signature, in words: how it differs from the nearest one."""

    def distance(key: Key) -> tuple[bool, bool, int]:
        pairs = zip(itertools.chain(*key.types), itertools.chain(*now.types), strict=False)
        return key.tree != now.tree, key.statics != now.statics, sum(a != b for a, b in pairs)

    def facts(key: Key) -> ArgumentFacts:
        shapes = [("_",) * kind.rank for kind in key.types]
        return facts_made_for(key.tree, key.types, shapes, parameters.name_of_dynamic)

    old = min(reversed(list(before)), key=distance)
    statics = [{k: _short(v) for k, v in parameters.named(key.statics)} for key in (old, now)]
    changed = {k: [of.get(k, "no value") for of in statics] for of in statics for k in of}
    lines = [_line(f"static {k}", _TRACED, a, b) for k, (a, b) in changed.items() if a != b]
    lines += _differences(facts(old), facts(now), _TRACED)
    return f"traced anew: {in_words(lines, _CHANGES) or _UNSEEN}"
