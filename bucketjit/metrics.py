"""Exports the counters of bucketed functions to monitoring systems.

`prometheus` registers them with prometheus-client, which the extra ``metrics`` installs. For other
systems there are snapshots (`BucketedExec.stats`) and events (`BucketedExec.with_on_event`).
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bucketjit._api.executor import BucketedExec
from bucketjit._extras import Extra
from bucketjit._runtime.statistics import Stats, shown_reason
from bucketjit.errors import SpecError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

__all__ = ["Registration", "prometheus"]

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
    "padding_waste_ratio": "Padding among all elements of padded arguments.",
}
_COMPUTED, _BUCKET = ("size", "bound", "line"), ("bucket", "exact")
_LABELED: dict[str, tuple[str, tuple[str, ...]]] = {
    "executables": ("Executables in the cache.", ()),
    "programs": ("Programs traced.", ()),
    "fallback_calls_total": ("Calls that ran unpadded, by reason.", ("reason",)),
    "dimension_waste_ratio": ("Padding among padded sizes.", ("dimension",)),
    "computed_size_rows_total": ("Rows selected, where they are told.", _COMPUTED),
    "computed_size_bounds_total": ("Rows that they were selected from.", _COMPUTED),
    "bucket_hits": ("Calls that executables in the cache served after the first one.", _BUCKET),
    "bucket_compile_seconds": ("Time that compiling them, or reading their files, took.", _BUCKET),
    "bucket_bytes": ("Memory that they take.", _BUCKET),
}
_METRICS = {**{name: (text, ()) for name, text in _PLAIN.items()}, **_LABELED}


class _Collector:
    """Collects the metrics of all bucketed functions in one registry."""

    def __init__(self) -> None:
        self.executors = weakref.WeakValueDictionary[str, BucketedExec[..., Any]]()

    def describe(self) -> list[Metric]:
        """No metrics. Without this method a registry may call `collect` to find their names."""
        return []

    def collect(self) -> list[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        totals: defaultdict[str, defaultdict[tuple[str, ...], float]]
        totals = defaultdict(lambda: defaultdict(float))
        with _lock:
            executors = sorted(self.executors.items())
        for name, executor in executors:
            for metric, labels, value in _samples(executor.stats()):
                totals[metric][name, *map(shown_reason, labels)] += value
        families: list[Metric] = []
        for metric, values in totals.items():
            text, labels = _METRICS[metric]
            kind = CounterMetricFamily if metric.endswith("_total") else GaugeMetricFamily
            family = kind(f"bucketjit_{metric}", text, labels=("function", *labels))
            for label, value in values.items():
                family.add_metric(label, value)
            families.append(family)
        return families


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
        executor, registered = self._executor(), self._collector.executors
        with _lock:
            if executor is not None and registered.get(self.name) is executor:
                del registered[self.name]


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
        >>> import bucketjit, jax.numpy as jnp
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> from bucketjit import metrics
        >>> mean = bucketjit.jit(jnp.mean, buckets="pow2")
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
    name = shown_reason(executor._engine.name) if name is None else name
    # Text that UTF-8 cannot hold would make every scrape of the registry fail.
    if not isinstance(name, str) or name.encode(errors="ignore").decode() != name:
        raise SpecError(f"name must be text that UTF-8 can hold, got {name!r}")
    with _lock:
        collector = _collectors.get(where)
        if collector is None:
            collector = _collectors[where] = _Collector()
            where.register(collector)
        if collector.executors.setdefault(name, executor) is not executor:
            raise SpecError(
                f"metrics of another bucketed function are called {name!r} in this registry; "
                "give this one another name, prometheus(executor, name=...)"
            )
    return Registration(name, collector, weakref.ref(executor))


def _samples(stats: Stats) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The numbers of a snapshot, by metric and labels; those with equal labels are added."""
    for metric in _PLAIN:
        yield metric, (), getattr(stats, metric.removesuffix("_total").removesuffix("_ratio"))
    yield "executables", (), len(stats.buckets)
    yield "programs", (), len(stats.programs)
    for reason, calls in stats.fallback_reasons.items():
        yield "fallback_calls_total", (reason,), calls
    for dimension, share in stats.dimension_waste.items():
        yield "dimension_waste_ratio", (dimension,), share
    for size in (size for program in stats.programs for size in program.computed):
        label = size.size, size.bound, size.line
        yield "computed_size_rows_total", label, size.selected
        yield "computed_size_bounds_total", label, size.rows
    for bucket in stats.buckets:
        sizes = ",".join(f"{v}={n}" for v, n in bucket.sizes.items())
        where = sizes, str(bucket.exact).lower()
        yield "bucket_hits", where, bucket.hits
        yield "bucket_compile_seconds", where, bucket.compile_seconds
        yield "bucket_bytes", where, bucket.nbytes
