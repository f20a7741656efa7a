"""The driver tells right from wrong: each outcome, provoked."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit._masking.rules import default_rules
from tests.conformance import driver
from tests.conformance.compare import difference
from tests.conformance.harnesses import Harness, selection
from tests.conformance.outcome import (
    ERROR,
    FALLBACK,
    MASKED,
    UNSUPPORTED,
    UNTRACEABLE,
    WRONG,
    Outcome,
    cause,
    share_masked,
    table,
)


def _case(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Harness:
    def make(seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.standard_normal(s).astype(np.float32) for s in shapes]

    return Harness(0, "case", "case", fn, make, True)


def _with(monkeypatch: pytest.MonkeyPatch, rules: dict[Any, Any]) -> None:
    monkeypatch.setattr(driver, "default_rules", lambda: {**default_rules(), **rules})


def test_masked() -> None:
    outcomes = driver.opened(_case(lambda x: x.sum(0), (3, 2)))
    assert [(o.opened, o.kind) for o in outcomes] == [("arg0[0]", MASKED), ("arg0[1]", MASKED)]
    assert driver.mapped(_case(jnp.sum, (3,))).kind == MASKED
    assert driver.mapped(_case(jnp.sum, (3,)), "g").kind == MASKED


def test_a_rule_that_forgets_to_fill_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, {lax.reduce_sum_p: lambda ctx, x: ctx.bind(x)})
    summed, kept = driver.opened(_case(lambda x: x.sum(0), (3, 2)))
    assert summed.kind == WRONG and "poison" in summed.reason
    assert kept.kind == MASKED


def test_a_rule_that_trusts_the_size_of_the_case_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def three(ctx: Any, x: Any) -> Any:
        return ctx.bind(jnp.where(jnp.arange(x.shape[0]) < 3, x, 0))

    _with(monkeypatch, {lax.reduce_sum_p: three})
    (outcome,) = driver.opened(_case(jnp.sum, (3,)))
    assert outcome.kind == WRONG and outcome.reason.startswith("size 2")


def test_a_refusal_is_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, {lax.sin_p: lambda ctx, x: ctx.refuse("no sine")})
    (outcome,) = driver.opened(_case(jnp.sin, (3,)))
    assert outcome.kind == FALLBACK and "no sine" in outcome.reason


def test_an_exception_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, {lax.sin_p: lambda ctx, x: {}["x"]})
    (outcome,) = driver.opened(_case(jnp.sin, (3,)))
    assert outcome.kind == ERROR and "KeyError" in outcome.reason


def test_a_wrong_shape_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, {lax.sin_p: lambda ctx, x: x[:1]})
    (outcome,) = driver.opened(_case(jnp.sin, (3,)))
    assert outcome.kind == ERROR


def test_slowness_is_an_error() -> None:
    def slow(x: Any) -> Any:
        import time

        time.sleep(5)
        return x

    (outcome,) = driver.opened(_case(slow, (3,)), limit=1)
    assert outcome.kind == ERROR and "more than 1 s" in outcome.reason


def test_axes_that_must_agree_open_together() -> None:
    outcomes = driver.opened(_case(lambda x, y: x @ y, (3, 4), (4, 3)))
    assert {o.opened: o.kind for o in outcomes} == {
        "arg0[0]": MASKED,
        "arg0[1]=arg1[0]": MASKED,
        "arg1[1]": MASKED,
    }


def test_what_jax_refuses() -> None:
    (outcome,) = driver.opened(_case(lambda x: x + jnp.zeros(3), (3,)))
    assert outcome.kind == UNTRACEABLE and outcome.reason
    (outcome,) = driver.opened(_case(lambda x: x * float(x.shape[0] == 3), (3,)))
    assert outcome.kind == UNTRACEABLE and "one size only" in outcome.reason
    (outcome,) = driver.opened(_case(lambda x: x.no_such_method(), (3,)))
    assert outcome.kind == UNSUPPORTED


def test_moved_values_must_agree_to_the_bit() -> None:
    near = np.float32([1.0, 1.0 + 1e-6])
    assert difference([near], [np.float32([1.0, 1.0])], "add") is None
    assert difference([near], [np.float32([1.0, 1.0])], "gather")
    assert difference([np.float32([-0.0])], [np.float32([0.0])], "gather")
    assert difference([np.float32([np.nan])], [np.float32([np.nan])], "gather") is None
    assert difference([np.int32([1])], [np.float32([1])], "add")
    assert difference([np.float32([1])], [np.float32([1, 2])], "add")


def test_a_sample_holds_every_primitive_first() -> None:
    chosen = selection(sample=200, seed=3)
    assert chosen == selection(sample=200, seed=3) == sorted(chosen)
    assert len(chosen) == 200
    groups = {driver_name(i) for i in chosen}
    assert groups == {driver_name(i) for i in selection()}


def driver_name(index: int) -> str:
    from tests.conformance.harnesses import load

    return load()[index].group_name


def test_tables() -> None:
    outcomes = [
        Outcome("x", "add", "b", "arg0[0]", MASKED),
        Outcome("y", "sort", "b", "arg0[0]", FALLBACK, "sort: size 12 at [file.py:3 (f)]"),
    ]
    assert "total" in table(outcomes)
    assert share_masked(outcomes) == 0.5
    assert cause(outcomes[1].reason) == cause("sort: size 13 at [other.py:4 (g)]")
