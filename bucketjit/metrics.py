"""Exports the counters of bucketed functions to monitoring systems.

`prometheus` registers them with prometheus-client, which the extra ``metrics`` installs. For other
systems there are snapshots (`BucketedExec.stats`) and events (`BucketedExec.with_on_event`).
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bucketjit._api.executor import BucketedExec
from bucketjit._events import LONGEST_LABEL, one_line
from bucketjit._extras import Extra
from bucketjit._runtime.statistics import Stats
from bucketjit.errors import SpecError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

__all__ = ["Registration", "prometheus"]

_MOST_LABELS = 4096  # labels of a function whose hits are remembered

_Labels = tuple[str, ...]

# A metric is a counter if its name ends in `_total`, else a gauge.
_PLAIN = {  # each is the number of `Stats` that has the name without `_total` or `_ratio`
    "calls_total": "Calls.",
    "inlined_calls_total": "Calls inside jit, vmap and the like, where the function itself runs.",
    "rows_total": "Examples that map has run in batches.",
    "hits_total": "Calls that found their executable compiled.",
    "misses_total": "Executables that were not there: each was compiled, or read from a file.",
    "compiles_total": "Executables compiled.",
    "compile_seconds_total": "Time spent compiling.",
    "loads_total": "Executables read from files.",
    "load_seconds_total": "Time spent reading them.",
    "evictions_total": "Executables dropped to make room.",
    "dropped_runs_total": "Runs dropped because a computed size was another one than presumed.",
    "padding_waste_ratio": "Padding among all elements of padded arguments.",
}
_COMPUTED = "size", "bound", "line"
_BUCKET = "bucket", "exact"
_LABELED: dict[str, tuple[str, _Labels]] = {  # `_labeled` has their values
    "executables": ("Executables in the cache.", ()),
    "programs": ("Programs traced.", ()),
    "fallback_calls_total": ("Calls that ran unpadded, by reason.", ("reason",)),
    "dimension_waste_ratio": ("Padding among padded sizes.", ("dimension",)),
    "computed_size_rows_total": ("Rows selected, where they are told.", _COMPUTED),
    "computed_size_bounds_total": ("Rows that they were selected from.", _COMPUTED),
    "computed_size_programs": ("Programs that compute the size.", _COMPUTED),
    "bucket_hits_total": ("Calls served after the first one.", _BUCKET),
    "bucket_compile_seconds": ("Time that compiling it took.", _BUCKET),
    "bucket_bytes": ("Memory that it takes.", _BUCKET),
    "bucket_flops": ("Floating point operations of a call.", _BUCKET),
    "bucket_last_used_timestamp_seconds": ("When it last served a call.", _BUCKET),
}


class _Collector:
    """Collects the metrics of all bucketed functions in one registry.

    A scrape may contain each metric only once, so bucketed functions share one collector. They are
    held by weak references; one that is gone is left out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executors = weakref.WeakValueDictionary[str, BucketedExec[..., Any]]()
        # By function: when its counters started, and by label its hits at the last scrape, and
        # those of executables that are gone.
        self._known: dict[str, tuple[float, dict[_Labels, tuple[int, int]]]] = {}

    def add(self, name: str, executor: BucketedExec[..., Any]) -> None:
        with self._lock:
            if self._executors.setdefault(name, executor) is not executor:
                raise SpecError(
                    f"metrics of another bucketed function are called {name!r} in this registry; "
                    "give this one another name, prometheus(executor, name=...)"
                )

    def remove(self, name: str, executor: BucketedExec[..., Any] | None) -> None:
        with self._lock:
            if executor is not None and self._executors.get(name) is executor:
                del self._executors[name]

    def describe(self) -> list[Metric]:
        """No metrics. Without this method a registry may call `collect` to find their names."""
        return []

    def collect(self) -> list[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            every = {name: executor.stats() for name, executor in self._executors.items()}
            samples = {name: _labeled(stats) for name, stats in every.items()}
            self._known = {n: k for n, k in self._known.items() if n in every}
            for name, stats in every.items():
                told = samples[name]
                told["bucket_hits_total"] = self._climb(
                    name, stats.since, told["bucket_hits_total"]
                )
        if not every:  # metrics would still be listed, with no samples
            return []
        families: list[Metric] = []
        for metric, (text, labels) in {
            **{n: (t, ()) for n, t in _PLAIN.items()},
            **_LABELED,
        }.items():
            kind = CounterMetricFamily if metric.endswith("_total") else GaugeMetricFamily
            family = kind(f"bucketjit_{metric}", text, labels=("function", *labels))
            for name, told in samples.items():
                for label, value in told[metric].items():
                    family.add_metric([name, *label], float(value))
            families.append(family)
        return families

    def _climb(self, name: str, since: float, now: Mapping[_Labels, float]) -> dict[_Labels, float]:
        """Keep the hits of a label from falling when an executable leaves the cache.

        Prometheus takes a counter that falls for one that was reset to 0, and adds what remains as
        new hits. So hits that are gone are added. Those after the last scrape are lost.
        """
        began, known = self._known.get(name, (since, {}))
        if began != since:  # the counters were reset
            known = {}
        for label in [*(label for label in known if label not in now), *now]:
            before, gone = known.pop(label, (0, 0))
            hits = int(now.get(label, 0))
            known[label] = hits, gone + max(before - hits, 0)
        climbed: dict[_Labels, float] = {label: sum(known[label]) for label in now}
        for label in list(known)[:-_MOST_LABELS]:  # those seen longest ago
            del known[label]
        self._known[name] = since, known
        return climbed


@dataclass(frozen=True)
class Registration:
    """The metrics of one bucketed function in a registry.

    Attributes:
        name: The value of the label ``function``.
    """

    name: str
    _collector: _Collector = field(repr=False)
    _executor: weakref.ref[BucketedExec[..., Any]] = field(repr=False)

    def unregister(self) -> None:
        """Remove the metrics from the registry. Does nothing if they are removed already."""
        self._collector.remove(self.name, self._executor())


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
        The registration, with ``unregister()``.

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


def _labeled(stats: Stats) -> defaultdict[str, dict[_Labels, float]]:
    """The numbers of a snapshot, by metric and labels; executables with equal labels are one."""
    told: defaultdict[str, dict[_Labels, float]] = defaultdict(dict)

    def add(metric: str, label: _Labels, value: float) -> None:
        told[metric][label] = told[metric].get(label, 0) + value

    def most(metric: str, label: _Labels, value: float) -> None:
        told[metric][label] = max(told[metric].get(label, value), value)

    for metric in _PLAIN:
        add(metric, (), getattr(stats, metric.removesuffix("_total").removesuffix("_ratio")))
    add("executables", (), len(stats.buckets))
    add("programs", (), len(stats.programs))
    for reason, calls in stats.fallback_reasons.items():
        add("fallback_calls_total", (_label(reason),), calls)
    for dimension, share in stats.dimension_waste.items():
        most("dimension_waste_ratio", (_label(dimension),), share)
    for made in (made for program in stats.programs for made in program.computed):
        label = _label(made.size), _label(made.bound), _label(made.line)
        add("computed_size_rows_total", label, made.selected)
        add("computed_size_bounds_total", label, made.rows)
        add("computed_size_programs", label, 1)
    for bucket in stats.buckets:
        sizes = ",".join(f"{v}={n}" for v, n in bucket.sizes.items())
        where = _label(sizes), str(bucket.exact).lower()
        add("bucket_hits_total", where, bucket.hits)
        add("bucket_compile_seconds", where, bucket.compile_seconds)
        add("bucket_bytes", where, bucket.nbytes)
        most("bucket_last_used_timestamp_seconds", where, bucket.last_used)
        if bucket.flops is not None:
            most("bucket_flops", where, bucket.flops)
    return told


def _label(text: str) -> str:
    """A text as the value of a label: one printable line of bounded length."""
    return one_line(text, LONGEST_LABEL)
