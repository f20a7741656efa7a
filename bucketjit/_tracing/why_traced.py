"""Say in words why each program of a function was traced, for log lines and events.

A call may have a new signature (another dtype, rank, or static value), or need one more program of
a signature that is known.
"""

from __future__ import annotations

import itertools
import reprlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.tree_util import PyTreeDef

from bucketjit._ir.dynamic_axes import STATIC, Tokens
from bucketjit._ir.interface import Interface
from bucketjit._tracing.axis_guesses import Shapes
from bucketjit._tracing.leaf_types import LeafType
from bucketjit._tracing.mismatches import placed
from bucketjit._tracing.parameters import Statics
from bucketjit._tracing.resolution import Resolution
from bucketjit._tracing.traced_programs import TracedPrograms

_SHOWN = 8  # arguments, or reasons, in one line of a log
_CHANGES = 3  # changes in one line
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
        return f"traced anew: the arguments nest as {nests}"
    changes = [
        _change(path, old, kind)
        for path, old, kind in zip(paths, before.types, now.types, strict=True)
        if old != kind
    ]
    changes += _static_changes(before.statics, now.statics, name)
    if not changes:
        return "traced anew: the configuration of JAX changed"
    more = f", and {len(changes) - _CHANGES} more" if len(changes) > _CHANGES else ""
    return f"traced anew: {', '.join(changes[:_CHANGES])}{more}"


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
        whole = "not sharded"
        return f"{path} is {placed(now) or whole}, not {placed(old) or whole}"
    return f"{path} is {'weakly' if now.weak_type else 'no longer weakly'} typed"


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


class News:
    """Collects a line for each program of a signature, until somebody takes them.

    Attributes:
        reasons: Why the next program is traced, as far as known before the trace.
    """

    def __init__(self, why: str, traced: TracedPrograms) -> None:
        self.reasons = [why]
        self._traced = traced
        self._lines: list[str] = []
        self._served: weakref.WeakKeyDictionary[Interface, tuple[Tokens, Shapes]]
        self._served = weakref.WeakKeyDictionary()

    def copy(self) -> News:
        """A copy, to restore the state from."""
        other = News("", self._traced)
        other.reasons, other._lines = list(self.reasons), list(self._lines)
        other._served.update(self._served)
        return other

    def take(self) -> list[str]:
        """Return the lines since the last call of this method, and forget them."""
        if not self._lines:
            return []
        lines, self._lines = self._lines, []
        return lines

    def has_news_of(self, call: Resolution) -> bool:
        """Whether `note` has something to say about a call."""
        return bool(self.reasons) or (call.program is not None and call.program not in self._served)

    def note(self, call: Resolution, shapes: Shapes) -> None:
        """Add a line about a program that serves for the first time, and why it was traced."""
        program = call.program
        reasons, self.reasons = self.reasons, []
        if program is None:
            self._lines.append(f"{'; '.join(reasons[:_SHOWN])}; runs exact")
            return
        if not reasons:
            reasons = [self._why_again(call, shapes)]
        # Weak keys: the note of a program goes with it.
        served = self._served.setdefault(program, (call.tokens, tuple(shapes)))
        inputs = inputs_of(self._traced, *self._traced.static_key(*served))
        more = f" and {len(inputs) - _SHOWN} more" if len(inputs) > _SHOWN else ""
        shown = ", ".join(inputs[:_SHOWN])
        how = f"traced as {shown}{more}"
        if program.pairing is not None and program.pairing.why:
            how += f", once at each size: {program.pairing.why}"
        self._lines.append(f"{'; '.join(reasons[:_SHOWN])}; {how}")

    def _why_again(self, call: Resolution, shapes: Shapes) -> str:
        """Why none of the existing programs serves a call."""
        key = self._traced.static_key(call.tokens, shapes)
        alike = [p for p, served in self._served.items() if self._traced.static_key(*served) == key]
        if alike:
            sizes = ", ".join(f"{v} = {n}" for v, n in call.sizes.items())
            broken = {str(g): None for p in alike for g in p.guards if not g.holds(call.sizes)}
            return (
                f"traced anew: {sizes} breaks the guard {' and '.join(broken) or 'of the traces'}"
            )
        if self._traced.at(call.tokens, shapes).is_traced_again:
            return "traced before, but dropped with the last of its executables"
        if not self._served:
            return "new"
        _, before = list(self._served.values())[-1]
        changed = [
            f"axis {axis} of {path} is {now}, not {old}"
            for path, row, olds, news in zip(
                self._traced.paths, call.tokens, before, shapes, strict=True
            )
            for axis, (token, old, now) in enumerate(zip(row, olds, news, strict=True))
            if (token == STATIC or token.isdigit()) and old != now
        ]
        return f"traced anew: {', '.join(changed) or 'other axes are open'}"


def inputs_of(traced: TracedPrograms, tokens: Tokens, static: Sequence[int]) -> tuple[str, ...]:
    """The arguments with open axes, as people write them: ``x: float32[b, s, 64]``."""
    rest, found = iter(static), []
    for path, row, kind in zip(traced.paths, tokens, traced.types, strict=True):
        dims = ", ".join([str(next(rest)) if token == STATIC else token for token in row])
        if all(token == STATIC or token.isdigit() for token in row):
            continue
        found.append(
            f"{path}: size {dims}" if kind.dtype is None else f"{path}: {kind.dtype}[{dims}]"
        )
    return tuple(found)
