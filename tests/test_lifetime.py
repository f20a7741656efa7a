"""An executor that its own function knows is freed with the last reference from outside.

So it is with methods (``self.step = BucketedExec(self._step)``): what the executor keeps leads back
to it, and the garbage collector has to see all of the way.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Manifest, metrics, strategies
from tests.comparison import ramp

Method = Callable[[Any], Any]
Configure = Callable[[BucketedExec], BucketedExec]


class Model:
    """Holds an executor of its own method."""

    def __init__(self, method: Method, configure: Configure) -> None:
        self.method = method
        self.forward = configure(BucketedExec(self.apply, dynamic_axes="b"))

    def apply(self, x: Any) -> Any:
        return self.method(x)


def masked(x: Any) -> Any:
    return x * 2


def paired(x: Any) -> Any:
    return x / math.sqrt(x.shape[0])


def exact(x: Any) -> Any:
    return jnp.linalg.eigh(x[:, None] * x)[1]  # whose signs depend on the padding


def loss(x: Any) -> Any:
    return (x**2).sum()


def fails(x: Any) -> Any:
    raise ValueError("no")


def pow2(executor: BucketedExec) -> BucketedExec:
    return executor.with_pow2()


def _in_background(process: bool) -> Configure:
    return lambda e: e.with_pow2().with_background_compile(process=process)


def call(model: Model, tmp_path: Path) -> None:
    for n in (64, 5, 6, 3):
        model.forward(ramp(n))
    model.forward.wait_for_compiles(60)


def call_exact(model: Model, tmp_path: Path) -> None:
    call(model, tmp_path)
    assert any(bucket.exact for bucket in model.forward.stats().buckets)


def fail(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"):
        model.forward(ramp(3))


def differentiate(model: Model, tmp_path: Path) -> None:
    for n in (5, 6, 3):
        jax.grad(model.forward)(ramp(n))
        jax.jit(jax.value_and_grad(model.forward))(ramp(n))


def transform(model: Model, tmp_path: Path) -> None:
    jax.jit(lambda x: model.forward(x) + 1)(ramp(3))
    jax.vmap(model.forward)(np.ones((2, 3), np.float32))


def explain(model: Model, tmp_path: Path) -> None:
    model.forward.explain(ramp(5))
    model.forward(ramp(5))
    print(model.forward, model.forward.report(), model.forward.stats())


def warm_up(model: Model, tmp_path: Path) -> None:
    model.forward.warmup(ramp(4), sizes={"b": range(1, 9)}, progress=False)


def write_down(model: Model, tmp_path: Path) -> None:
    model.forward(ramp(4))
    model.forward.save_manifest(tmp_path / "manifest.json")
    model.forward.warmup(Manifest.load(tmp_path / "manifest.json"), progress=False)


def keep(model: Model, tmp_path: Path) -> None:
    model.forward = model.forward.with_persistence(tmp_path)
    call(model, tmp_path)


def scrape(model: Model, tmp_path: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    metrics.prometheus(model.forward, registry=registry)
    model.forward(ramp(4))
    prometheus_client.generate_latest(registry)


@pytest.mark.parametrize(
    ("method", "configure", "use"),
    [
        pytest.param(masked, pow2, call, id="masked"),
        pytest.param(paired, pow2, call, id="paired"),
        pytest.param(exact, pow2, call_exact, id="fallback"),
        pytest.param(masked, lambda e: e, call, id="exact"),
        pytest.param(fails, pow2, fail, id="error"),
        pytest.param(masked, _in_background(False), call, id="background"),
        pytest.param(paired, _in_background(False), call, id="background-paired"),
        pytest.param(exact, _in_background(False), call_exact, id="background-fallback"),
        pytest.param(paired, _in_background(True), call, id="background-process"),
        pytest.param(loss, pow2, differentiate, id="derivatives"),
        pytest.param(masked, pow2, transform, id="transformed"),
        pytest.param(masked, pow2, explain, id="explained"),
        pytest.param(paired, pow2, warm_up, id="warmed-up"),
        pytest.param(masked, pow2, write_down, id="manifest"),
        pytest.param(masked, pow2, scrape, id="metrics"),
        pytest.param(
            paired,
            lambda e: e.with_strategy(
                strategies.Optimal.fit([3, 5, 6, 64], k=2)
            ).with_ahead_compile(),
            call,
            id="ahead",
        ),
        pytest.param(masked, lambda e: e.with_pow2(max=4, overflow="split"), call, id="split"),
        pytest.param(
            paired,
            lambda e: e.with_strategy(strategies.Adaptive(strategies.Pow2(), k=4)),
            call,
            id="adaptive",
        ),
        pytest.param(paired, pow2, keep, id="persistence"),
    ],
)
def test_nothing_outlives_its_last_reference(
    method: Method,
    configure: Configure,
    use: Callable[[Model, Path], None],
    tmp_path: Path,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Model(method, configure)
        use(model, tmp_path)
    alive = weakref.ref(model)
    del model
    deadline = time.monotonic() + 60
    while alive() is not None and time.monotonic() < deadline:
        gc.collect()  # a thread may be about to let go of what it did
        time.sleep(0.01)
    assert alive() is None
