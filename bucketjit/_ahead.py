"""Compile the whole plan when the first call of a signature comes."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Mapping

from bucketjit._config import Config
from bucketjit._engine import Engine
from bucketjit._errors import first_line
from bucketjit._events import Event
from bucketjit._family import Call, Family
from bucketjit._signing import Signed
from bucketjit._warmup import warm_up


class Ahead:
    """Warms an engine up once per signature, for every bucket that its strategies list.

    Args:
        engine: Serves the calls.
        workers: Threads that compile; None for as many as there are cores, up to four.
    """

    def __init__(self, engine: Engine, workers: int | None) -> None:
        self._engine = engine
        self._workers = workers
        self._begun: weakref.WeakSet[Family] = weakref.WeakSet()
        self._lock = threading.Lock()

    def prepare(self, signed: Signed, call: Call) -> None:
        """Compile the buckets for calls like this one, if it is the first.

        Nothing that fails here fails the call: a bucket that could not be compiled is compiled
        again by the call that needs it, which gets the error. Other threads do not wait for the
        plan; a call waits for its own bucket, wherever that is compiled.
        """
        with self._lock:
            if signed.family in self._begun:
                return
            self._begun.add(signed.family)
        engine = self._engine
        listed = listed_buckets(engine.config, call)
        if not listed:
            return
        count, room = math.prod(map(len, listed)), engine.config.maxsize
        if room is not None and count > room:
            self._tell(call.sizes, f"the plan lists {count} buckets and the cache holds {room}")
            return
        sizes = [dict(itertools.chain(*row)) for row in itertools.product(*listed)]
        try:
            report = warm_up(engine, signed, sizes, self._workers, None, False, True)
        except Exception as error:
            self._tell(call.sizes, f"{type(error).__name__}: {first_line(error)}")
        else:
            for failed, why in report.failed:
                self._tell(failed, why)

    def _tell(self, sizes: Mapping[str, int], why: str) -> None:
        engine = self._engine
        engine.tell(Event("ahead", engine.name, sizes, detail=f"not compiled: {why}"))


def listed_buckets(config: Config, call: Call) -> list[list[tuple[tuple[str, int], ...]]]:
    """The buckets that the strategies of a call list.

    Args:
        config: Names the strategies.
        call: A call.

    Returns:
        For the variables that are planned together, and for each one that has a strategy of its
        own: the buckets, as pairs of a variable and its size. Variables whose strategy lists none
        are left out.
    """
    found: list[list[tuple[tuple[str, int], ...]]] = []
    together = [dim for dim in config.planned if dim in call.sizes]
    rows = getattr(config.plan, "buckets", ())
    if together and rows:
        named = [dict(zip(config.plan.dims, row, strict=True)) for row in rows]
        found.append([tuple((dim, row[dim]) for dim in together) for row in named])
    for variable in call.sizes:
        boundaries = getattr(config.strategy_of(variable), "boundaries", ())
        if boundaries and variable not in together:
            found.append([((variable, size),) for size in boundaries])
    return found


def ahead(engine: Engine) -> Ahead | None:
    """What compiles an engine's plan ahead of its calls, if that is wanted."""
    wanted = engine.config.ahead
    return None if wanted is None else Ahead(engine, wanted.workers)
