"""Warns, once, of a function that compiles again and again.

Only calls that compile are noted here, so that other calls cost nothing.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from bucketjit._compile.cache import CacheInfo
from bucketjit._compile.executable import Executable
from bucketjit._config import Config
from bucketjit._events import Event, counted, emit, warn
from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._runtime.engine_parts import SharedState, alive
from bucketjit._tracing.call import Call
from bucketjit.errors import RecompileWarning
from bucketjit.strategies import Auto, Exact
from bucketjit.strategies.base import checked_bucket

_SIZES_WITHOUT_A_WORD = 2  # without any strategy, or along a static axis; the next is warned of
_ABOVE_BUCKETS = 18  # executables beyond the number of buckets that are not warned of
_FIRST_CALLS = 32  # whose seconds of compiling are not counted: first calls compile
_LONG, _SEVERAL = 5.0, 3  # seconds of compiling that are warned of, and in how many executables
_LONGEST_VALUE = 24  # characters of a static value
_KEPT, _TOLD, _THINGS_TOLD = 256, 6, 4  # values kept and told of what varied, and things told

_NO_STRATEGY = (
    "Without a strategy every size has an executable of its own. Add one: f = f.with_pow2() (it "
    "returns a new function), or f.with_exact() if one compile per size is what you want."
)
_CURE = (
    "explain(...) tells what a call does and why. Open axes that vary (dynamic_axes), make an "
    "array of a list of numbers (np.asarray), pass static values that vary as arrays, choose fewer "
    "buckets, or raise warn_after."
)


class Recompiles:
    """What the calls of one engine have compiled."""

    def __init__(
        self, config: Config, name: str, name_of: Callable[[int], str], shared: SharedState
    ) -> None:
        self._config, self._name, self._name_of, self._shared = config, name, name_of, shared
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Start counting again; a warning that was given may be given again."""
        with self._lock:
            self._again, self._is_told = 0, False
            self._first: CacheInfo | None = None  # after the first calls
            self._later, self._since = list[float](), 0.0  # seconds of each compile after these
            self._bytes: dict[int, int] = {}  # of executables, those that were evicted included
            self._buckets: set[Any] = set()
            self._sizes: Counter[int] = Counter()  # executables of each signature
            self._static: dict[Any, set[int]] = defaultdict(set)  # sizes of axes not declared so
            # The values of each thing and their texts, at most `_KEPT`; by name and what they are.
            self._seen: dict[tuple[str, str], dict[Any, str]] = defaultdict(dict)

    def note(self, call: Call, entry: Executable, is_fallback: bool = False) -> None:
        """Note a call that has compiled an executable; warn, once, if there are too many.

        A fallback, which runs unpadded for a reason, has a warning of its own.
        """
        with self._lock:
            for name, what, value, text in self._things(call):
                if len(values := self._seen[name, what]) < _KEPT:
                    values[value] = text
            self._add(call, entry, is_fallback)
            if self._is_told or self._config.warn_after == 0 or not (why := self._why()):
                return
            self._is_told = True
        emit(Event("recompile", self._name, call.sizes, detail=why), self._config.listeners)
        warn(f"{self._name} {why}", RecompileWarning)

    def _add(self, call: Call, entry: Executable, is_fallback: bool) -> None:
        self._buckets.add(tuple(self._bucket(*size) for size in call.sizes.items()))
        padded, signature = dict(entry.pads), call.signature
        rest = (shape for i, shape in enumerate(call.shapes) if i not in padded)
        key = hash((signature, entry.exact, entry.rows is None, *entry.sizes.values(), *rest))
        self._again += (is_again := key in self._bytes)
        self._sizes[hash(signature)] += not is_again
        self._bytes[key] = 0 if self._config.max_bytes is None else entry.nbytes
        for leaf, row in () if is_fallback else enumerate(signature.tokens or ()):
            if self._config.dynamic_axes is None or signature.specs[leaf] is None:
                for axis, size in enumerate(call.shapes[leaf]):
                    if row[axis] == STATIC:
                        self._static[leaf, axis].add(size)
        if self._first is not None:
            self._later.append(entry.compile_seconds)
        elif sum((info := self._shared.cache.info())[:2]) >= _FIRST_CALLS:
            self._first, self._since = info, monotonic()

    def _bucket(self, variable: str, n: int) -> int | None:
        """The bucket of a size; None where each size is compiled, and the user did not say so."""
        default, strategy = self._config.default, self._config.strategy_of(variable)
        if strategy is default and isinstance(strategy, Exact):
            return None
        try:
            return checked_bucket(strategy, variable, n)
        except Exception:  # beyond the largest one; what is wrong the call has raised
            return None

    def _things(self, call: Call) -> Iterator[tuple[str, str, object, str]]:
        """What may vary: its name, what its values are, the value of a call, and that as text."""
        signature, statics, name_of = call.signature, call.statics, self._name_of
        by_name = {name_of(i): value for i, value in statics.positional.items()} | statics.keyword
        for name, value in by_name.items():
            text = _short(value)
            yield f"the static argument {name} had", "values", text, text
        positional, named = call.tree.children()
        names, types = [*map(name_of, call.dynamic), *named.node_data()[1]], iter(signature.types)
        for name, tree in zip(names, (*positional.children(), *named.children()), strict=True):
            kind = (tree, *itertools.islice(types, tree.num_leaves))
            yield f"{name} had", "structures or types, with static values in it", kind, ""
        for leaf, shape in enumerate(call.shapes):
            for axis, size in enumerate(shape):
                is_size = signature.types[leaf].dtype is None
                name = ("" if is_size else f"axis {axis} of ") + signature.paths[leaf]
                is_static = signature.tokens and signature.tokens[leaf][axis] == STATIC
                yield f"{name} varied{' (static)' * bool(is_static)},", "sizes", size, str(size)

    def _why(self) -> str | None:
        config, after = self._config, self._config.warn_after
        if after is None and config.has_no_strategy:
            if max(self._sizes.values()) <= _SIZES_WITHOUT_A_WORD:
                return None
            return f"compiles for each size: {self._varied()}. {_NO_STRATEGY}"
        if after is None and config.always_exact:  # as the user chose
            return None
        static = max(map(len, self._static.values()), default=0)
        if after is None and static > _SIZES_WITHOUT_A_WORD:
            return f"compiles for each size of a static axis: {self._varied()}. {_CURE}"
        learnt = (s.buckets for s in (config.default, *config.per_dim.values()) if type(s) is Auto)
        most = _ABOVE_BUCKETS + max(len(self._buckets), *learnt, 0) if after is None else after
        count, again = self._sizes.total() + self._again, self._shared.cache.evictions
        compiled, again = f"has compiled {counted(count, 'executable')}", min(again, self._again)
        is_often = again > (_ABOVE_BUCKETS if after is None else after)
        if is_often or count > max(most, 2 * (count - again)):
            every = [list(e.recompiles._bytes.values()) for e in alive(self._shared.engines)]
            needs = {"maxsize": sum(map(len, every)), "max_bytes": sum(map(sum, every))}
            bounds = [(n, b, m) for n, m in needs.items() if (b := getattr(config, n))]
            bounds = [bound for bound in bounds if bound[1] < bound[2]] or bounds
            cures = [f"{n}={b:,} would have to be {max(b + 1, m):,} or more" for n, b, m in bounds]
            why = f"{again} of them again, as the cache had evicted them: {' and '.join(cures)}"
            return f"{compiled}, {why}. Or choose fewer buckets."
        spent, late = monotonic() - self._since, sum(self._later)
        is_slow = len(self._later) >= _SEVERAL and late >= max(_LONG, spent / 2)
        if is_slow and self._first is not None:
            first = self._first.hits + self._first.misses
            compiled += f"; that took {late:.1f} of the {spent:.1f} seconds since call {first}"
        return f"{compiled}: {self._varied()}. {_CURE}" if is_slow or count > most else None

    def _varied(self) -> str:
        texts_of = [
            f"{name} {len(seen)} {what}"
            + (f": {', '.join(texts[:_TOLD])}" if texts else "")
            + (", ..." if len(texts) > _TOLD else "")
            for (name, what), seen in sorted(self._seen.items(), key=lambda item: -len(item[1]))
            if len(seen) > 1
            for texts in [[text for text in seen.values() if text]]
        ]
        if not texts_of:
            return "neither shapes nor types of arguments varied"
        more = len(texts_of) - _THINGS_TOLD
        return "; ".join(texts_of[:_THINGS_TOLD]) + (f"; and {more} more" if more > 0 else "")


def _short(value: object) -> str:
    """A static value in few characters; values themselves are not kept alive."""
    text = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
