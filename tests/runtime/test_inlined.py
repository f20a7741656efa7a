"""Calls inside ``jit``, ``vmap`` and the like say that they are inlined."""

import functools
import json
from typing import Any

import jax
import numpy as np
import pytest

import bucketjit
from bucketjit.errors import InlinedWarning
from bucketjit.types import Event
from tests.comparison import warned

X = np.arange(3, dtype=np.float32)


def total(x: Any) -> Any:
    return (x * x).sum()


told = functools.partial(warned, InlinedWarning)


def test_inlined_calls_are_counted_and_told_of_once() -> None:
    events: list[Event] = []
    executor = bucketjit.jit(total).with_on_event(events.append)
    (text,) = told(lambda: jax.jit(executor)(X))
    assert text.startswith("total is called inside jax.jit")
    again = (
        lambda: jax.vmap(executor)(np.ones((2, 3), np.float32)),
        lambda: jax.lax.scan(lambda c, x: (c + executor(x), c), 0.0, np.ones((2, 3), np.float32)),
        lambda: jax.jit(jax.grad(executor))(X),
        lambda: jax.jit(executor)(np.ones(4, np.float32)),
    )
    assert [told(run) for run in again] == [[]] * len(again)
    stats = executor.stats()
    assert stats.inlined_calls >= 1 + len(again) and stats.calls == 0
    assert json.loads(stats.to_json())["inlined_calls"] == stats.inlined_calls
    assert [e.detail for e in events if e.kind == "inlined"] == [text.removeprefix("total ")]


def test_an_evaluation_of_shapes_is_not_told_of() -> None:
    """It compiles nothing. A ``jit`` inside of it keeps the trace, so that is told of."""
    like = jax.ShapeDtypeStruct((3,), np.float32)
    for executor in (bucketjit.jit(total), bucketjit.jit(lambda x: sum(row for row in x))):
        runs = (
            lambda: jax.eval_shape(executor, like),  # noqa: B023
            lambda: jax.eval_shape(lambda x: jax.vmap(executor)(x[None]), like),  # noqa: B023
        )
        assert [told(run) for run in runs] == [[], []]
        assert executor.stats().inlined_calls == 0
        inner = jax.jit(lambda x: executor(x) + 1)  # noqa: B023
        assert len(told(lambda: jax.eval_shape(lambda x: inner(x), like))) == 1  # noqa: B023


def test_a_transformation_is_named() -> None:
    executor = bucketjit.jit(total)
    (text,) = told(lambda: jax.vmap(executor)(np.ones((2, 3), np.float32)))
    assert "inside jax.vmap" in text


def test_the_vmap_of_a_hessian_is_named() -> None:
    executor = bucketjit.jit(total)
    (text,) = told(lambda: jax.hessian(executor)(X))
    assert "inside jax.vmap, jax.jacfwd or jax.hessian" in text
    (text,) = told(lambda: jax.jit(jax.grad(bucketjit.jit(total)))(X))
    assert "inside jax.jit" in text


def test_what_is_bucketed_or_has_no_strategy_is_not_told_of() -> None:
    executor = bucketjit.jit(total)
    assert told(lambda: (executor(X), jax.grad(executor)(X), jax.value_and_grad(executor)(X))) == []
    with jax.disable_jit():
        assert told(lambda: executor(X)) == []
    assert executor.stats().inlined_calls == 0
    plain = bucketjit.BucketedExec(total)
    assert told(lambda: jax.jit(plain)(X)) == []
    assert plain.stats().inlined_calls == 1


def test_another_executor_is_no_reason_to_warn() -> None:
    inner = bucketjit.jit(total)
    outer = bucketjit.jit(lambda x: inner(x) + 1)
    assert told(lambda: outer(X)) == []
    assert outer.stats().inlined_calls == 0 and inner.stats().inlined_calls >= 1


def test_metrics_count_them() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from bucketjit.metrics import prometheus as export

    executor, registry = bucketjit.jit(total), prometheus.CollectorRegistry()
    export(executor, registry=registry)
    told(lambda: jax.jit(executor)(X))
    found = registry.get_sample_value("bucketjit_inlined_calls_total", {"function": "total"})
    assert found == 1


def test_equinox_is_such_a_case() -> None:
    eqx = pytest.importorskip("equinox")
    executor = bucketjit.jit(total)
    assert len(told(lambda: eqx.filter_jit(executor)(X))) == 1
    assert executor.stats().inlined_calls == 1
