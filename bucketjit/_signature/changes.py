"""Say in words why a call has a new signature: which dtype, rank or static value changed.

The words are for log lines and events.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.tree_util import PyTreeDef

from bucketjit._signature.leaf_types import LeafType
from bucketjit._signature.parameters import Statics

_SHOWN = 3  # changes in one line
_LONGEST = 80  # characters of a tree


class Key(NamedTuple):
    """What identifies a signature.

    Attributes:
        tree: Tree of ``(args, kwargs)`` without static arguments.
        types: Type of each leaf.
        statics: The static arguments.
        context: The configuration of JAX that traces depend on.
    """

    tree: Any
    types: tuple[LeafType, ...]
    statics: Statics
    context: Any


def nearest(before: Iterable[Key], now: Key) -> Key | None:
    """The key that differs least from a new one."""
    return min(reversed(list(before)), key=lambda key: _distance(key, now), default=None)


def _distance(before: Key, now: Key) -> tuple[bool, int]:
    if before.tree != now.tree:
        return True, 0
    parts = zip(itertools.chain(*before.types), itertools.chain(*now.types), strict=True)
    changed = sum(old != new for old, new in parts)
    return False, changed + len(_static_changes(before.statics, now.statics, str))


def why_new(before: Key | None, now: Key, paths: Sequence[str], name: Callable[[int], str]) -> str:
    """Why a call has a new signature, in words."""
    if before is None:
        return "new"
    if before.tree != now.tree:
        nests = f"{_short(now.tree)}, not as {_short(before.tree)}"
        return f"re-signed: the arguments nest as {nests}"
    changes = [
        _change(path, old, kind)
        for path, old, kind in zip(paths, before.types, now.types, strict=True)
        if old != kind
    ]
    changes += _static_changes(before.statics, now.statics, name)
    if not changes:
        return "re-signed: the configuration of JAX changed"
    more = f", and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return f"re-signed: {', '.join(changes[:_SHOWN])}{more}"


def _short(tree: PyTreeDef) -> str:
    text = str(tree).removeprefix("PyTreeDef(").removesuffix(")")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _change(path: str, old: LeafType, now: LeafType) -> str:
    """What changed of the type of one argument: the first of rank, dtype, sharding, weak type."""
    if old.rank != now.rank:
        return f"{path} has {now.rank} {'axis' if now.rank == 1 else 'axes'}, not {old.rank}"
    if old.dtype != now.dtype:
        return f"{path} is {_type(now)}, not {_type(old)}"
    if (old.sharding, old.partitions) != (now.sharding, now.partitions):
        return f"{path} is {_sharded(now)}, not {_sharded(old)}"
    return f"{path} is {'weakly' if now.weak_type else 'no longer weakly'} typed"


def _sharded(kind: LeafType) -> str:
    if kind.sharding is not None:
        return f"sharded {kind.sharding.spec}"
    return "not sharded" if kind.partitions is None else f"cut into {kind.partitions} parts"


def _type(kind: LeafType) -> str:
    return "a size" if kind.dtype is None else str(kind.dtype)


def _named(statics: Statics, name: Callable[[int], str]) -> dict[str, Any]:
    positional = {name(i): value for i, value in statics.positional.items()}
    return {**positional, **statics.keyword}


def _static_changes(before: Statics, now: Statics, name: Callable[[int], str]) -> list[str]:
    old, new = _named(before, name), _named(now, name)
    return [
        f"static {k} is {_shown(new, k)}, not {_shown(old, k)}"
        for k in {**old, **new}
        if k not in old or k not in new or type(old[k]) is not type(new[k]) or old[k] != new[k]
    ]


def _shown(values: dict[str, Any], key: str) -> str:
    return reprlib.repr(values[key]) if key in values else "left out"
