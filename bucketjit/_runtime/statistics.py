"""Frozen snapshots of the counters of a bucketed function: `Stats`, and what it is made of.

`bucketjit._runtime.counters` counts and makes the snapshots. What takes time is computed when it is
asked for, and tells of the `Moment` of the snapshot.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from bucketjit._events import LONGEST_LABEL, counted, one_line

SHAPES_KEPT = 2**14  # different shapes of calls that are counted


def summary_of(stats: Mapping[str, Any]) -> str | None:
    """What bucketing has saved, in one line."""
    try:
        calls, shapes, compiles = stats["calls"], stats["shapes"], stats["compiles"]
        seconds, waste, fallbacks = (
            stats[name] for name in ("compile_seconds", "padding_waste", "fallback_calls")
        )
        # The first includes those that were evicted, the second those from before a reset.
        executables = max(compiles + stats["loads"], len(stats["buckets"]))
    except KeyError:
        return None
    built = counted(executables, "executable")
    if not calls:
        return f"no calls yet{f', {built} ready' if executables else ''}"
    least = "at least " if shapes >= SHAPES_KEPT else ""
    # Calls that run one operation at a time have no shape to compile for.
    called = f"{least}{counted(shapes, 'shape')}" if shapes else counted(calls, "call")
    saved = shapes - executables
    if saved > 0:
        about = f", about {_shown(saved * _usual(stats))}," if compiles and seconds else ""
        savings = f"{least}{counted(saved, 'compile')}{about} saved"
    elif fallbacks >= calls:
        savings = "no compile saved, because every call ran at its exact shape"
    else:
        savings = "no compile saved yet"
    parts = [f"{called}, {built}: {savings}"]
    if fallbacks < calls:
        parts.append("padding " + ("under 1 %" if 0 < waste < 0.005 else f"{100 * waste:.0f} %"))
        if fallbacks:
            parts.append(f"{fallbacks:,} of {counted(calls, 'call')} ran at the exact shape")
    return "; ".join(parts)


def _usual(stats: Mapping[str, Any]) -> float:
    """Seconds of a usual compile: those in the background also wait, so the mean may be far off."""
    mean = stats["compile_seconds"] / stats["compiles"]
    if stats["loads"]:
        return mean  # seconds of buckets may be those of reading a file
    buckets = (b if isinstance(b, Mapping) else vars(b) for b in stats["buckets"])
    each = [b["compile_seconds"] for b in buckets if "compile_seconds" in b]
    return min(mean, statistics.median_low(each)) if each else mean


def _shown(seconds: float) -> str:
    """A rough duration as text."""
    if seconds < 0.1:
        return f"{max(1e3 * seconds, 1):.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 2 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


V = TypeVar("V")

K = TypeVar("K")


class FrozenDict(dict[K, V]):
    """A dict that cannot be changed; unlike a mapping proxy it can be hashed and pickled."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a snapshot cannot be changed")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


@dataclass(frozen=True)
class BucketStats:
    """One executable of the cache.

    Attributes:
        sizes: Size of each dimension variable: padded, or logical if ``exact``. If no axis has a
            name, the sizes of some axes of arguments (``x[0]``).
        hits: Calls it has served after the one that compiled it.
        compile_seconds: Seconds for tracing, lowering and compiling it, or for reading it from a
            file.
        exact: True if it runs one exact shape, without masks.
        last_used: When it last served a call, in seconds since 1970 (``time.time()``).
        nbytes: Bytes of memory by XLA's memory analysis: temporaries, results, generated code (not
            on CPU), and the arrays that it closes over.
        flops: Floating point operations of one call; None if XLA does not report them.
        pinned: Whether it is exempt from eviction.
        device: The device of a topology that it was compiled for; ``""`` if it runs here.
        memory: Bytes on a device during a call, by XLA's memory analysis: ``arguments``,
            ``results``, ``temporary`` and ``code``. Empty if XLA tells nothing.
    """

    sizes: Mapping[str, int]
    hits: int
    compile_seconds: float
    exact: bool
    last_used: float = 0.0
    nbytes: int = 0
    flops: float | None = None
    pinned: bool = False
    device: str = ""
    memory: Mapping[str, int] = field(default_factory=FrozenDict[str, int])


@dataclass(frozen=True)
class ComputedSizeStats:
    """A size that a program computes, such as the number of rows that a mask selects.

    Attributes:
        size: The size as an expression, such as ``"size_1 - 1"``.
        bound: The largest value that it can have, such as ``"n"``.
        line: The line of code that computes it; ``""`` if that is not known.
        runs: The number of runs that told its value. It is told where a result or a decision
            depends on it.
        selected: The sum of its values in these runs.
        rows: The sum of its bounds.
        most: Its largest value.
    """

    size: str
    bound: str
    line: str = ""
    runs: int = 0
    selected: int = 0
    rows: int = 0
    most: int = 0


@dataclass(frozen=True)
class ProgramStats:
    """One program: the function traced once, for all sizes that its guards allow.

    Attributes:
        inputs: The arguments with open axes, such as ``"x: float32[b, s, 64]"``.
        guards: What must hold of the sizes of a call, such as ``"b >= 5"``.
        kind: ``"symbolic"``, or ``"paired"`` if it was made from traces at concrete sizes.
        executables: Number of its buckets in the cache.
        refused: Why it cannot be masked, in the words of ``fallback_reasons`` (where it may be
            counted as *other*); None if it can.
        computed: The sizes that it computes.
    """

    inputs: tuple[str, ...]
    guards: tuple[str, ...]
    kind: str
    executables: int
    refused: str | None = None
    computed: tuple[ComputedSizeStats, ...] = ()


@dataclass(frozen=True)
class LearntBucket:
    """A bucket that was learnt; see `bucketjit.strategies.Auto`.

    Attributes:
        sizes: Padded size of each dimension variable.
        why: Why it was compiled.
        compile_seconds: Seconds that compiling it took.
        calls: Calls of sizes for which it is the best bucket, by all that there are now.
        saved_seconds: Seconds of running that it saves these calls beside the next larger bucket;
            None if there is none for some of them.
    """

    sizes: Mapping[str, int]
    why: str
    compile_seconds: float
    calls: int
    saved_seconds: float | None


@dataclass(frozen=True)
class Stats:
    """A snapshot of a bucketed function's counters.

    Attributes:
        calls: Calls so far, without those inlined into another transformation.
        hits: Calls that found their executable in the cache.
        misses: Executables that were not in the cache, and were compiled or read from a file: for
            a call, for a warm-up, or in the background.
        compiles: Executables compiled.
        compile_seconds: Seconds spent on compiling.
        evictions: Executables dropped to make room.
        fallback_calls: Calls that ran at their exact shape because they cannot be masked, or are
            beyond the largest bucket (``Overflow.EXACT``), or as ``BUCKETJIT_DISABLE`` made the
            bucketed function plain ``jit``, whose compiles are not counted.
        fallback_reasons: Number of fallback calls by reason; the counts add up to
            ``fallback_calls``. A reason is printable text of at most 500 characters. Calls with
            other reasons than the first 64 are counted as ``"other"``.
        padding_waste: Share of padding in the elements of padded arguments, 0 to 1.
        buckets: The executables in the cache, in the order of their compiles.
        dimension_waste: Share of padding in the padded sizes of each dimension variable, 0 to 1.
        programs: The programs traced so far, without those dropped with their executables.
        size_counts: Number of calls by logical size, of each dimension variable. Beyond 4096 sizes
            of one variable they are rounded up to a multiple of 2, then of 4 and so on.
        since: When the counters started, in seconds since 1970.
        loads: Executables read from files, see `BucketedExec.with_persistence`.
        load_seconds: Seconds spent on reading them.
        rows: Examples that `BucketedExec.map` has run in batches; a batch is one of ``calls``, and
            ``size_counts`` has the sizes of each example.
        rows_alone: Number of examples that `map` has run one by one, by reason.
        shapes: Different combinations of shapes, types and static arguments that were called, at
            most 16,384. ``jax.jit`` would have compiled once for each.
        learnt: The buckets that were learnt (``buckets="auto"``), by program.
        inlined_calls: Calls inside ``jit``, ``vmap``, ``scan`` and the like, where the function
            itself runs, once for each trace. They are not among ``calls``.
    """

    calls: int
    hits: int
    misses: int
    compiles: int
    compile_seconds: float
    evictions: int
    fallback_calls: int
    fallback_reasons: Mapping[str, int]
    padding_waste: float
    buckets: tuple[BucketStats, ...]
    loads: int = 0
    load_seconds: float = 0.0
    dimension_waste: Mapping[str, float] = field(default_factory=FrozenDict[str, float])
    programs: tuple[ProgramStats, ...] = field(default_factory=tuple)
    size_counts: Mapping[str, Mapping[int, int]] = field(
        default_factory=FrozenDict[str, Mapping[int, int]]
    )
    since: float = 0.0
    rows: int = field(default_factory=int)
    rows_alone: Mapping[str, int] = field(default_factory=FrozenDict[str, int])
    inlined_calls: int = 0
    shapes: int = field(default_factory=int)
    learnt: tuple[LearntBucket, ...] = field(default_factory=tuple)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            fields = vars(self)
            moment = fields.get("_moment")
            if moment is None or name not in self.__dataclass_fields__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            computed = {name: moment.ask(name)} if name in moment.parts else moment.ask("counts")
            fields.update(computed)
            return computed[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def summary(self) -> str:
        """What bucketing has saved so far, in one line.

        It compares the executables with the shapes that were called. The seconds are the compiles
        that were saved times the seconds of a usual one, the median or the mean, whichever is
        less. So they are an estimate.

        Examples:
            >>> import numpy as np
            >>> import bucketjit
            >>> double = bucketjit.jit(lambda x: x * 2, buckets="pow2")
            >>> for n in (5, 6, 7, 8):
            ...     _ = double(np.ones(n, np.float32))
            >>> double.stats().summary
            '4 shapes, 1 executable: 3 compiles, about ..., saved; padding 19 %'
        """
        text = summary_of(self.__getstate__())
        assert text is not None  # it has all the fields
        return text

    def to_json(self, indent: int | None = 2) -> str:
        """The snapshot as JSON, which ``python -m bucketjit report FILE`` shows.

        Args:
            indent: Spaces by which to indent; None for one line.

        Returns:
            A JSON object with the fields of this class. Sizes that are keys become strings.

        Examples:
            >>> import json, numpy as np
            >>> import bucketjit
            >>> double = bucketjit.jit(lambda x: x * 2, buckets="pow2")
            >>> _ = double(np.ones(3, np.float32))
            >>> told = json.loads(double.stats().to_json())
            >>> told["calls"], told["dimension_waste"], told["size_counts"]
            (1, {'batch': 0.25}, {'batch': {'3': 1}})
        """
        return json.dumps(dataclasses.asdict(self), indent=indent, allow_nan=False)


def shown_reason(reason: str) -> str:
    """A reason as it is counted and shown: one printable line of bounded length."""
    return one_line(reason, LONGEST_LABEL)


def share(part: float, whole: float) -> float:
    """A part of a whole, from 0 to 1; 0 where the whole is 0."""
    return part / whole if whole else 0.0


# --- the moments of snapshots ---

MOMENTS = 16  # snapshots that are held and may still be asked; of more, all is computed


class Moment:
    """The moment of a snapshot, and what is computed of it by ``parts``.

    A counter that counts on after the moment is in ``kept`` as it was. All else is computed before
    it changes, if it was not yet.
    """

    def __init__(self, parts: Mapping[str, Callable[[Moment], Any]]) -> None:
        self.parts, self._computed = parts, dict[str, Any]()
        self.kept: dict[Any, Any] = {}

    def told(self, counter: Any) -> Any:
        """What a counter told at the moment."""
        now = counter.told()  # read first: a thread that counts keeps it before
        return self.kept.get(counter, now)

    def ask(self, part: str) -> Any:
        if part not in self._computed:
            self._computed.setdefault(part, self.parts[part](self))  # the first thread's is right
        return self._computed[part]


class History:
    """The moments of snapshots that somebody holds.

    Attributes:
        taken: How many there were. A counter that sees a new number calls `keep` before it counts.
        held: References to them, the oldest first; some may be gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.taken = 0
        self.held: list[weakref.ref[Moment]] = []

    def moments(self) -> list[Moment]:
        return [moment for reference in self.held if (moment := reference()) is not None]

    def add(self, moment: Moment) -> None:
        with self._lock:
            self.held = [*map(weakref.ref, self.moments()), weakref.ref(moment)]
            self.taken += 1

    def keep(self, *counters: Any) -> int:
        """Keep what counters tell before they count on. Returns ``taken``."""
        taken = self.taken
        for moment in self.moments() if self.held else ():
            for counter in counters:
                moment.kept.setdefault(counter, counter.told())
        return taken

    def settle(self, but: str = "") -> None:
        """Compute all parts but one before anything else changes. No lock may be held."""
        moments = self.moments() if self.held else ()
        for moment in moments:
            for part in moment.parts.keys() - {but}:
                moment.ask(part)
        if not but:
            with self._lock:  # threads may have added others
                self.held = [reference for reference in self.held if reference() not in moments]
