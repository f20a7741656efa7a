"""Reports what a warm-up did: which executables it compiled, found and failed to compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bucketjit._compile.requests import CompileRequest
from bucketjit._events import printable, shown
from bucketjit._raised import in_one_line
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.statistics import FrozenDict


@dataclasses.dataclass(frozen=True)
class WarmupReport:
    """What a warm-up has done; ``print`` it.

    Attributes:
        compiled: The buckets that were compiled, or read from files: `loaded` of them. For calls
            that run exact, the sizes of their exact shapes.
        present: The buckets that were in the cache already.
        failed: Buckets that could not be compiled, or sizes that no bucket was found for, and why.
        exact: Sizes that no bucket serves because the call cannot be masked, and why. Their exact
            shapes are compiled like buckets.
        left: Buckets that there was no time for, or sizes whose bucket there was no time to look
            up; another warm-up continues with them.
        seconds: How long the warm-up took.
        evicted: Buckets of ``compiled`` and ``present`` that are no longer in the cache: it is too
            small for all of them, or it was cleared.
        stale: What has changed since the manifest was made, in words. The signatures of the
            manifest are compiled nevertheless, with the present function and versions.
        loaded: Number of the ``compiled`` buckets that were read from files.
        left_out: What the manifest could not write down, and why; calls compile it when they come.
        cleared: Whether the cache was cleared meanwhile; then nothing more is compiled.
    """

    compiled: tuple[Mapping[str, int], ...]
    present: tuple[Mapping[str, int], ...]
    failed: tuple[tuple[Mapping[str, int], str], ...]
    exact: tuple[tuple[Mapping[str, int], str], ...]
    left: tuple[Mapping[str, int], ...]
    seconds: float
    evicted: tuple[Mapping[str, int], ...] = ()
    stale: tuple[str, ...] = ()
    loaded: int = 0
    left_out: tuple[str, ...] = ()
    cleared: bool = False

    def __str__(self) -> str:
        loaded = f" ({self.loaded} of them from files)" if self.loaded else ""
        head = (
            f"{len(self.compiled)} compiled{loaded}, {len(self.present)} present, "
            f"{len(self.failed)} failed, {len(self.exact)} exact, {len(self.left)} left, "
            f"in {self.seconds:.2f} s"
            f"{'; the cache was cleared meanwhile' if self.cleared else ''}"
        )
        lines = [f"  failed {shown(sizes) or 'exact'}: {why}" for sizes, why in self.failed]
        lines += [f"  exact {shown(sizes) or 'exact'}: {why}" for sizes, why in self.exact]
        gone = "the cache was cleared" if self.cleared else "the cache is full"
        lines += [f"  evicted {shown(b) or 'exact'}: {gone}" for b in self.evicted]
        lines += [f"  stale: {why}" for why in self.stale]
        lines += [f"  not in the manifest: {why}" for why in self.left_out]
        return printable("\n".join([head, *lines]))


class Warmed(NamedTuple):
    """The outcome of the warm-up of one signature.

    Attributes:
        report: The report, without ``evicted``, ``stale``, ``left_out`` and ``cleared``.
        requests: The requests whose executables were compiled or found.
    """

    report: WarmupReport
    requests: tuple[CompileRequest, ...] = ()


def none_begun(sizes: Sequence[Mapping[str, int]]) -> Warmed:
    """The outcome of a warm-up that was not begun: all sizes are left."""
    left = tuple(FrozenDict(chosen) for chosen in sizes or [{}])
    return Warmed(WarmupReport((), (), (), (), left, 0.0))


def none_warmed(sizes: Sequence[Mapping[str, int]], error: Exception) -> Warmed:
    """The outcome of a warm-up that failed before anything was compiled: all sizes failed."""
    failed = [(FrozenDict(chosen), in_one_line(error)) for chosen in sizes or [{}]]
    return Warmed(WarmupReport((), (), tuple(failed), (), (), 0.0))


def report_of(
    warmed: Sequence[Warmed],
    engine: Engine,
    epoch: object,
    stale: Iterable[str] = (),
    left_out: tuple[str, ...] = (),
) -> WarmupReport:
    """One report of several warm-ups, and of what has left the cache since."""
    reports = [one.report for one in warmed]
    requests = {o.key: o for one in warmed for o in one.requests}
    # Read before the epoch: a clear between the two would otherwise be reported as a full cache.
    evicted = tuple(FrozenDict(o.sizes) for key, o in requests.items() if key not in engine.cache)
    return WarmupReport(
        compiled=tuple(b for r in reports for b in r.compiled),
        present=tuple(b for r in reports for b in r.present),
        failed=tuple(b for r in reports for b in r.failed),
        exact=tuple(b for r in reports for b in r.exact),
        left=tuple(b for r in reports for b in r.left),
        seconds=sum((r.seconds for r in reports), 0.0),
        evicted=evicted,
        stale=tuple(dict.fromkeys(stale)),
        loaded=sum(r.loaded for r in reports),
        left_out=left_out,
        cleared=engine.provider.epoch is not epoch,
    )
