"""Find what a traced function changed in its arguments, and would lose.

A function is traced with copies of its arguments: JAX takes them apart and builds them anew. A
function that changes an object in place changes the copy::

    def step(model, x):
        model.w = model.w - 0.1 * gradient(model, x)   # of the copy
        return loss

The caller's model stays as it is, and nothing is trained. So each object in the arguments, a node
of their tree that is no plain container, is taken apart before the function runs and after it. If
a part has other leaves than before, or the static data differs, the object was changed.

A change in a plain dict or list is lost without an error, as under ``jax.jit``. A change whose new
value, or whose object, the function returns is not lost. Objects that make new parts whenever they
are taken apart are not judged.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

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
        before = _unless_odd(_objects, (args, kwargs))
        depth = getattr(_thread, "depth", 0)
        _thread.depth = depth + 1
        try:
            results = fn(*args, **kwargs)
        finally:
            _thread.depth = depth
        if lost := _unless_odd(_lost, before, results):
            raise _error(lost, before, names)
        return results

    if not hasattr(fn, "__name__"):
        traced.__name__ = type(fn).__name__
    return traced


def _unless_odd(look: Callable[..., Any], *args: Any) -> Any:
    """What a look at objects finds; nothing if a class among them cannot be taken apart here."""
    try:
        return look(*args)
    except Exception:
        return ()


_Path = tuple[Any, ...]
_Node = tuple[_Path, Any, dict[_Path, Any], Any]  # what, its parts, its class and static data


def _nodes(value: Any, path: _Path = ()) -> Iterator[_Node]:
    """The nodes of a tree, from the root to the leaves."""
    pairs, tree = tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    parts, kind = {path + keys: part for keys, part in pairs}, cast(Any, tree).node_data()
    if kind is not None:  # no leaf
        yield path, value, parts, kind
        for at, part in parts.items():
            yield from _nodes(part, at)


def _objects(tree: Any) -> list[_Node]:
    """The nodes that are no plain containers, and of the same parts when taken apart again."""
    return [
        node
        for node in _nodes(tree)
        if not (type(node[1]) in _PLAIN or hasattr(node[1], "_fields") or _changes(node))
    ]


def _changes(node: _Node) -> dict[_Path, Any]:
    """The leaves of an object that differ now, by path; the object, if its static data does."""
    path, value, old, kind = node
    _, _, new, now = next(_nodes(value, path))
    was, is_now = _leaves(old, new), _leaves(new, old)
    changes = {p: is_now.get(p) for p in {**was, **is_now} if was.get(p) is not is_now.get(p)}
    return changes if same_tree(kind, now) else {**changes, path: value}


def _leaves(parts: Mapping[_Path, Any], before: Mapping[_Path, Any]) -> dict[_Path, Any]:
    """The leaves of the parts that are other objects than before, by path."""
    others = ((at, part) for at, part in parts.items() if part is not before.get(at))
    return {at + p: leaf for at, part in others for p, leaf in tree_flatten_with_path(part)[0]}


def _lost(before: Sequence[_Node], results: Any) -> dict[_Path, Any]:
    """The changes of objects that the results do not hold, by path."""
    changed = [(node[1], changes) for node in before if (changes := _changes(node))]
    returned = [part for node in _nodes(results) for part in node[2].values()] if changed else []
    kept = {id(results), *map(id, returned)} - {id(None)}
    return {
        path: new
        for value, changes in changed
        for path, new in changes.items()
        if not {id(value), id(new)} & kept
    }


def _error(lost: Mapping[_Path, Any], before: Sequence[_Node], names: Sequence[str]) -> Exception:
    """The error that names what is lost, and says what to do about it."""
    own = {id(node[1]) for node in before}
    marks = {_named(path, names): " (static data)" * (id(x) in own) for path, x in lost.items()}
    told = [leaf + mark for leaf, mark in marks.items()][:_MOST_NAMED]
    more = f" and {len(marks) - _MOST_NAMED} more" if len(marks) > _MOST_NAMED else ""
    around = [value for at, value, *_ in before if any(path[: len(at)] == at for path in lost)]
    classes = {kind for value in around for kind in type(value).__mro__}
    of_nnx = {kind.__name__ for kind in classes if kind.__module__.startswith("flax.nnx")}
    cure = (
        # nnx.merge takes the variables of a state as they are.
        "return the new state, nnx.state(model); if it is of no use, make the model by "
        "nnx.merge(graphdef, state, copy=True)"
        if of_nnx & {"State", "FlatState"}
        else "use bucketjit.integrations.nnx.jit in the place of bucketjit.jit: it writes the new "
        "state back, as nnx.jit does"
        if of_nnx
        else "return the new state, and assign it where the function is called "
        "(state = step(state, batch))"
    )
    return MutationError(
        f"the function changes {', '.join(told)}{more} in place, and that would be "
        "lost: it is traced with copies of its arguments, so the caller's objects stay as they "
        f"are; {cure}",
        tuple(marks),
    )


def _named(path: tuple[Any, ...], names: Sequence[str]) -> str:
    """A path in ``(args, kwargs)``, in words."""
    if len(path) < 2:
        return "an argument"
    (which, first), rest = path[:2], keystr(path[2:])
    if which.idx == 1:
        return f"{first.key}{rest}"
    return f"{names[first.idx] if first.idx < len(names) else f'args[{first.idx}]'}{rest}"
