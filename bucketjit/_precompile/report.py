"""What a warm-up did: how many executables it compiled, found and failed to compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bucketjit._compile.requests import CompileRequest
from bucketjit._errors import (
    in_one_line,
)
from bucketjit._events import printable, shown
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.statistics import FrozenDict


@dataclasses.dataclass(frozen=True)
class WarmupReport:
    """What a warm-up has done; ``print`` it.

    Attributes:
        compiled: The buckets that it compiled, or read from files: `loaded` of them. Where calls
            run exact, the sizes of their exact shapes.
        present: Those that were compiled already.
        failed: Those that could not be compiled, or sizes that no bucket was found for, and why.
        exact: Sizes that no bucket serves, since the call cannot be masked, and why. Their exact
            shapes are compiled like the buckets of others.
        left: Buckets that there was no time for, or sizes whose bucket there was no time to look
            up; another warm-up goes on with them.
        seconds: What it took.
        evicted: Those of the compiled ones, and of those that were present, that are gone: others
            have driven them out, since the cache does not hold all of them, or it was cleared.
        stale: What is another now than when the manifest was made, in words. What it names was
            compiled all the same, as the function and the versions are now.
        loaded: How many of the compiled ones were read from files.
        left_out: What the manifest could not name, and why: calls compile it as they come.
        cleared: Whether the cache was cleared meanwhile, after which nothing more is begun.
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
    """What a warm-up has compiled or found.

    Attributes:
        report: Of the warm-up, without what has become of it since.
        orders: Those of which the executables are to be in the cache now.
    """

    report: WarmupReport
    requests: tuple[CompileRequest, ...] = ()


def none_begun(sizes: Sequence[Mapping[str, int]]) -> Warmed:
    """A warm-up of calls that was not begun."""
    left = tuple(FrozenDict(chosen) for chosen in sizes or [{}])
    return Warmed(WarmupReport((), (), (), (), left, 0.0))


def none_warmed(sizes: Sequence[Mapping[str, int]], error: Exception) -> Warmed:
    """A warm-up of calls that failed as a whole."""
    failed = [(FrozenDict(chosen), in_one_line(error)) for chosen in sizes or [{}]]
    return Warmed(WarmupReport((), (), tuple(failed), (), (), 0.0))


def report_of(
    warmed: Sequence[Warmed],
    engine: Engine,
    epoch: object,
    stale: Iterable[str] = (),
    left_out: tuple[str, ...] = (),
) -> WarmupReport:
    """One report of several warm-ups, and of what is left of them in the cache.

    Args:
        warmed: The warm-ups.
        engine: Has the cache.
        epoch: When they began.
        stale: See `WarmupReport`.
        left_out: Likewise.
    """
    reports = [one.report for one in warmed]
    requests = {o.key: o for one in warmed for o in one.requests}
    # Before it is asked whether the cache was cleared: else a clear could pass for a full cache.
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
