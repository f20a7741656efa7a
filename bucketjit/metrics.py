"""Exports the counters of bucketed functions to monitoring systems.

`prometheus` registers them with prometheus-client, which the extra ``metrics`` installs. For other
systems there are snapshots (`BucketedExec.stats`) and events (`BucketedExec.with_on_event`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from bucketjit._api.executor import BucketedExec
from bucketjit._events import LONGEST_LABEL, one_line
from bucketjit._extras import Extra
from bucketjit._runtime.statistics import Stats
from bucketjit.errors import SpecError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

__all__ = ["Registration", "prometheus"]

_PREFIX, _MOST_LABELS = "bucketjit", 4096  # labels whose hits `_Climbing` remembers


class _Collector:
    """Collects the metrics of all bucketed functions in one registry.

    A scrape may contain each metric only once, so bucketed functions share one collector. They are
    held by weak references; one that is gone is left out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executors: dict[str, weakref.ref[BucketedExec[..., Any]]] = {}
        self._climbing = _Climbing()

    def add(self, name: str, executor: BucketedExec[..., Any]) -> None:
        with self._lock:
            known = self._executors.get(name)
            other = None if known is None else known()
            if other is not None and other is not executor:
                raise SpecError(
                    f"metrics of another bucketed function are called {name!r} in this registry; "
                    "give this one another name, prometheus(executor, name=...)"
                )
            self._executors[name] = weakref.ref(executor)

    def remove(self, name: str, executor: weakref.ref[BucketedExec[..., Any]]) -> None:
        with self._lock:
            if self._executors.get(name) == executor:
                del self._executors[name]

    def describe(self) -> list[Metric]:
        """No metrics. Without this method a registry may call `collect` to find their names."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            executors = {name: ref() for name, ref in self._executors.items()}
            for name in [n for n, executor in executors.items() if executor is None]:
                del self._executors[name]
        stats = {name: e.stats() for name, e in executors.items() if e is not None}
        if stats:  # without bucketed functions, metrics would still be listed, with no samples
            yield from _metrics(stats, self._climbing)


class _Climbing:
    """Keeps the hits of a label from falling when an executable leaves the cache.

    Prometheus takes a counter that falls for one that was reset to 0, and adds the remaining value
    as new hits. So the hits of executables that are gone are added to the label. The hits between
    the last scrape and the eviction are lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By function: number of scrapes, and when its counters started.
        self._scrapes: dict[str, tuple[int, float]] = {}
        # By label: number of the last scrape, hits then, and hits of executables that are gone.
        self._known: dict[tuple[str, ...], tuple[int, int, int]] = {}

    def begin(self, function: str, since: float) -> None:
        """Begin a scrape; if the counters of the function were reset, forget its labels."""
        with self._lock:
            count, before = self._scrapes.get(function, (0, since))
            self._scrapes[function] = count + 1, since
            if since != before:
                self._known = {k: v for k, v in self._known.items() if k[0] != function}

    def __call__(self, label: tuple[str, ...], hits: int) -> int:
        with self._lock:
            now = self._scrapes[label[0]][0]
            scrape, before, added = self._known.pop(label, (0, 0, 0))
            if scrape < now - 1:  # no executable had the label for a while
                added += before
            elif hits < before:  # an executable of the label has left the cache
                added += before - hits
            self._known[label] = now, hits, added
            if len(self._known) > _MOST_LABELS:  # drop the label seen longest ago
                del self._known[next(iter(self._known))]
            return hits + added


@dataclass(frozen=True)
class Registration:
    """The metrics of one bucketed function in a registry.

    It is a collector of prometheus-client too: registering it with another registry moves the
    metrics there. For several bucketed functions in one registry call `prometheus` for each
    instead: a scrape may contain each metric only once, and they then share one collector.

    Attributes:
        name: The value of the label ``function``.
    """

    name: str
    _collector: _Collector = field(repr=False)
    _executor: weakref.ref[BucketedExec[..., Any]] = field(repr=False)
    _collects: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    _climbing: _Climbing = field(default_factory=_Climbing, repr=False, compare=False)

    def unregister(self) -> None:
        """Remove the metrics from the registry. Does nothing if they are removed already."""
        self._collects.clear()
        self._collector.remove(self.name, self._executor)

    def describe(self) -> list[Metric]:
        """No metrics. A registry calls this when the object is registered, which moves them."""
        self.unregister()
        self._collects.set()
        return []

    def collect(self) -> Iterator[Metric]:
        """The present metrics, if this object was registered as a collector; else none."""
        executor = self._executor()
        if self._collects.is_set() and executor is not None:
            yield from _metrics({self.name: executor.stats()}, self._climbing)


_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def prometheus(
    executor: BucketedExec[..., Any],
    *,
    name: str | None = None,
    registry: CollectorRegistry | None = None,
) -> Registration:
    """Register a bucketed function's counters with prometheus-client.

    The counters are read when they are scraped, so calls do not get slower. The metrics are called
    ``bucketjit_...`` and have a label ``function``; those of single executables also have a label
    ``bucket`` such as ``b=8,s=64``. The bucketed function is not kept alive; when it is gone, its
    metrics are too.

    Labels are printable text of at most 500 characters: control characters and lone surrogates
    are written as escapes. ``bucketjit_fallback_calls_total`` has at most 65 series per function:
    calls with other reasons than the first 64 are counted with the reason ``other``.

    Args:
        executor: The executor.
        name: The label ``function``, unchanged; by default the function's name, made printable.
        registry: The registry; by default that of prometheus-client.

    Returns:
        The registration, with ``unregister()``; it can also be registered with another registry.

    Raises:
        MissingExtraError: prometheus-client is not installed.
        SpecError: ``executor`` is no executor, ``name`` no text, ``registry`` no registry, or
            another bucketed function has that name in the registry.

    Examples:
        >>> import jax.numpy as jnp
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> from bucketjit import BucketedExec, metrics
        >>> mean = BucketedExec(jnp.mean).with_pow2()
        >>> registry = CollectorRegistry()
        >>> registration = metrics.prometheus(mean, registry=registry)
        >>> _ = mean(jnp.arange(3.0))
        >>> registry.get_sample_value("bucketjit_calls_total", {"function": "mean"})
        1.0
        >>> registration.unregister()
    """
    if not isinstance(executor, BucketedExec):
        raise SpecError(f"expected a BucketedExec, got {executor!r}")
    with Extra("Prometheus metrics", "prometheus-client", "metrics"):
        from prometheus_client import REGISTRY
    where = REGISTRY if registry is None else registry
    if not callable(getattr(where, "register", None)):
        raise SpecError(f"registry must be a CollectorRegistry of prometheus-client, got {where!r}")
    name = _label(executor._name) if name is None else name
    if not isinstance(name, str):
        raise SpecError(f"name must be text, got {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:  # such a label would make every scrape of the registry fail
        raise SpecError(f"name must be text that UTF-8 can hold, got {name!r}") from None
    with _lock:
        collector = _collectors.get(where)
        if collector is None:
            collector = _Collector()
            where.register(collector)
            _collectors[where] = collector
    collector.add(name, executor)
    return Registration(name, collector, weakref.ref(executor))


class _Metric(NamedTuple):
    """A number of a snapshot: a counter if its name ends in ``_total``, else a gauge."""

    name: str
    text: str
    read: Callable[[Stats], float]


_PLAIN = (
    _Metric("calls_total", "Calls.", lambda s: s.calls),
    _Metric(
        "inlined_calls_total",
        "Calls inside jit, vmap and the like, where the function itself runs.",
        lambda s: s.inlined_calls,
    ),
    _Metric("rows_total", "Examples that map has run in batches.", lambda s: s.rows),
    _Metric("hits_total", "Calls that found their executable compiled.", lambda s: s.hits),
    _Metric(
        "misses_total",
        "Asks for an executable that was not there: it was compiled, or read from a file.",
        lambda s: s.misses,
    ),
    _Metric("compiles_total", "Executables compiled.", lambda s: s.compiles),
    _Metric("compile_seconds_total", "Time spent compiling.", lambda s: s.compile_seconds),
    _Metric("loads_total", "Executables read from files.", lambda s: s.loads),
    _Metric("load_seconds_total", "Time spent reading them.", lambda s: s.load_seconds),
    _Metric("evictions_total", "Executables dropped to make room.", lambda s: s.evictions),
    _Metric(
        "dropped_runs_total",
        "Runs dropped because a computed size was another one than presumed.",
        lambda s: s.dropped_runs,
    ),
    _Metric("executables", "Executables in the cache.", lambda s: len(s.buckets)),
    _Metric("programs", "Programs traced.", lambda s: len(s.programs)),
    _Metric(
        "padding_waste_ratio",
        "Padding among all elements of padded arguments.",
        lambda s: s.padding_waste,
    ),
)


def _metrics(every: dict[str, Stats], climbing: _Climbing) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def family(name: str, text: str, *labels: str) -> Any:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        return kind(f"{_PREFIX}_{name}", text, labels=("function", *labels))

    for metric in _PLAIN:
        told = family(metric.name, metric.text)
        for function, stats in every.items():
            told.add_metric([function], float(metric.read(stats)))
        yield told
    fallbacks = family("fallback_calls_total", "Calls that ran unpadded, by reason.", "reason")
    waste = family("dimension_waste_ratio", "Padding among padded sizes.", "dimension")
    for function, stats in every.items():
        for reason, calls in stats.fallback_reasons.items():
            fallbacks.add_metric([function, _label(reason)], calls)
        for dimension, share in stats.dimension_waste.items():
            waste.add_metric([function, _label(dimension)], share)
    yield fallbacks
    yield waste
    yield from _computed_sizes(every, family)
    labels = ("bucket", "exact")
    hits = family("bucket_hits_total", "Calls served after the first one.", *labels)
    seconds = family("bucket_compile_seconds", "Time that compiling it took.", *labels)
    size = family("bucket_bytes", "Memory that it takes.", *labels)
    flops = family("bucket_flops", "Floating point operations of a call.", *labels)
    used = family("bucket_last_used_timestamp_seconds", "When it last served a call.", *labels)
    for function, stats in every.items():
        climbing.begin(function, stats.since)
        for (bucket, exact), twins in _by_label(stats).items():
            label = [function, bucket, exact]
            hits.add_metric(label, climbing(tuple(label), sum(b.hits for b in twins)))
            seconds.add_metric(label, sum(b.compile_seconds for b in twins))
            size.add_metric(label, sum(b.nbytes for b in twins))
            used.add_metric(label, max(b.last_used for b in twins))
            if known := [b.flops for b in twins if b.flops is not None]:
                flops.add_metric(label, max(known))
    yield from (hits, seconds, size, flops, used)


def _computed_sizes(every: dict[str, Stats], family: Callable[..., Any]) -> Iterator[Metric]:
    """What the programs select, by computed size, its bound, and the line that computes it."""
    labels = ("size", "bound", "line")
    selected = family("computed_size_rows_total", "Rows selected, where they are told.", *labels)
    rows = family("computed_size_bounds_total", "Rows that they were selected from.", *labels)
    programs = family("computed_size_programs", "Programs that compute the size.", *labels)
    for function, stats in every.items():
        sums: dict[tuple[str, str, str, str], list[int]] = {}
        for made in (made for program in stats.programs for made in program.computed):
            label = function, _label(made.size), _label(made.bound), _label(made.line)
            known = sums.setdefault(label, [0, 0, 0])
            known[:] = known[0] + made.selected, known[1] + made.rows, known[2] + 1
        for label, (some, of, count) in sums.items():
            selected.add_metric(label, some)
            rows.add_metric(label, of)
            programs.add_metric(label, count)
    yield from (selected, rows, programs)


def _by_label(stats: Stats) -> dict[tuple[str, str], list[Any]]:
    """Executables by labels ``bucket`` and ``exact``; several programs may have the same bucket."""
    found: dict[tuple[str, str], list[Any]] = {}
    for bucket in stats.buckets:
        sizes = _label(",".join(f"{v}={n}" for v, n in bucket.sizes.items()))
        found.setdefault((sizes, str(bucket.exact).lower()), []).append(bucket)
    return found


def _label(text: str) -> str:
    """A text as the value of a label: one printable line of bounded length."""
    return one_line(text, LONGEST_LABEL)
