"""Reports what a warm-up did: which executables it compiled, found and failed to compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from bucketjit._compile.requests import CompileRequest
from bucketjit._events import printable, shown
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
        loaded: Number of the ``compiled`` buckets that were read from files.
        cleared: Whether the cache was cleared meanwhile; then nothing more is compiled.
    """

    compiled: tuple[Mapping[str, int], ...]
    present: tuple[Mapping[str, int], ...]
    failed: tuple[tuple[Mapping[str, int], str], ...]
    exact: tuple[tuple[Mapping[str, int], str], ...]
    left: tuple[Mapping[str, int], ...]
    seconds: float
    evicted: tuple[Mapping[str, int], ...] = ()
    loaded: int = 0
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
        return printable("\n".join([head, *lines]))


class Warmed(NamedTuple):
    """The outcome of the warm-up of one signature.

    Attributes:
        report: The report, without ``evicted`` and ``cleared``.
        requests: The requests whose executables were compiled or found.
    """

    report: WarmupReport
    requests: tuple[CompileRequest, ...] = ()


def report_of(warmed: Warmed, engine: Engine, epoch: object) -> WarmupReport:
    """The report of a warm-up, with what has left the cache since."""
    requests = {o.key: o for o in warmed.requests}
    # Read before the epoch: a clear between the two would otherwise be reported as a full cache.
    evicted = tuple(FrozenDict(o.sizes) for key, o in requests.items() if key not in engine.cache)
    cleared = engine.provider.epoch is not epoch
    return dataclasses.replace(warmed.report, evicted=evicted, cleared=cleared)
