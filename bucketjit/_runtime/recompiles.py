"""Warns of a function that compiles again and again: for each size, or beyond its buckets.

Only calls that compile are noted here, so that other calls cost nothing.
"""

from __future__ import annotations

import itertools
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from bucketjit._config import Config
from bucketjit._events import LONGEST, Event, emit, printable
from bucketjit._raised import frames_inside
from bucketjit._signature.signature import Signature
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import STATIC
from bucketjit.errors import BucketOverflowError, RecompileWarning
from bucketjit.strategies import Exact
from bucketjit.strategies.base import Strategy

# Without any strategy, or along a static axis; the next size is warned of.
_SIZES_WITHOUT_A_WORD = 2
_ABOVE_BUCKETS = 16  # executables beyond the number of buckets that are not warned of
_LONGEST_VALUE = 24  # characters of a static value
_MOST_COUNTED = 1024  # buckets of a variable that are counted
_SIZES_KEPT, _SIZES_TOLD, _AXES_TOLD = 256, 6, 3

_ADD_A_STRATEGY = (
    "Without a strategy every size has an executable of its own. Add one: "
    "f = f.with_pow2() (it returns a new function and leaves f as it is), or f.with_exact() if one "
    "compile per size is what you want."
)


_MAKE_AN_ARRAY = (
    "As under jax.jit, a list is a tree of scalars; where an array is meant, pass "
    "np.asarray({path})."
)
_EMPTY = (
    " Calls in which {path} has size 0 have no bucket, so each of their sizes compiles: add a row "
    "that does not count, or handle them before the call."
)
_IN_A_LIST = re.compile(r"(.+?)(\[\d+\])+")

_OPEN_IT = (
    "Open what varies: give it an entry in dynamic_axes, such as 'b, s'. explain(...) tells what a "
    "call does and why."
)


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
            self._static = 0  # the most sizes of an axis that nobody has declared static
            self._lists: dict[str, dict[int, None]] = {}  # how many numbers a list had
            self._statics: dict[str, dict[str, None]] = {}  # values of each static argument
            self._kinds: dict[str, set[Any]] = {}  # structure and types of each argument
            self._empty: dict[str, set[Any]] = {}  # shapes of calls with an axis of size 0
            self._largest: dict[str, int] = {}
            self._axes: dict[tuple[str, bool], dict[int, None]] = {}  # sizes seen, of each axis
            self._shapes: weakref.WeakKeyDictionary[Signature, set[Any]]
            self._shapes = weakref.WeakKeyDictionary()

    def note(self, signed: SignedCall, sizes: Mapping[str, int], is_fallback: bool = False) -> None:
        """Note a call that has compiled an executable, and warn if there are too many.

        Warns:
            RecompileWarning: Once, see the class.
        """
        with self._lock:
            self._add(signed, sizes, is_fallback)
            why = None if self._is_told else self._why()
            if why is None:
                return
            self._is_told = True
        emit(Event("recompile", self._name, sizes, detail=why), self._config.listeners)
        message = printable(f"{self._name} {why}", LONGEST)
        warnings.warn(message, RecompileWarning, stacklevel=frames_inside())

    def _add(self, signed: SignedCall, sizes: Mapping[str, int], is_fallback: bool) -> None:
        self._count += 1
        signature = signed.signature
        if signature not in self._shapes and not is_fallback:
            self._add_lists(signed)
        self._shapes.setdefault(signature, set()).add(tuple(signed.shapes))
        for variable, size in sizes.items():
            self._largest[variable] = max(size, self._largest.get(variable, 0))
        given = signed.statics
        by_name = {**{self._name_of(i): v for i, v in given.positional.items()}, **given.keyword}
        for name, value in by_name.items():
            values = self._statics.setdefault(name, {})
            if len(values) < _SIZES_KEPT:
                values[_short(value)] = None
        self._add_kinds(signed)
        tokens = signature.tokens
        for leaf, shape in enumerate(signed.shapes):
            for axis, size in enumerate(shape):
                is_size = signature.types[leaf].dtype is None
                place = "" if is_size else f"axis {axis} of "
                if size == 0 and not any(sizes.values()):  # it has run exact
                    shapes = self._empty.setdefault(place + signature.paths[leaf], set())
                    shapes.add(tuple(signed.shapes))
                is_static = tokens is not None and tokens[leaf][axis] == STATIC
                seen = self._axes.setdefault((place + signature.paths[leaf], is_static), {})
                if len(seen) < _SIZES_KEPT:
                    seen[size] = None
                is_chosen = self._config.dynamic_axes is not None and (
                    signature.specs[leaf] is not None
                )
                if is_static and not is_chosen and not is_fallback:
                    self._static = max(self._static, len(seen))

    def _add_kinds(self, signed: SignedCall) -> None:
        """Note the types and the structure of each argument, with the static values in it."""
        positional, named = signed.tree.children()
        names = [*map(self._name_of, signed.dynamic), *named.node_data()[1]]
        types = iter(signed.signature.types)
        for name, tree in zip(names, (*positional.children(), *named.children()), strict=True):
            kind = tree, *itertools.islice(types, tree.num_leaves)
            kinds = self._kinds.setdefault(name, set())
            if len(kinds) < _SIZES_KEPT:
                kinds.add(kind)

    def _add_lists(self, signed: SignedCall) -> None:
        """Note how many numbers each list has: another number is another tree of arguments."""
        signature = signed.signature
        numbers = Counter(
            found[1]
            for path, shape, type_ in zip(
                signature.paths, signed.shapes, signature.types, strict=True
            )
            if not shape
            and type_.dtype is not None
            and (found := _IN_A_LIST.fullmatch(path)) is not None
        )
        for path, count in numbers.items():
            seen = self._lists.setdefault(path, {})
            if len(seen) < _SIZES_KEPT:
                seen[count] = None

    def _why(self) -> str | None:
        """What there is to warn of, or None."""
        after = self._config.warn_after
        if after == 0:
            return None
        if after is None and self._config.has_no_strategy:
            most = max(map(len, self._shapes.values()))
            if most <= _SIZES_WITHOUT_A_WORD:
                return None
            return f"compiles for each size: {self._varied()}. {_ADD_A_STRATEGY}"
        if after is None:
            if self._config.always_exact:  # as the user chose
                return None
            if self._static > _SIZES_WITHOUT_A_WORD:
                return f"compiles for each size of a static axis: {self._varied()}. {_OPEN_IT}"
            for path, seen in self._lists.items():
                if len(seen) > _SIZES_WITHOUT_A_WORD:
                    return (
                        f"compiles for each length of a list: {path} had "
                        f"{_told(seen)}. {_MAKE_AN_ARRAY.format(path=path)}"
                    )
            for path, shapes in self._empty.items():
                if len(shapes) > _SIZES_WITHOUT_A_WORD:
                    return (
                        f"compiles for each size where {path} has size 0.{_EMPTY.format(path=path)}"
                    )
            after = _ABOVE_BUCKETS + self._buckets()
        if self._count <= after:
            return None
        empty = "".join(_EMPTY.format(path=path) for path in list(self._empty)[:1])
        return (
            f"has compiled {self._count} executables: {self._varied()}. explain(...) tells what a "
            "call does and why; open axes that vary (dynamic_axes), pass static values that vary "
            f"as arrays, choose fewer buckets, or raise warn_after.{empty}"
        )

    def _buckets(self) -> int:
        """How many buckets there are for sizes up to those seen so far."""
        plan, count = self._config.plan, 1
        planned = self._config.planned
        if plan is not None:
            count = max(1, len(getattr(plan, "buckets", ())))
        for variable, largest in self._largest.items():
            if variable not in planned:
                count *= self._buckets_of(self._config.strategy_of(variable), largest)
        return count

    def _buckets_of(self, strategy: Strategy, largest: int) -> int:
        if isinstance(strategy, Exact) and strategy is self._config.default:
            return 1  # not chosen for this variable
        count, size = 0, 0
        try:
            while size < largest and count < _MOST_COUNTED:
                size = strategy.bucket(size + 1)
                count += 1
        except BucketOverflowError:
            pass
        return max(1, count)

    def _varied(self) -> str:
        """What varied: axes with their sizes, those with most sizes first, and static values."""
        varied = [(len(s), name, is_static, s) for (name, is_static), s in self._axes.items()]
        varied = sorted((v for v in varied if v[0] > 1), key=lambda v: -v[0])
        statics = [
            f"the static argument {name} had {_told(values, 'values')}"
            for name, values in self._statics.items()
            if len(values) > 1
        ]
        if not varied and not statics:
            kinds = [f"{name} ({len(k)})" for name, k in self._kinds.items() if len(k) > 1]
            return (
                "no axis varied, but the types, the structure or static values in "
                f"{', '.join(kinds) or 'the arguments'}"
            )
        told = [
            f"{name} varied{' (static)' if is_static else ''}, {_told(sizes)}"
            for _, name, is_static, sizes in varied[:_AXES_TOLD]
        ]
        more = len(varied) - len(told)
        return "; ".join(told + statics) + (f"; and {more} more axes" if more > 0 else "")


def _told(found: Mapping[Any, None], what: str = "sizes") -> str:
    shown = ", ".join(map(str, list(found)[:_SIZES_TOLD]))
    return f"{len(found)} {what}: {shown}" + (", ..." if len(found) > _SIZES_TOLD else "")


def _short(value: object) -> str:
    """A static value in few characters; values themselves are not kept alive."""
    text = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
