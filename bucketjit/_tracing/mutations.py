"""Find what a traced function changed in its arguments, and would lose.

A function is traced with copies of its arguments: JAX takes them apart and builds them anew. A
function that changes an object in place changes the copy::

    def step(model, x):
        model.w = model.w - 0.1 * gradient(model, x)   # of the copy
        return loss

The caller's model stays as it is, and nothing is trained. So the arguments are taken apart once
more after the function has returned, and what is not the object that was put in was changed.

What counts is the object that was changed: the innermost one around the change that is itself still
the same. A change in a plain dict or list is lost without an error, as under ``jax.jit``. A change
whose new value, or whose object, the function returns is not lost.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

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
        arguments = args, kwargs
        before = _taken_apart(arguments)
        depth = getattr(_thread, "depth", 0)
        _thread.depth = depth + 1
        try:
            results = fn(*args, **kwargs)
        finally:
            _thread.depth = depth
        if lost := _lost_changes(before, arguments, results):
            raise _error(lost, names)
        return results

    if not hasattr(fn, "__name__"):
        traced.__name__ = type(fn).__name__
    return traced


class _Held(NamedTuple):
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
    children: dict[Any, _Held]

    def every(self) -> Iterator[_Held]:
        yield self
        for child in self.children.values():
            yield from child.every()


def _node(value: Any, path: tuple[Any, ...] = ()) -> _Held:
    pairs, tree = tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    kind: Any = cast(Any, tree).node_data()
    children = {} if kind is None else {p[0]: _node(x, path + p) for p, x in pairs}
    return _Held(value, path, kind, children)


def _taken_apart(tree: Any) -> _Held | None:
    """The root of a tree; None if a class in it cannot be taken apart here."""
    try:
        return _node(tree)
    except Exception:
        return None


class _Change(NamedTuple):
    """Something that was changed.

    Attributes:
        holder: The object in which it was changed.
        path: Where it is.
        new: The new value, if one was replaced or added.
        what: What was changed, unless a value was replaced.
    """

    holder: Any
    path: tuple[Any, ...]
    new: Any = None
    what: str = ""


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _changes(before: _Held, after: _Held, holder: Any = None) -> Iterator[_Change]:
    """The changes between two states of a node, without those in plain containers."""
    same = before.value is after.value
    if not same and _is_plain(holder):
        return
    if before.kind is None or after.kind is None or before.kind[0] is not after.kind[0]:
        if not same:
            yield _Change(holder, after.path, after.value)
        return
    holder = before.value if same else holder
    for key in {**before.children, **after.children}:
        was, now = before.children.get(key), after.children.get(key)
        if was is not None and now is not None:
            yield from _changes(was, now, holder)
        elif not _is_plain(holder):
            for node in (now or was or after).every():
                if node.kind is None:
                    new, what = (None, "removed") if now is None else (node.value, "added")
                    yield _Change(holder, node.path, new, what)
    same_keys = before.children.keys() == after.children.keys()
    if same_keys and not _is_plain(holder) and before.kind[1] != after.kind[1]:
        yield _Change(holder, after.path, None, "static data")


def _lost_changes(before: _Held | None, arguments: Any, results: Any) -> list[_Change]:
    """The changes of objects among the arguments that are not returned."""
    after = None if before is None else _taken_apart(arguments)
    if before is None or after is None or not (changes := list(_changes(before, after))):
        return []
    again, returned = _taken_apart(arguments), _taken_apart(results)
    if again is None or returned is None:
        return []
    kept = {id(node.value) for node in returned.every()} - {id(None)}
    # Some classes make new leaves, or new static data, whenever they are taken apart.
    unstable = {(change.path, change.what) for change in _changes(after, again)}
    return [
        change
        for change in changes
        if not {id(change.holder), id(change.new)} & kept
        and (change.path, change.what) not in unstable
    ]


def _error(lost: Sequence[_Change], names: Sequence[str]) -> MutationError:
    leaves = {}
    for change in lost:
        path = _named(change.path, names)
        leaves[path] = f"{path} ({change.what})" if change.what else path
    shown = ", ".join(list(leaves.values())[:_MOST_NAMED])
    if len(leaves) > _MOST_NAMED:
        shown += f" and {len(leaves) - _MOST_NAMED} more"
    classes = [kind for change in lost for kind in type(change.holder).__mro__]
    cure = (
        "use bucketjit.integrations.nnx.jit in the place of bucketjit.jit: it writes the new state "
        "back, as nnx.jit does"
        if any(kind.__module__.startswith("flax.nnx") for kind in classes)
        else "return the new state, and assign it where the function is called "
        "(state = step(state, batch))"
    )
    return MutationError(
        f"the function changes {shown} in place, and that would be lost: it is traced with copies "
        f"of its arguments, so the caller's objects stay as they are; {cure}",
        tuple(leaves),
    )


def _named(path: tuple[Any, ...], names: Sequence[str]) -> str:
    """A path in ``(args, kwargs)``, in words."""
    if len(path) < 2:
        return "an argument"
    (which, first), rest = path[:2], keystr(path[2:])
    if which.idx == 1:
        return f"{first.key}{rest}"
    return f"{names[first.idx] if first.idx < len(names) else f'args[{first.idx}]'}{rest}"
