"""What `explain` says, and that it neither compiles nor runs anything."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit.errors import ArgumentError
from tests.comparison import ramp, unrolled

F32 = jnp.float32


def _attend(q: Any, k: Any) -> Any:
    scores = q @ k.T / math.sqrt(q.shape[-1])
    return jax.nn.softmax(scores) @ k


def test_what_is_masked_and_where() -> None:
    executor = BucketedExec(_attend, dynamic_axes=("q, _", "k, _")).with_pow2()
    told = executor.explain(jax.ShapeDtypeStruct((3, 8), F32), jax.ShapeDtypeStruct((5, 8), F32))
    assert (told.kind, told.sizes, told.bucket) == (
        "masked",
        {"q": 3, "k": 5},
        {"q": 4, "k": 8},
    )
    # The sum and the product read zeros: the exponentials of what the maximum was filled with.
    assert [e.primitive for e in told.masked] == ["reduce_max"]
    assert told.masked[0].fills == ("-inf along k",)
    assert all("test_explain.py" in e.where for e in told.masked)
    text = str(told)
    for part in ("_attend at q=3, k=5: masked", "q=4, k=8", "-inf along k", "not compiled yet"):
        assert part in text
    assert executor.stats().calls == executor.stats().compiles == 0
    executor(ramp(3, 8), ramp(5, 8))
    assert executor.explain(ramp(4, 8), ramp(6, 8)).compiled
    assert executor.cache_info().hits == 0


def test_guards() -> None:
    executor = BucketedExec(lambda x: x * 2 if x.shape[0] > 4 else x).with_pow2()
    assert executor.explain(ramp(6)).guards == ("batch >= 5",)
    assert executor.explain(ramp(3)).guards == ("batch <= 4",)


def test_concrete_traces() -> None:
    told = BucketedExec(lambda x: x * math.sqrt(x.shape[0])).with_pow2().explain(ramp(5))
    assert told.kind == "paired"
    assert "batch=5" in told.program and "1 constant depends on the sizes" in told.program


def test_reasons_for_an_exact_run() -> None:
    told = BucketedExec(unrolled, dynamic_axes="n").with_pow2().explain(ramp(5))
    assert told.kind == "exact" and told.sizes == told.bucket == {"n": 5}
    line = r"\[\S+comparison.py:\d+(:\d+)? \(unrolled\)\]"
    assert (
        re.search(rf"^a Python loop .*range\(x.shape\[0\]\)\) {line}$", told.reason) and told.remedy
    )
    vectors = BucketedExec(lambda x: jnp.linalg.eigh(x)[1], dynamic_axes="n, n").with_pow2()
    told = vectors.explain(np.eye(3, dtype=np.float32))
    assert told.kind == "exact" and told.reason.startswith("eigh: ") and "eigvalsh" in told.remedy
    assert "reason: eigh" in str(told)
    assert "no strategy" in BucketedExec(lambda x: x).explain(ramp(3)).reason
    assert (
        "size 0" in BucketedExec(lambda x: x, dynamic_axes="n").with_pow2().explain(ramp(0)).reason
    )


def test_bad_arguments_raise_what_the_call_raises() -> None:
    executor = BucketedExec(lambda x: x, dynamic_axes="n").with_pow2()
    with pytest.raises(ArgumentError, match="x"):
        executor.explain("text")
    with pytest.raises(ArgumentError, match="rank"):
        executor.explain(ramp(2, 2))


def test_it_learns_nothing() -> None:
    executor = BucketedExec(lambda w, x: (x @ w).sum(0)).with_pow2()
    executor(ramp(4, 3), ramp(5, 4))
    executor.explain(jax.ShapeDtypeStruct((4, 7), F32), ramp(6, 4))
    executor(ramp(4, 3), ramp(5, 4))
    assert executor.stats().compiles == 1


def test_static_arguments_and_containers() -> None:
    executor = BucketedExec(lambda p, x, power: (x @ p["w"]) ** power, static_argnums=2).with_pow2()
    arrays = {"w": jax.ShapeDtypeStruct((4,), F32)}
    executor({"w": ramp(4)}, ramp(5, 4), 2)
    for p in (arrays, {"w": ramp(4)}):
        told = executor.explain(p, jax.ShapeDtypeStruct((5, 4), F32), 2)
        assert told.kind == "masked" and told.compiled
