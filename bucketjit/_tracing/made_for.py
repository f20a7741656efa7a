"""The only arguments that calls may have: those that something was compiled or saved for.

Errors say in words how the arguments of a call differ::

    made for    f(x: float32[b, 8], y: int32[b])
    called as   f(x: float16[4, 8])
    lines       x: compiled for float32[b, 8], called with float16[4, 8]
                y: compiled for int32[b], called without it

Sizes of open axes are not compared here: binding them does that (`bucketjit._tracing.resolution`).
Why a signature is new is said in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import names_of
from bucketjit._tracing.leaf_types import LeafType, leaf_type, with_paths
from bucketjit._tracing.parameters import Key, Parameters
from bucketjit._tracing.resolution import without_empty
from bucketjit._tracing.signature import Signature
from bucketjit._tracing.traced_programs import Instead
from bucketjit.errors import ArgumentError

Shape = tuple[int | str, ...]
_SHOWN = 8  # lines in one message: a model has hundreds of leaves
_LONGEST = 80  # characters of the value of a static argument
_CHANGES = 3  # of the arguments, in one line of a log
_UNSEEN = "another mesh, another configuration of JAX, or a static argument of the same text"


class LeafFacts(NamedTuple):
    """The type of one argument leaf, as text and numbers.

    Attributes:
        path: How errors name it, such as ``params['w']``.
        dtype: Name of its dtype; None for a Python int that is itself a size.
        shape: Its axes: a number where the size is fixed, else text. A size has one axis.
        weak_type: JAX's weak type.
        placed: How it is sharded, in words, as far as that is part of its type; else empty.
        value: For a leaf of a call, the value of an int, which can be a size; else None.
        words: What it is, in words, if it is no array, so that it fits nothing; else empty.
    """

    path: str
    dtype: str | None
    shape: tuple[int | str, ...]
    weak_type: bool = False
    placed: str = ""
    value: int | None = None
    words: str = ""

    def __str__(self) -> str:
        if self.words:
            return self.words
        if self.dtype is None:
            return f"an int, the size {self.shape[0]}"
        shape = ", ".join(map(str, self.shape))
        weak = " of weak type" if self.weak_type else ""
        return f"{self.dtype}[{shape}]{weak}{' ' if self.placed else ''}{self.placed}"


class ArgumentFacts(NamedTuple):
    """The arguments of one call, or of every call that something was made for.

    Attributes:
        leaves: The leaves, in the order of ``tree``; None counts as one.
        tree: Tree of ``(args, kwargs)`` without static arguments.
        arity: Number of positional arguments, without static ones.
        keywords: Names of the keyword arguments.
        positional_statics: Values of the static arguments that have a position, by name.
        keyword_statics: Values of the static arguments given by name.
    """

    leaves: tuple[LeafFacts, ...]
    tree: PyTreeDef
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
    positional_statics: Mapping[str, Any] = {},
    keyword_statics: Mapping[str, Any] = {},
) -> ArgumentFacts:
    """The facts of the arguments that something is made for."""

    def facts(path: str, i: int | None) -> LeafFacts:
        if i is None:
            return LeafFacts(path, None, (), words="None")
        kind = types[i]
        dtype = None if kind.dtype is None else str(kind.dtype)
        return LeafFacts(path, dtype, shapes[i], kind.weak_type, _placed(kind))

    args, kwargs = tree.unflatten(range(tree.num_leaves))
    leaves = tuple(facts(path, i) for path, i in _with_paths(args, kwargs, name))
    names = frozenset(kwargs)
    return ArgumentFacts(leaves, tree, len(args), names, positional_statics, keyword_statics)


def _with_paths(
    args: Sequence[Any], kwargs: Mapping[str, Any], name: Callable[[int], str]
) -> list[tuple[str, Any]]:
    """The leaves with their paths; None counts as a leaf."""
    names = [*map(name, range(len(args))), *sorted(kwargs)]
    values = [*args, *(kwargs[key] for key in sorted(kwargs))]
    return with_paths(names, values, lambda x: x is None)


def _leaf_facts(path: str, value: Any) -> LeafFacts:
    try:
        kind, shape = leaf_type(value, path, structs=True)
    except ArgumentError:
        of = f" of {value.dtype!r}" if isinstance(value, np.ndarray) else ""
        words = "None" if value is None else f"{type(value).__name__}{of}"
        return LeafFacts(path, None, (), words=words)
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    number = int(value) if is_int else None
    return LeafFacts(path, str(kind.dtype), tuple(shape), kind.weak_type, _placed(kind), number)


def _placed(kind: LeafType) -> str:
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
    return _statics_of_call(made_for, called, verb) or _differences(made_for, called, verb)


def in_words(lines: Sequence[str], shown: int = _SHOWN) -> str:
    """Lines of `mismatches` as one message, which shows the first few of them."""
    more = [f"and {len(lines) - shown} more"] if len(lines) > shown else []
    return "; ".join([*lines[:shown], *more])


def _line(path: str, verb: str, expected: object, passed: object) -> str:
    return f"{path}: {verb} {expected}, called with {passed}"


def _statics_of_call(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> list[str]:
    """The static arguments that a call has all the same."""
    positional = made_for.positional_statics
    every = {**positional, **made_for.keyword_statics}
    # With as many arguments too many as there are static ones, it is these.
    too_many = positional and called.arity == made_for.arity + len(positional)
    participle = verb.partition(" ")[0]
    return [
        f"static argument {name}={_short(value)} is part of what was {participle}; "
        f"call it without {name}"
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
        lines = [line for a, b in pairs for line in _line_of_leaf(a, b, verb)]
        return [*passed, *lines] or _line_of_containers(made_for, called, verb)
    # By name in place of by position, the same leaves have another order.
    return list(_lines_of_paths(made_for, called, verb)) or passed


def _line_of_leaf(expected: LeafFacts, passed: LeafFacts, verb: str) -> list[str]:
    """The line about a leaf; none if it fits. Of two sizes, the values are shown."""
    shown: object = passed
    if expected.words or passed.words:
        fits = expected.words == passed.words
    elif expected.dtype is None and passed.value is not None:
        shown = passed.value
        fits = expected.shape[0] == passed.value or isinstance(expected.shape[0], str)
    else:
        axes = zip(expected.shape, passed.shape, strict=False)
        types = [(x.dtype, x.weak_type, x.placed, len(x.shape)) for x in (expected, passed)]
        fits = types[0] == types[1] and all(n == m or isinstance(n, str) for n, m in axes)
    return [] if fits else [_line(expected.path, verb, expected, shown)]


def _lines_of_paths(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> Iterator[str]:
    expected, passed = ({leaf.path: leaf for leaf in side.leaves} for side in (made_for, called))
    for path in {**expected, **passed}:
        a, b = expected.get(path), passed.get(path)
        beside = expected if a is None else passed  # the side that lacks the path
        if a and b:
            yield from _line_of_leaf(a, b, verb)
        elif inside := _inside(path, beside):
            yield _line(path, verb, a or inside, b or inside)
        elif not any(_is_below(path, container) for container in beside):  # else it has a line
            without = f"{path}: {verb} {a}, called without it"
            yield without if a else _line(path, verb, "no such argument", b)


def _is_below(path: str, container: str) -> bool:
    return path.startswith(container) and path[len(container) :][:1] in ("[", ".")


def _inside(container: str, every: Iterable[str]) -> str:
    """The container of this path in words; empty if there is none."""
    paths = [path for path in every if _is_below(path, container)]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"a container of {', '.join(paths[:3])}{more}" if paths else ""


def _line_of_containers(made_for: ArgumentFacts, called: ArgumentFacts, verb: str) -> list[str]:
    """The first container that differs where all leaves are at the same paths: list and tuple."""
    expected, passed = made_for.tree, called.tree
    if expected == passed:
        return []
    leaf, old, new = _where_they_part(expected, passed, 0)
    if not new.num_leaves or _kind(old) == _kind(new):
        return [_line("the arguments", verb, f"the tree {expected}", f"the tree {passed}")]
    path = [x.path for x in called.leaves if x.words != "None"][leaf]
    return [_line(path, verb, f"an element of {_kind(old)}", f"an element of {_kind(new)}")]


def _where_they_part(expected: Any, passed: Any, first: int) -> tuple[int, Any, Any]:
    """The outermost containers that differ, and the position of their first leaf."""
    leaf = first
    for a, b in zip(expected.children(), passed.children(), strict=False):
        if a != b and expected.node_data() == passed.node_data():
            return _where_they_part(a, b, leaf)
        leaf += a.num_leaves
    return first, expected, passed


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
        shapes = [(STATIC,) * kind.rank for kind in key.types]
        return facts_made_for(key.tree, key.types, shapes, parameters.name_of_dynamic)

    old = min(reversed(list(before)), key=distance)
    statics = [{k: _short(v) for k, v in parameters.named(key.statics)} for key in (old, now)]
    changed = {k: [of.get(k, "no value") for of in statics] for of in statics for k in of}
    verb = "traced for"
    lines = [_line(f"static {k}", verb, a, b) for k, (a, b) in changed.items() if a != b]
    lines += _differences(facts(old), facts(now), verb)
    return f"traced anew: {in_words(lines, _CHANGES) or _UNSEEN}"


class MadeFor:
    """The arguments that something was made for; a `Signer` with it takes no others."""

    def __init__(
        self,
        verb: str,
        tree: Any,
        types: Sequence[LeafType],
        shapes: Sequence[Shape],
        name: Callable[[int], str],
        statics: tuple[Mapping[str, Any], Mapping[str, Any]],
        likes: Sequence[Any] | None = None,
        remark: Callable[[], str] = lambda: "",
    ) -> None:
        self.tree, self.types, self.shapes = tree, tuple(types), tuple(shapes)
        self._verb, self._name, self._remark = verb, name, remark
        self._likes: Sequence[Any] = likes or [0] * len(self.types)
        self.facts = facts_made_for(tree, types, shapes, name, *statics)

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise an error that names the arguments that do not fit, if there are any."""
        called = facts_of_call(args, kwargs, self._name)
        if lines := mismatches(self.facts, called, self._verb):
            raise ArgumentError(in_words(lines) + self._remark())

    def check_types(self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise an error if the arguments of a call differ, static sizes aside."""

        def fits(expected: LeafType, passed: LeafType) -> bool:
            is_int = passed.rank == 0 and jax.dtypes.issubdtype(passed.dtype, np.integer)
            return expected == passed or (expected.dtype is None and bool(is_int))

        if key.tree == self.tree and all(map(fits, self.types, key.types)):
            return
        self.check_call(args, kwargs)
        line = f"an argument is sharded over another mesh than it was {self._verb}"
        if key.tree != self.tree:
            line = _line("the arguments", self._verb, f"the tree {self.tree}", key.tree)
        raise ArgumentError(line)

    def checked(self, leaves: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Any]:
        """The leaves of a call, whose static sizes must fit; ints that are sizes are all alike."""
        checked = list(leaves)
        rows = zip(self.types, self.shapes, shapes, strict=True)
        for i, (kind, expected, shape) in enumerate(rows):
            if kind.dtype is None:
                like, n = self._likes[i], int(leaves[i])
                checked[i] = n if isinstance(like, int) else np.asarray(n).astype(like.dtype)[()]
                shape = (n,)
            if any(type(n) is int and n != m for n, m in zip(expected, shape, strict=True)):
                self.check_call(*self.tree.unflatten(leaves))
        return checked

    def opened(self, count: int, keywords: Sequence[str]) -> tuple[set[int], set[str]]:
        """The arguments that have open axes, or are sizes."""
        args, kwargs = self.tree.unflatten(range(len(self.shapes)))

        def is_open(argument: Any) -> bool:
            leaves = jax.tree_util.tree_leaves(argument)
            return any(isinstance(axis, str) for i in leaves for axis in self.shapes[i])

        named = {name for name in keywords if name in kwargs and is_open(kwargs[name])}
        return {i for i, argument in enumerate(args[:count]) if is_open(argument)}, named


def fixed_signature(
    fn: Callable[..., Any],
    made_for: MadeFor,
    paths: Sequence[str],
    constraints: Sequence[str],
    programs: Iterable[tuple[Interface, frozenset[str]]],
    instead: Instead,
) -> Signature:
    """The one signature of such calls: of these programs, each with the variables that are 0."""
    tokens = [[STATIC if type(n) is int else str(n) for n in shape] for shape in made_for.shapes]
    signature = Signature(
        *(fn, made_for.tree, made_for.types, paths),
        *([", ".join(row) or None for row in tokens], constraints),
        instead=instead,
    )
    # Static sizes tell programs apart; those of open axes do not matter here.
    shapes = [tuple(n if type(n) is int else 0 for n in shape) for shape in made_for.shapes]
    opened = signature.declared_tokens(shapes)
    for program, empty in programs:
        signature.add(program, signature.at(without_empty(opened, empty), shapes))
    return signature
