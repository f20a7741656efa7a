"""Find what a traced function changed in its arguments, and would lose.

A function is traced with copies of its arguments: JAX takes them apart and builds them anew. A
function that changes an object in place changes the copy::

    def step(model, x):
        model.w = model.w - 0.1 * gradient(model, x)   # of the copy
        return loss

The caller's model stays as it is, and nothing is trained. So the arguments are taken apart once
more after the function has returned, and what is not the object that was put in was changed.

What counts is the object that was changed: the innermost one around the change that is itself still
the same. In a plain dict or list a change is a habit (``batch.pop("labels")``) and is left alone.
So is one whose new value, or whose object, the function returns: then it is not lost.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.tree_util import keystr, tree_flatten_with_path

from bucketjit.errors import MutationError

_PLAIN = (dict, list, tuple, OrderedDict, defaultdict, type(None))

_MOST_NAMED = 6  # leaves that an error names


_thread = threading.local()  # how many bucketed functions this thread traces, one in another


def is_traced_here() -> bool:
    """Whether this thread runs the function of a bucketed function, to trace it."""
    return getattr(_thread, "depth", 0) > 0


def refusing_mutations(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The function, with an error where it changes an object among its arguments and loses that."""

    @functools.wraps(fn, updated=())
    def traced(*args: Any, **kwargs: Any) -> Any:
        given = args, kwargs
        before = _flat(given)
        depth = getattr(_thread, "depth", 0)
        _thread.depth = depth + 1
        try:
            results = fn(*args, **kwargs)
        finally:
            _thread.depth = depth
        if before is not None and before.has_objects:
            _check(before, given, results, names)
        return results

    if not hasattr(fn, "__name__"):
        traced.__name__ = type(fn).__name__
    return traced


@dataclass(frozen=True)
class _Flat:
    """A tree, taken apart.

    Attributes:
        objects: Its nodes and leaves: each node is followed by its children.
        paths: The path of each leaf.
        leaves: The leaves.
        tree: Its structure.
    """

    objects: list[Any]
    paths: list[Any]
    leaves: list[Any]
    tree: Any

    @functools.cached_property
    def has_objects(self) -> bool:
        """Whether there are nodes other than plain containers."""
        leaves = set(map(id, self.leaves))
        return any(not _is_plain(x) and id(x) not in leaves for x in self.objects)

    def is_like(self, other: _Flat) -> bool:
        """Whether the other one has the same leaves in the same structure."""
        return len(self.leaves) == len(other.leaves) and (
            all(a is b for a, b in zip(self.leaves, other.leaves, strict=True))
            and bool(self.tree == other.tree)
        )


def _flat(tree: Any) -> _Flat | None:
    """Take a tree apart; None for a class that cannot be taken apart here."""
    objects: list[Any] = []

    def note(node: object) -> bool:  # is asked for every node and leaf
        objects.append(node)
        return False

    try:
        pairs, structure = tree_flatten_with_path(tree, is_leaf=note)
    except Exception:
        return None
    return _Flat(objects, [path for path, _ in pairs], [leaf for _, leaf in pairs], structure)


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (isinstance(value, tuple) and hasattr(value, "_fields"))


@dataclass(frozen=True)
class _Node:
    """A node or a leaf of a tree.

    Attributes:
        value: The object.
        path: Its path.
        kind: Its class and static data; None for a leaf.
        children: Its children by their keys.
    """

    value: Any
    path: tuple[Any, ...]
    kind: Any
    children: dict[Any, _Node]

    @property
    def is_plain(self) -> bool:
        return _is_plain(self.value)

    def leaves(self) -> Iterator[_Node]:
        if self.kind is None:
            yield self
        for child in self.children.values():
            yield from child.leaves()


def _node(flat: _Flat) -> _Node:
    """The root of a tree that was taken apart."""
    objects, paths = iter(flat.objects), iter(flat.paths)

    def build(tree: Any, depth: int) -> _Node:
        value, kind = next(objects), tree.node_data()
        if kind is None:
            return _Node(value, next(paths), None, {})
        children = [build(child, depth + 1) for child in tree.children()]
        # A child without leaves has no path.
        found = next((leaf.path for child in children for leaf in child.leaves()), ())
        keyed = {_key(child, depth, i): child for i, child in enumerate(children)}
        return _Node(value, tuple(found[:depth]), kind, keyed)

    return build(flat.tree, 0)


def _key(child: _Node, depth: int, position: int) -> Any:
    first = next(child.leaves(), None)
    return position if first is None else first.path[depth]


@dataclass(frozen=True)
class _Change:
    """Something that was changed.

    Attributes:
        holder: The object in which it was changed.
        path: Where it is.
        new: The new leaf, if a leaf was replaced or added.
        what: What was changed, unless a leaf was replaced.
    """

    holder: Any
    path: tuple[Any, ...]
    new: Any = None
    what: str = ""


def _changes(before: _Node, after: _Node, holder: Any) -> Iterator[_Change]:
    """The changes between two states of a node, without those in plain containers."""
    same = before.value is after.value
    if not same and _is_plain(holder):
        return
    if before.kind is None or after.kind is None or before.kind[0] is not after.kind[0]:
        if not same:
            yield _Change(holder, before.path or after.path, after.value)
        return
    holder = before.value if same else holder
    olds, news = before.children, after.children
    keys = [*olds, *(k for k in news if k not in olds)]
    pairs: list[tuple[_Node | None, _Node | None]] = [(olds.get(k), news.get(k)) for k in keys]
    if len(olds) == len(news):  # a child that was empty has another key
        pairs = list(zip(olds.values(), news.values(), strict=True))
    for was, now in pairs:
        if was is not None and now is not None:
            yield from _changes(was, now, holder)
        elif not _is_plain(holder):
            for leaf in () if now is None else now.leaves():
                yield _Change(holder, leaf.path, leaf.value, "added")
            for leaf in () if was is None else was.leaves():
                yield _Change(holder, leaf.path, None, "removed")
    if olds.keys() == news.keys() and not _is_plain(holder) and before.kind[1] != after.kind[1]:
        yield _Change(holder, before.path or after.path, None, "static data")


def _check(before: _Flat, arguments: Any, results: Any, names: Sequence[str]) -> None:
    """Raise if objects among the arguments were changed, and the changes are not returned."""
    after = _flat(arguments)
    if after is None or after.is_like(before):
        return
    again, returned = _flat(arguments), _flat(results)
    if again is None or returned is None:
        return
    known = set(map(id, returned.objects))
    # Some classes make new leaves, or new static data, whenever they are taken apart.
    stable = set(map(id, after.leaves)) & set(map(id, again.leaves))
    is_lasting = bool(after.tree == again.tree)
    lost = [
        change
        for change in _changes(_node(before), _node(after), None)
        if id(change.holder) not in known
        and (id(change.new) not in known or change.new is None)
        and (change.new is None or id(change.new) in stable or change.what == "added")
        and (is_lasting or change.what != "static data")
    ]
    if lost:
        raise _error(lost, names)


def _error(lost: Sequence[_Change], names: Sequence[str]) -> MutationError:
    told = {}
    for change in lost:
        path = _told(change.path, names)
        told[path] = f"{path} ({change.what})" if change.what else path
    shown = ", ".join(list(told.values())[:_MOST_NAMED])
    if len(told) > _MOST_NAMED:
        shown += f" and {len(told) - _MOST_NAMED} more"
    is_nnx = any(
        kind.__module__.startswith("flax.nnx")
        for change in lost
        for kind in type(change.holder).__mro__
    )
    cure = (
        "use bucketjit.integrations.nnx.jit in the place of bucketjit.jit: it writes the new state "
        "back, as nnx.jit does"
        if is_nnx
        else "return the new state, and assign it where the function is called "
        "(state = step(state, batch))"
    )
    return MutationError(
        f"the function changes {shown} in place, and that would be lost: it is traced with copies "
        f"of its arguments, so the caller's objects stay as they are; {cure}",
        tuple(told),
    )


def _told(path: tuple[Any, ...], names: Sequence[str]) -> str:
    """A path in ``(args, kwargs)``, in words."""
    if len(path) < 2:
        return "an argument"
    (which, first), rest = path[:2], keystr(path[2:])
    if which.idx == 1:
        return f"{first.key}{rest}"
    return f"{names[first.idx] if first.idx < len(names) else f'args[{first.idx}]'}{rest}"
