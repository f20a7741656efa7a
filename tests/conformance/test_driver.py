"""The driver tells right from wrong: each outcome, provoked."""

import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit._masking.rules import default_rules
from tests.conformance import driver
from tests.conformance.compare import difference
from tests.conformance.harnesses import Harness, load, selection
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


def test_mapped() -> None:
    assert driver.mapped(_case(jnp.sum, (3,))).kind == MASKED
    assert driver.mapped(_case(jnp.sum, (3,)), "g").kind == MASKED


def trusts_the_size(ctx: Any, x: Any) -> Any:
    return ctx.bind(jnp.where(jnp.arange(x.shape[0]) < 3, x, 0))


RULES: dict[str, tuple[Any, Any, Any, str, str]] = {
    "forgets to fill": (jnp.sum, lax.reduce_sum_p, lambda ctx, x: ctx.bind(x), WRONG, "poison"),
    "trusts the size": (jnp.sum, lax.reduce_sum_p, trusts_the_size, WRONG, "size 2"),
    "refuses": (jnp.sin, lax.sin_p, lambda ctx, x: ctx.refuse("no sine"), FALLBACK, "no sine"),
    "raises": (jnp.sin, lax.sin_p, lambda ctx, x: {}["x"], ERROR, "KeyError"),
    "a wrong shape": (jnp.sin, lax.sin_p, lambda ctx, x: x[:1], ERROR, "shape"),
}


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_does_decides(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fn, primitive, rule, kind, told = RULES[name]
    monkeypatch.setattr(driver, "default_rules", lambda: {**default_rules(), primitive: rule})
    (outcome,) = driver.opened(_case(fn, (3,)))
    assert outcome.kind == kind and told in outcome.reason


def slow(x: Any) -> Any:
    time.sleep(5)
    return x


@pytest.mark.parametrize(
    ("fn", "kind", "told"),
    [
        (slow, ERROR, "more than 1 s"),
        (lambda x: x + jnp.zeros(3), UNTRACEABLE, ""),
        (lambda x: x * float(x.shape[0] == 3), UNTRACEABLE, "one size only"),
        (lambda x: x.no_such_method(), UNSUPPORTED, ""),
    ],
    ids=["slow", "fixed shape", "one size", "not of JAX"],
)
def test_what_the_case_does_decides(fn: Any, kind: str, told: str) -> None:
    (outcome,) = driver.opened(_case(fn, (3,)), limit=1)
    assert outcome.kind == kind and told in outcome.reason and outcome.reason


@pytest.mark.parametrize(
    ("fn", "shapes", "axes"),
    [
        (lambda x: x.sum(0), [(3, 2)], ["arg0[0]", "arg0[1]"]),
        (lambda x, y: x @ y, [(3, 4), (4, 3)], ["arg0[0]", "arg0[1]=arg1[0]", "arg1[1]"]),
    ],
    ids=["apart", "together"],
)
def test_axes_that_must_agree_open_together(fn: Any, shapes: Any, axes: list[str]) -> None:
    outcomes = driver.opened(_case(fn, *shapes))
    assert {o.opened: o.kind for o in outcomes} == dict.fromkeys(axes, MASKED)


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
    assert {load()[i].group_name for i in chosen} == {case.group_name for case in load()}


def test_tables() -> None:
    outcomes = [
        Outcome("x", "add", "b", "arg0[0]", MASKED),
        Outcome("y", "sort", "b", "arg0[0]", FALLBACK, "sort: size 12 at [file.py:3 (f)]"),
    ]
    assert "total" in table(outcomes)
    assert share_masked(outcomes) == 0.5
    assert cause(outcomes[1].reason) == cause("sort: size 13 at [other.py:4 (g)]")
