"""Warns of a function that compiles again and again: for each size, or beyond its buckets.

Only calls that compile are noted here, so that other calls cost nothing.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bucketjit._config import Config
from bucketjit._events import LONGEST, Event, emit, printable
from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._raised import frames_inside
from bucketjit._tracing.call import Call
from bucketjit.errors import BucketOverflowError, RecompileWarning
from bucketjit.strategies import Auto, Exact
from bucketjit.strategies.base import Strategy

if TYPE_CHECKING:
    from bucketjit._tracing.signature import Signature

# Without any strategy, along a static axis, or beside an empty one; the next size is warned of.
_SIZES_WITHOUT_A_WORD = 2
_ABOVE_BUCKETS = 16  # executables beyond the number of buckets that are not warned of
_LONGEST_VALUE = 24  # characters of a static value
_MOST_COUNTED = 1024  # buckets of a variable that are counted
_KEPT, _TOLD, _THINGS_TOLD = 256, 6, 4  # values kept and told of what varied, and things told

_CURES = {
    "size": "Without a strategy every size has an executable of its own. Add one: "
    "f = f.with_pow2() (it returns a new function), or f.with_exact() if one compile per size is "
    "what you want.",
    "static": "Open what varies: give it an entry in dynamic_axes, such as 'b, s'. explain(...) "
    "tells what a call does and why.",
    "empty": "Such calls have no bucket: add a row that does not count, or handle them before the "
    "call.",
    "many": "explain(...) tells what a call does and why. Open axes that vary (dynamic_axes), make "
    "an array of a list of numbers (np.asarray), pass static values that vary as arrays, choose "
    "fewer buckets, or raise warn_after.",
}

# The values seen of one thing and their texts, at most `_KEPT`, in the order in which they came.
Values = dict[Any, str]


class Recompiles:
    """What the calls of one engine have compiled."""

    def __init__(self, config: Config, name: str, name_of: Callable[[int], str]) -> None:
        self._config = config
        self._name = name
        self._name_of = name_of
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Start counting again; a warning that was given may be given again."""
        with self._lock:
            self._count = 0
            self._is_told = False
            self._seen: dict[tuple[str, str], Values] = {}  # by name and what the values are
            self._undeclared: dict[str, Values] = {}  # sizes of axes that nobody declared static
            self._empty: dict[str, Values] = {}  # shapes of calls in which an axis has size 0
            self._largest: dict[str, int] = {}
            self._shapes: weakref.WeakKeyDictionary[Signature, Values]
            self._shapes = weakref.WeakKeyDictionary()

    def note(self, call: Call, is_fallback: bool = False) -> None:
        """Note a call that has compiled an executable, and warn if there are too many.

        Warns:
            RecompileWarning: Once, see the class.
        """
        with self._lock:
            self._add(call, is_fallback)
            why = None if self._is_told else self._why()
            if why is None:
                return
            self._is_told = True
        emit(Event("recompile", self._name, call.sizes, detail=why), self._config.listeners)
        message = printable(f"{self._name} {why}", LONGEST)
        warnings.warn(message, RecompileWarning, stacklevel=frames_inside())

    def _add(self, call: Call, is_fallback: bool) -> None:
        self._count += 1
        signature, shapes = call.signature, tuple(call.shapes)
        _keep(self._shapes.setdefault(signature, {}), shapes)
        for variable, size in call.sizes.items():
            self._largest[variable] = max(size, self._largest.get(variable, 0))
        given = call.statics
        by_name = {**{self._name_of(i): v for i, v in given.positional.items()}, **given.keyword}
        for name, value in by_name.items():
            text = _short(value)
            self._see(f"the static argument {name} had", "values", text, text)
        for name, kind in self._kinds_of(call):
            self._see(f"{name} had", "structures or types, with static values in it", kind)
        tokens, has_run_exact = signature.tokens, not any(call.sizes.values())
        for leaf, axis in ((i, j) for i, shape in enumerate(shapes) for j in range(len(shape))):
            is_size, size = signature.types[leaf].dtype is None, shapes[leaf][axis]
            name = ("" if is_size else f"axis {axis} of ") + signature.paths[leaf]
            if size == 0 and has_run_exact:
                _keep(self._empty.setdefault(name, {}), shapes)
            is_static = tokens is not None and tokens[leaf][axis] == STATIC
            label = f"{name} varied{' (static)' if is_static else ''},"
            seen = self._see(label, "sizes", size, str(size))
            chosen = self._config.dynamic_axes is not None and signature.specs[leaf] is not None
            if is_static and not chosen and not is_fallback:
                self._undeclared[name] = seen

    def _see(self, name: str, what: str, value: object, text: str = "") -> Values:
        return _keep(self._seen.setdefault((name, what), {}), value, text)

    def _kinds_of(self, call: Call) -> Iterable[tuple[str, object]]:
        """The types and the structure of each argument, with the static values in it."""
        positional, named = call.tree.children()
        names = [*map(self._name_of, call.dynamic), *named.node_data()[1]]
        types = iter(call.signature.types)
        for name, tree in zip(names, (*positional.children(), *named.children()), strict=True):
            yield name, (tree, *itertools.islice(types, tree.num_leaves))

    def _why(self) -> str | None:
        """What there is to warn of, and what to do; None if there is nothing."""
        after = self._config.warn_after
        if after == 0:
            return None
        if after is None and self._config.has_no_strategy:
            if _most(self._shapes) <= _SIZES_WITHOUT_A_WORD:
                return None
            return f"compiles for each size: {self._varied()}. {_CURES['size']}"
        if after is None:
            if self._config.always_exact:  # as the user chose
                return None
            if _most(self._undeclared) > _SIZES_WITHOUT_A_WORD:
                what = f"compiles for each size of a static axis: {self._varied()}"
                return f"{what}. {_CURES['static']}"
            for name, shapes in self._empty.items():
                if len(shapes) > _SIZES_WITHOUT_A_WORD:
                    return f"compiles for each size where {name} has size 0. {_CURES['empty']}"
            after = _ABOVE_BUCKETS + self._buckets()
        if self._count <= after:
            return None
        cures = [_CURES["many"], *(f"{n} had size 0. {_CURES['empty']}" for n in self._empty)]
        return f"has compiled {self._count} executables: {self._varied()}. {' '.join(cures[:2])}"

    def _buckets(self) -> int:
        """How many buckets there are for sizes up to those seen so far."""
        config, count = self._config, 1
        learnt = [0]
        if config.plan is not None:
            count = max(1, len(getattr(config.plan, "buckets", ())))
        for variable, largest in self._largest.items():
            strategy = config.strategy_of(variable)
            is_chosen = not (isinstance(strategy, Exact) and strategy is config.default)
            if variable not in config.planned and is_chosen:
                count *= _buckets_of(strategy, largest)
                learnt += [strategy.buckets] if isinstance(strategy, Auto) else []
        return max(count, *learnt)

    def _varied(self) -> str:
        """What varied, that with most values first."""
        found = [(name, what, seen) for (name, what), seen in self._seen.items() if len(seen) > 1]
        found.sort(key=lambda item: -len(item[2]))
        told = [f"{name} {len(seen)} {what}{_texts(seen)}" for name, what, seen in found]
        if not told:
            return "neither shapes nor types of arguments varied"
        more = len(told) - _THINGS_TOLD
        return "; ".join(told[:_THINGS_TOLD]) + (f"; and {more} more" if more > 0 else "")


def _buckets_of(strategy: Strategy, largest: int) -> int:
    """How many buckets a strategy has up to a size."""
    count, size = 0, 0
    try:
        while size < largest and count < _MOST_COUNTED:
            size = strategy.bucket(size + 1)
            count += 1
    except BucketOverflowError:
        pass
    return max(1, count)


def _keep(seen: Values, value: Any, text: str = "") -> Values:
    if len(seen) < _KEPT:
        seen[value] = text
    return seen


def _most(seen: Mapping[Any, Values]) -> int:
    return max(map(len, seen.values()), default=0)


def _texts(seen: Values) -> str:
    shown = [text for text in seen.values() if text]
    if not shown:
        return ""
    return f": {', '.join(shown[:_TOLD])}" + (", ..." if len(seen) > _TOLD else "")


def _short(value: object) -> str:
    """A static value in few characters; values themselves are not kept alive."""
    text = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
