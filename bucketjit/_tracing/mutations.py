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
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

from jax.tree_util import keystr, tree_flatten_with_path

from bucketjit._tracing.held_output import same_tree
from bucketjit.errors import MutationError

_PLAIN = (dict, list, tuple, OrderedDict, defaultdict, type(None))

_MOST_NAMED = 6  # leaves that an error names


# How many bucketed functions this thread traces, one in another.
_depth: ContextVar[int] = ContextVar("depth", default=0)


def is_traced_here() -> bool:
    """Whether this thread runs the function of a bucketed function, to trace it."""
    return _depth.get() > 0


def refusing_mutations(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The function, with an error where it changes an object among its arguments and loses that."""

    @functools.wraps(fn, updated=())
    def traced(*args: Any, **kwargs: Any) -> Any:
        before = _unless_odd(_objects, (args, kwargs))
        token = _depth.set(_depth.get() + 1)
        try:
            results = fn(*args, **kwargs)
        finally:
            _depth.reset(token)
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
_Object = tuple[_Path, Any, Mapping[_Path, Any], Any]  # with its parts, its class and static data


def _parts(value: Any) -> tuple[dict[_Path, Any], Any]:
    """The parts of a value by path, and its class and static data; None for that of a leaf."""
    pairs, tree = tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    return dict(pairs), cast(Any, tree).node_data()


def _objects(value: Any, path: _Path = ()) -> list[_Object]:
    """The objects in a tree: no plain containers, and of the same parts when taken apart again."""
    parts, data = _parts(value)
    if data is None:
        return []
    node = path, value, parts, data
    is_plain = type(value) in _PLAIN or hasattr(value, "_fields")
    below = (_objects(part, path + keys) for keys, part in parts.items())
    return [*([] if is_plain or _changes(node) else [node]), *itertools.chain(*below)]


def _changes(node: _Object) -> dict[_Path, Any]:
    """The leaves of an object that differ now, by path; the object, if its static data does."""
    path, value, old, data = node
    new, data_now = _parts(value)
    changes = {} if same_tree(data, data_now) else {path: value}
    for keys in (keys for keys in {**old, **new} if old.get(keys) is not new.get(keys)):
        was, is_now = (dict(tree_flatten_with_path(parts.get(keys))[0]) for parts in (old, new))
        changed = (p for p in {**was, **is_now} if was.get(p) is not is_now.get(p))
        changes |= {path + keys + p: is_now.get(p) for p in changed}
    return changes


def _lost(before: Sequence[_Object], results: Any) -> dict[_Path, Any]:
    """The changes of objects that the results do not hold, by path."""
    changed = [(node[1], changes) for node in before if (changes := _changes(node))]
    kept = set(map(id, _held(results))) - {id(None)} if changed else set()
    return {
        path: new
        for value, changes in changed
        for path, new in changes.items()
        if not {id(value), id(new)} & kept
    }


def _held(value: Any) -> Iterator[Any]:
    yield value
    for part in _parts(value)[0].values():
        if part is not value:
            yield from _held(part)


def _error(lost: Mapping[_Path, Any], before: Sequence[_Object], names: Sequence[str]) -> Exception:
    ids = {id(node[1]) for node in before}
    marks = {_named(path, names): " (static data)" * (id(x) in ids) for path, x in lost.items()}
    leaves = [leaf + mark for leaf, mark in marks.items()][:_MOST_NAMED]
    more = f" and {len(marks) - _MOST_NAMED} more" if len(marks) > _MOST_NAMED else ""
    around = [x for path, x, *_ in before if any(p[: len(path)] == path for p in lost)]
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
        f"the function changes {', '.join(leaves)}{more} in place, and that would be "
        "lost: it is traced with copies of its arguments, so the caller's objects stay as they "
        f"are; {cure}",
        tuple(marks),
    )


def _named(path: tuple[Any, ...], names: Sequence[str]) -> str:
    if len(path) < 2:
        return "an argument"
    (which, first), rest = path[:2], keystr(path[2:])
    if which.idx == 1:
        return f"{first.key}{rest}"
    return f"{names[first.idx] if first.idx < len(names) else f'args[{first.idx}]'}{rest}"
