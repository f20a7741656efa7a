"""What `explain` says, and that it neither compiles nor runs anything."""

import html
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit._stages import explain
from bucketjit.errors import ArgumentError, SpecError
from tests.comparison import ramp, unrolled

F32 = jnp.float32


def _attend(q: Any, k: Any) -> Any:
    scores = q @ k.T / math.sqrt(q.shape[-1])
    return jax.nn.softmax(scores) @ k


def test_what_is_masked_and_where() -> None:
    executor = BucketedExec(_attend, dynamic_axes=("q, _", "k, _")).with_pow2()
    told = executor.explain(jax.ShapeDtypeStruct((3, 8), F32), jax.ShapeDtypeStruct((5, 8), F32))
    assert (told.kind, told.sizes, told.bucket) == ("masked", {"q": 3, "k": 5}, {"q": 4, "k": 8})
    # The sum and the product read zeros: the exponentials of what the maximum was filled with.
    assert [e.primitive for e in told.masked] == ["reduce_max"]
    assert told.masked[0].fills == ("-inf along k",)
    assert all("test_explain.py" in e.where for e in told.masked)
    assert str(told).split("\n") == [
        "_attend at q=3, k=5 runs padded, in bucket q=4, k=8",
        "  padding: 1 of 4 along q (25 %), 3 of 8 along k (38 %)",
        "  executable: not compiled yet",
        "  masked: 1 operation (explain(..., rules=True) lists them)",
    ]
    assert executor.stats().calls == executor.stats().compiles == 0
    executor(ramp(3, 8), ramp(5, 8))
    assert executor.explain(ramp(4, 8), ramp(6, 8)).compiled
    assert executor.cache_info().hits == 0


def test_a_bucket_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    masked = explain.masked_equations
    monkeypatch.setattr(explain, "masked_equations", lambda *args: seen.append(1) or masked(*args))
    executor = BucketedExec(lambda x: jnp.cumsum(x[::-1]).max()).with_pow2()
    told = [executor.explain(jax.ShapeDtypeStruct((n,), F32)) for n in (3, 4, 3, 5)]
    assert len(seen) == 2 and told[0].masked == told[2].masked != ()
    executor.cache_clear()
    executor.explain(jax.ShapeDtypeStruct((3,), F32))
    assert len(seen) == 3


@jax.tree_util.register_static
class Attention:
    """A function that is a method."""

    __call__ = BucketedExec(lambda self, q, k: _attend(q, k), dynamic_axes=(None, "q, _", "k, _"))


def test_rules_are_told_on_request(tmp_path: Path) -> None:
    """Of a function, a method, and a saved function."""
    executor = BucketedExec(_attend, dynamic_axes=("q, _", "k, _")).with_buckets([8])
    q, k = ramp(3, 8), ramp(5, 8)
    executor.save(tmp_path / "attend.bkt", q, k)
    told = [
        executor.explain(q, k, rules=True),
        bucketjit.load(tmp_path / "attend.bkt").explain(q, k, rules=True),
        Attention().__call__.with_buckets([8]).explain(q, k, rules=True),
    ]
    for each in told:
        rule = r"\n  masked: 1 operation\n  program: .*\n  rule: reduce_max of q?"
        assert re.search(rule, str(each))
        assert "-inf along k" in str(each)
        assert each._repr_html_() == f"<pre>{html.escape(str(each))}</pre>"
    assert "\n  rule: " not in str(executor.explain(q, k)) and executor.explain(q, k) == told[0]
    decides = BucketedExec(lambda x: x * 2 if x.shape[0] > 4 else x).with_pow2()
    assert "\n  holds for: batch >= 5" in str(decides.explain(ramp(6), rules=True))
    assert "batch >= 5" not in str(decides.explain(ramp(6)))
    with pytest.raises(SpecError, match="explain: rules must be True or False, got 'all'"):
        executor.explain(q, k, rules="all")  # type: ignore[arg-type]


def test_a_parameter_named_rules_gets_that_keyword(tmp_path: Path) -> None:
    """By position or by keyword, also of a saved function and of a wrapper."""

    def scaled(x: Any, rules: bool = True) -> Any:
        return jnp.sum(x + 1) if rules else x

    options: Any = {"static_argnames": "rules", "dynamic_axes": ("n", None), "buckets": "pow2"}
    for fn in (bucketjit.jit(scaled, **options), bucketjit.integrations.nnx.jit(scaled, **options)):
        masked = [fn.explain(ramp(5), rules=rules).masked for rules in (True, False)]
        assert masked == [fn.explain(ramp(5)).masked, fn.explain(ramp(5), False).masked]
        assert masked[0] and not masked[1]

    fn = bucketjit.jit(lambda x, *, rules: x * rules, dynamic_axes={"x": "n"}, buckets=[8])
    fn.save(tmp_path / "times.bkt", ramp(5), rules=jnp.float32(2))
    for each in (fn, bucketjit.load(tmp_path / "times.bkt")):
        assert each.explain(ramp(5), rules=np.float32(2)).bucket == {"n": 8}


@pytest.mark.parametrize(
    ("fn", "x", "lines"),
    [
        (jnp.sum, ramp(8), ["runs padded, in bucket n=8", "padding: none, the sizes fill the"]),
        (
            lambda x: sum(row for row in x),
            ramp(5),
            ["runs exact, without padding", "why: a Python loop", "what to do: loop with jax.lax"],
        ),
    ],
)
def test_what_runs_comes_first_and_why_not(fn: Any, x: Any, lines: list[str]) -> None:
    told = str(bucketjit.jit(fn, dynamic_axes="n", buckets="pow2").explain(x)).split("\n")
    assert f" {lines[0]}" in told[0]
    for line, part in zip(told[1:], lines[1:], strict=False):
        assert line.startswith(f"  {part}")


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
    assert re.search(rf"^a Python loop .*range\(x.shape\[0\]\)\) {line}$", told.reason)
    assert told.remedy
    vectors = BucketedExec(lambda x: jnp.linalg.eigh(x)[1], dynamic_axes="n, n").with_pow2()
    told = vectors.explain(np.eye(3, dtype=np.float32))
    assert told.kind == "exact" and told.reason.startswith("eigh: ") and "eigvalsh" in told.remedy
    assert "\n  why: eigh" in str(told)
    assert "no strategy" in BucketedExec(lambda x: x).explain(ramp(3)).reason
    same = BucketedExec(lambda x: x, dynamic_axes="n").with_pow2()
    assert "size 0" in same.explain(ramp(0)).reason


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
