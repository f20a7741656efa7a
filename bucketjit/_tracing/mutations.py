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
whose new value, or whose object, the function returns is not lost. Some classes make new leaves, or
new static data, whenever they are taken apart, so what changes without the function is no change.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from jax.tree_util import keystr, tree_flatten_with_path

from bucketjit._tracing.held_output import same_tree
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
        before = _nodes_of(arguments)
        depth = getattr(_thread, "depth", 0)
        _thread.depth = depth + 1
        try:
            results = fn(*args, **kwargs)
        finally:
            _thread.depth = depth
        _refuse_lost(before, arguments, results, names)
        return results

    if not hasattr(fn, "__name__"):
        traced.__name__ = type(fn).__name__
    return traced


class _Held(NamedTuple):
    """A node or a leaf of a tree: the object, and its class and static data; None for a leaf."""

    value: Any
    kind: Any


_Path = tuple[Any, ...]

_NOTHING = _Held(None, None)


def _nodes(value: Any, path: _Path = ()) -> dict[_Path, _Held]:
    pairs, tree = tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    kind: Any = cast(Any, tree).node_data()
    found = {path: _Held(value, kind)}
    for keys, child in pairs if kind is not None else ():
        found |= _nodes(child, path + keys)
    return found


def _nodes_of(tree: Any) -> dict[_Path, _Held]:
    """Every node of a tree by its path; none if a class in it cannot be taken apart here."""
    try:
        return _nodes(tree)
    except Exception:
        return {}


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _changes(
    before: Mapping[_Path, _Held], after: Mapping[_Path, _Held]
) -> dict[_Path, tuple[Any, Any]]:
    """By path what differs: the object in which it was changed, and the new value."""
    found = {}
    for path in {**before, **after}:
        was, now = before.get(path, _NOTHING), after.get(path, _NOTHING)
        if _is_node(before, path) and _is_node(after, path):
            same, now = _is_plain(now.value) or same_tree(was.kind, now.kind), _NOTHING
        else:  # of a container that is new or gone, its leaves tell
            of_one = path not in before or path not in after
            same = was.value is now.value or (of_one and bool(was.kind or now.kind))
        around = (path[:i] for i in range(len(path), -1, -1))
        both = ((before[p].value, after[p].value) for p in around if p in before and p in after)
        holder = next(old for old, value in both if old is value)
        if not same and not _is_plain(holder):
            found[path] = holder, now.value
    return found


def _refuse_lost(
    before: Mapping[_Path, _Held], arguments: Any, results: Any, names: Sequence[str]
) -> None:
    """Raise an error that names the changes of objects among the arguments, if they are lost."""
    after = _nodes_of(arguments)
    changes = _changes(before, after) if before and after else {}
    again, returned = (_nodes_of(x) if changes else {} for x in (arguments, results))
    if not again or not returned:
        return
    kept = {id(node.value) for node in returned.values()} - {id(None)}
    unstable = _changes(after, again)
    lost = {
        path: holder
        for path, (holder, new) in changes.items()
        if path not in unstable and not {id(holder), id(new)} & kept
    }
    if not lost:
        return
    leaves = tuple(dict.fromkeys(_named(path, names) for path in lost))
    # Of an object that is a node before and after, only what is no leaf can differ.
    static = {_named(p, names) for p in lost if _is_node(before, p) and _is_node(after, p)}
    told = [f"{leaf} (static data)" if leaf in static else leaf for leaf in leaves[:_MOST_NAMED]]
    more = f" and {len(leaves) - _MOST_NAMED} more" if len(leaves) > _MOST_NAMED else ""
    classes = [kind for holder in lost.values() for kind in type(holder).__mro__]
    cure = (
        "use bucketjit.integrations.nnx.jit in the place of bucketjit.jit: it writes the new state "
        "back, as nnx.jit does"
        if any(kind.__module__.startswith("flax.nnx") for kind in classes)
        else "return the new state, and assign it where the function is called "
        "(state = step(state, batch))"
    )
    raise MutationError(
        f"the function changes {', '.join(told)}{more} in place, and that would be "
        "lost: it is traced with copies of its arguments, so the caller's objects stay as they "
        f"are; {cure}",
        leaves,
    )


def _is_node(found: Mapping[_Path, _Held], path: _Path) -> bool:
    """Whether there is a node of the tree at a path."""
    return bool(found.get(path, _NOTHING).kind)


def _named(path: tuple[Any, ...], names: Sequence[str]) -> str:
    """A path in ``(args, kwargs)``, in words."""
    if len(path) < 2:
        return "an argument"
    (which, first), rest = path[:2], keystr(path[2:])
    if which.idx == 1:
        return f"{first.key}{rest}"
    return f"{names[first.idx] if first.idx < len(names) else f'args[{first.idx}]'}{rest}"
