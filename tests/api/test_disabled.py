"""``BUCKETJIT_DISABLE`` and ``BUCKETJIT_LOG``."""

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit.errors import SpecError

X = np.arange(3, dtype=np.float32)


def repeated(x: Any, n: Any, how: str = "sum") -> Any:
    return getattr(jnp.repeat(x, n), how)(), jnp.zeros(n)


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKETJIT_DISABLE", "1")


@pytest.mark.usefixtures("disabled")
def test_a_disabled_executor_is_jit() -> None:
    traced = []

    def fn(x: Any, n: int, how: str) -> Any:
        traced.append(x.shape)
        return repeated(x, n, how)

    executor = bucketjit.jit(fn, static_argnames="how", dynamic_axes=("n", "k", None))
    for _ in range(2):
        total, zeros = executor(X, 2, "sum")
        assert (float(total), zeros.shape) == (6.0, (2,))
    assert float(executor(X, n=3, how="max")[0]) == 2.0
    assert traced == [(3,), (3,)]
    assert executor.cache_size() == 0
    stats = executor.stats()
    assert (stats.calls, stats.fallback_calls, stats.compiles) == (3, 3, 0)
    assert dict(stats.fallback_reasons) == {"BUCKETJIT_DISABLE is set: plain jit": 3}


def test_only_executors_made_then_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = bucketjit.jit(lambda x: x.sum())
    monkeypatch.setenv("BUCKETJIT_DISABLE", "yes")
    plain = executor.with_pow2()
    plain(X)
    executor(X)
    assert (plain.cache_size(), executor.cache_size()) == (0, 1)
    monkeypatch.setenv("BUCKETJIT_DISABLE", "0")
    again = bucketjit.jit(lambda x: x.sum())
    again(X)
    assert again.cache_size() == 1
    monkeypatch.setenv("BUCKETJIT_DISABLE", "maybe")
    with pytest.raises(SpecError, match="BUCKETJIT_DISABLE='maybe': expected 1 or 0"):
        bucketjit.jit(lambda x: x.sum())


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    logger = logging.getLogger("bucketjit")
    level = logger.level
    yield logger
    monkeypatch.setenv("BUCKETJIT_LOG", "")
    bucketjit.jit(lambda x: x)  # takes the handler away
    logger.setLevel(level)


@pytest.mark.filterwarnings("ignore::bucketjit.errors.InlinedWarning")
def test_events_are_printed_as_asked(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(names: str) -> str:
        monkeypatch.setenv("BUCKETJIT_LOG", names)
        executor = bucketjit.jit(lambda x: x * 2)
        executor(X)
        jax.jit(executor)(X)
        return capsys.readouterr().err

    compiles, fallbacks = printed("compiles"), printed("fallbacks")
    assert "<lambda>: compile batch=4" in compiles and "signature" not in compiles
    assert "inlined" not in compiles and "compile batch" not in fallbacks
    assert "<lambda>: inlined: is called inside jax.jit" in fallbacks
    both = printed("compiles, Fallbacks")
    assert both.count("compile batch=4") == 1
    everything = printed("all")
    assert "signature batch=3" in everything and "compile batch=4" in everything
    assert printed("") == ""
    monkeypatch.setenv("BUCKETJIT_LOG", "compile")
    with pytest.raises(SpecError, match="there is no 'compile'; expected compiles, fallbacks or"):
        bucketjit.jit(lambda x: x)


@pytest.mark.usefixtures("disabled")
def test_what_else_a_disabled_executor_does() -> None:
    executor = bucketjit.jit(lambda x: (x * x).sum(), out="numpy")
    assert isinstance(executor(X), np.ndarray)
    executor = bucketjit.jit(lambda x: x * 2, out="padded", donate_argnums=0)
    given = jnp.arange(3.0)
    np.testing.assert_array_equal(executor(executor(given)), 4 * X)
    assert given.is_deleted()
    executor = bucketjit.jit(lambda x: (x * x).sum(), copy_inputs=True)
    np.testing.assert_array_equal(jax.grad(executor)(X), 2 * X)
    assert "jit" in str(jax.make_jaxpr(executor)(X))
    told = executor.explain(X)
    assert (told.kind, told.bucket) == ("exact", told.sizes)
    assert told.reason.startswith("BUCKETJIT_DISABLE is set") and told.remedy
    assert list(map(float, executor.map([X, X[:2]]))) == [5, 1]
    assert executor.warmup(X, sizes={"batch": [4]}, progress=False).compiled == ()
    assert executor.stats().inlined_calls == 0
