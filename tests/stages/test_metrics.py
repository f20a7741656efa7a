"""Metrics as Prometheus scrapes them."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketjit import BucketedExec, metrics
from bucketjit.errors import FallbackWarning, MissingExtraError, SpecError
from tests.comparison import ones


def total(x: Any) -> Any:
    return x.sum()


@pytest.fixture
def registry() -> Any:
    return pytest.importorskip("prometheus_client").CollectorRegistry()


def samples(registry: Any) -> dict[tuple[str, ...], float]:
    """Each sample by its name and label values, except the function."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k != "function"]
            found[sample.labels["function"], sample.name, *labels] = sample.value
    return found


def test_as_scraped(registry: Any) -> None:
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    executor = BucketedExec(total, dynamic_axes="b, s").with_pow2()
    other = BucketedExec(lambda x: x * 2).with_pow2()
    for made, name in ((executor, None), (other, "double")):
        metrics.prometheus(made, name=name, registry=registry)
    for b, s in ((3, 5), (3, 5), (9, 5)):
        executor(ones(b, s))
    text = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(text))
    assert len({f.name for f in families}) == len(families), "a metric is told twice"
    found = {
        (s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples
    }
    function = ("function", "total")
    assert found["bucketjit_calls_total", function] == 3
    assert found["bucketjit_compiles_total", function] == 2
    assert found["bucketjit_executables", function] == 2
    labels = (("bucket", "b=4,s=8"), ("exact", "false"), function)
    assert found["bucketjit_bucket_hits", *labels] == 1
    assert found["bucketjit_bucket_bytes", *labels] > 0
    waste = found["bucketjit_dimension_waste_ratio", ("dimension", "b"), function]
    assert waste == pytest.approx((1 + 1 + 7) / (4 + 4 + 16))
    assert found["bucketjit_calls_total", ("function", "double")] == 0
    kinds = {f.name: f.type for f in families}
    assert kinds["bucketjit_calls"] == "counter" and kinds["bucketjit_executables"] == "gauge"


def test_plain_numbers_are_those_of_stats(registry: Any) -> None:
    executor = BucketedExec(total).with_pow2().with_maxsize(1)
    metrics.prometheus(executor, name="f", registry=registry)
    for n in (3, 3, 9, 3):
        executor(ones(n))
    found, stats = samples(registry), executor.stats()
    assert stats.evictions == 2 and 0 < stats.padding_waste < 1
    for name in ("calls", "inlined_calls", "rows", "hits", "misses", "compiles"):
        assert found["f", f"bucketjit_{name}_total"] == getattr(stats, name), name
    for name in ("compile_seconds", "loads", "load_seconds", "evictions"):
        assert found["f", f"bucketjit_{name}_total"] == getattr(stats, name), name
    assert found["f", "bucketjit_padding_waste_ratio"] == stats.padding_waste
    assert found["f", "bucketjit_executables"] == found["f", "bucketjit_programs"] == 1


def test_fallbacks_have_their_reason(registry: Any) -> None:
    executor = BucketedExec(lambda x: sum(x[i] for i in range(x.shape[0]))).with_pow2()
    metrics.prometheus(executor, name="f", registry=registry)
    with pytest.warns(FallbackWarning):
        executor(ones(3))
    (reason,) = executor.stats().fallback_reasons
    assert samples(registry)["f", "bucketjit_fallback_calls_total", reason] == 1


def test_programs_that_share_a_bucket_are_one_sample(registry: Any) -> None:
    executor = BucketedExec(total).with_pow2()
    metrics.prometheus(executor, registry=registry)
    for _ in range(2):
        executor(ones(3))
        executor(ones(3).astype(np.int32))
    found = samples(registry)
    assert found["total", "bucketjit_bucket_hits", "batch=4", "false"] == 2
    assert found["total", "bucketjit_programs"] == 2


def test_executors_are_not_kept_alive(registry: Any) -> None:
    executor = BucketedExec(total).with_pow2()
    executor(ones(3))
    metrics.prometheus(executor, registry=registry)
    assert samples(registry)
    gone = weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None
    assert samples(registry) == {}
    metrics.prometheus(BucketedExec(total), registry=registry)  # the name is free again


def test_names_are_taken_once(registry: Any) -> None:
    executor = BucketedExec(total)
    metrics.prometheus(executor, registry=registry)
    metrics.prometheus(executor, registry=registry)
    with pytest.raises(SpecError, match="another bucketed function are called 'total' .* name="):
        metrics.prometheus(executor.with_pow2(), registry=registry)


def test_what_is_no_executor(registry: Any) -> None:
    with pytest.raises(SpecError, match="expected a BucketedExec, got 3"):
        metrics.prometheus(3, registry=registry)  # type: ignore[arg-type]


def test_names_are_text(registry: Any) -> None:
    with pytest.raises(SpecError, match="name must be text that UTF-8 can hold, got 3"):
        metrics.prometheus(BucketedExec(total), name=3, registry=registry)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="UTF-8 can hold, got '.udc80'"):
        metrics.prometheus(BucketedExec(total), name="\udc80", registry=registry)
    with pytest.raises(SpecError, match="registry must be a CollectorRegistry .* got 'there'"):
        metrics.prometheus(BucketedExec(total), registry="there")  # type: ignore[arg-type]
    assert not list(registry.collect())


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # type: ignore[arg-type]
    with pytest.raises(MissingExtraError, match=r"prometheus-client.*'bucketjit\[metrics\]'"):
        metrics.prometheus(BucketedExec(total))


def test_unregistering(registry: Any) -> None:
    executor = BucketedExec(total).with_pow2()
    registration = metrics.prometheus(executor, registry=registry)
    assert registration.name == "total"
    assert samples(registry)
    registration.unregister()
    registration.unregister()
    assert samples(registry) == {} and list(registry.collect()) == []
    again = metrics.prometheus(executor, registry=registry)
    registration.unregister()  # the same executor under the same name: it is the same
    assert samples(registry) == {} and again == registration


def test_the_reference_lists_every_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "looking.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if "`bucketjit_" in line]
    told = {name: (f"{text}.", labels) for name, text, labels in rows}
    assert told == {
        f"`bucketjit_{name}`": (text, ", ".join(f"`{label}`" for label in ("function", *labels)))
        for name, (text, labels) in metrics._METRICS.items()
    }
