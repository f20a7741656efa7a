"""Compiles and live executables are counted, not assumed: one per bucket, never one per size."""

import gc
import math
import textwrap
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from tests.alone import run_python
from tests.comparison import ramp, unrolled

Count = Callable[[], int]


def test_the_count_sees_what_a_padding_wrapper_costs(xla_compiles: Count) -> None:
    """The count below means something: these are the calls the executor must not make."""
    x = jnp.asarray(ramp(37))
    before = xla_compiles()
    jnp.pad(x, (0, 27))
    assert xla_compiles() == before + 1
    jnp.asarray(ramp(38))
    x[:36].block_until_ready()
    assert xla_compiles() > before + 1


def _symbolic_outputs(x: Any) -> Any:
    return {
        "same": jnp.sin(x),
        "twice": jnp.concatenate([x, x]),
        "rest": x[1:],
        "total": x.sum(),
        "size": x.shape[0],
        "outer": x[:, None] * x[None, :8] if x.ndim == 1 and x.shape[0] >= 8 else x,
    }


def test_300_calls_over_200_sizes_compile_once_per_bucket(xla_compiles: Count) -> None:
    rng = np.random.default_rng(0)
    distinct = rng.permutation(np.arange(8, 500))[:200]
    stream = [*distinct, *rng.choice(distinct, 100)]
    inputs = [ramp(n) if i % 2 else jnp.asarray(ramp(n)) for i, n in enumerate(stream)]
    executor = BucketedExec(_symbolic_outputs).with_pow2()
    before = xla_compiles()
    results = [executor(x) for x in inputs]
    compiled = xla_compiles() - before
    used = {1 << (int(n) - 1).bit_length() for n in stream}
    assert len(set(map(int, stream))) == 200
    assert compiled == executor.cache_size() == executor.stats().compiles == len(used)
    for n, x, result in zip(stream, inputs, results, strict=True):
        host = np.asarray(x)
        np.testing.assert_array_equal(np.asarray(result["twice"]), np.concatenate([host, host]))
        np.testing.assert_array_equal(np.asarray(result["rest"]), host[1:])
        assert int(result["size"]) == n
        assert result["same"].shape == (n,)
        assert result["outer"].shape == (n, 8)
        np.testing.assert_allclose(np.asarray(result["total"]), host.sum(), rtol=1e-5)


STREAMS: dict[str, tuple[Callable[..., Any], Any, Callable[[int, int], tuple[Any, ...]]]] = {
    "two axes": (lambda x: (x * 2, x.T), "b, s", lambda b, s: (ramp(b, s),)),
    "parameters": (
        lambda p, x: x @ p["w"] + p["b"],
        (None, "b, _"),
        lambda b, s: ({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}, ramp(b, 3)),
    ),
    "a size argument": (lambda x, n: x[0] * jnp.ones(n), ("b", "n"), lambda b, s: (ramp(b), s)),
    "typed keys": (
        lambda k, x: (k, x * 2),
        ("b", "b"),
        lambda b, s: (jax.random.split(jax.random.key(b), b), ramp(b)),
    ),
    "an expression": (lambda x: x * 2, "2*b + 1", lambda b, s: (ramp(2 * b + 1),)),
    "scalar result": (lambda x: x.sum(), "b", lambda b, s: (ramp(b),)),
    "jax in": (lambda x: x + 1, "b, s", lambda b, s: (jnp.asarray(ramp(b, s)),)),
    "Fortran in": (lambda x: x + 1, "b, s", lambda b, s: (np.asfortranarray(ramp(b, s)),)),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", STREAMS)
def test_no_call_compiles_for_its_size(name: str, xla_compiles: Count) -> None:
    fn, spec, make = STREAMS[name]
    executor = BucketedExec(fn, dynamic_axes=spec).with_pow2()
    sizes = [(3, 5), (4, 8), (3, 7), (4, 5), (3, 6), (2, 5), (7, 9), (5, 11), (8, 16), (6, 13)]
    inputs = [make(b, s) for b, s in sizes] + [make(b, s) for b, s in sizes]
    before = xla_compiles()
    for args in inputs:
        executor(*args)
    assert xla_compiles() - before == executor.cache_size() == executor.stats().compiles <= 4


def test_committed_arrays_compile_no_more_than_they_count(xla_compiles: Count) -> None:
    """As jit does, one bucket compiles once more for arguments committed to a device."""
    device = jax.devices()[0]
    inputs = [
        make(ramp(n))
        for n in (3, 4, 3, 4)
        for make in (np.asarray, jnp.asarray, lambda x: jax.device_put(x, device))
    ]
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    before = xla_compiles()
    results = [executor(x) for x in inputs]
    assert xla_compiles() - before == executor.stats().compiles == 2
    assert [r.committed for r in results] == [getattr(x, "committed", False) for x in inputs]


@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
@pytest.mark.parametrize(
    "executor",
    [BucketedExec(lambda x: x * 2), BucketedExec(unrolled).with_pow2()],
    ids=["no strategy", "a fallback"],
)
def test_exact_runs_compile_once_per_size(executor: BucketedExec, xla_compiles: Count) -> None:
    before = xla_compiles()
    for n in (3, 4, 3, 4, 3):
        executor(ramp(n))
    assert xla_compiles() - before == executor.stats().compiles == executor.cache_size() == 2


def test_concrete_traces_compile_nothing(xla_compiles: Count) -> None:
    executor = BucketedExec(_scaled).with_pow2()
    for n in (3, 5):
        executor(ramp(n))
    before = xla_compiles()
    for n in (3, 4, 5, 6, 7, 8, 3):
        executor(ramp(n))
    assert xla_compiles() == before


def _scaled(x: Any) -> Any:
    return x * math.sqrt(x.shape[0]) + np.arange(x.shape[0], dtype=np.float32)


def test_a_training_loop_compiles_once_per_bucket(xla_compiles: Count) -> None:
    """The results of one call are the arguments of the next, in every leaf."""

    def step(state: Any, x: Any, y: Any) -> Any:
        loss = lambda w: jnp.mean((x @ w["w"] + w["b"] - y) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)
        return {"params": params, "step": state["step"] + 1}, value

    executor = BucketedExec(step, donate_argnums=0).with_pow2()
    batches = [(ramp(n, 3) / 10, ramp(n) / 10) for n in (8, 8, 8, 5) * 3]
    state: Any = {"params": {"w": np.zeros(3, np.float32), "b": 0.0}, "step": 0}
    before = xla_compiles()
    losses = []
    for x, y in batches:
        state, value = executor(state, x, y)
        losses.append(value)
    # Once more for the first step, whose state is made of NumPy arrays and Python numbers.
    assert xla_compiles() - before == executor.stats().compiles == executor.cache_size() <= 2
    assert float(losses[-1]) < float(losses[0])


def test_tracing_happens_once_per_signature() -> None:
    traced = []

    def fn(x: Any) -> Any:
        traced.append(x.shape)
        return x * 2

    executor = BucketedExec(fn).with_pow2()
    for n in (3, 4, 5, 9, 17, 33):
        executor(ramp(n))
    assert len(traced) == 1
    for n in (3, 9):
        executor(ramp(n, dtype=int))
    assert len(traced) == 2


def test_a_function_that_raises_is_not_traced_over_and_over() -> None:
    """Guesses about axes must not turn one error into dozens of runs of the function."""
    traced = []

    def fn(*xs: Any) -> Any:
        traced.append(1)
        raise ValueError("by itself")

    executor = BucketedExec(fn).with_pow2()
    with pytest.raises(ValueError, match="by itself"):
        executor(*(ramp(n) for n in range(3, 9)))
    assert len(traced) <= 4


# --- executables that are dropped --------------------------------------------------------------


def test_eviction_frees_executables(live_executables: Count) -> None:
    executor = BucketedExec(lambda x: x * 2 + 1).with_pow2().with_maxsize(2)
    for n in (1, 2, 4, 8, 16, 32, 64, 1, 2, 4):
        executor(ramp(n))
    assert executor.cache_size() == 2
    assert live_executables() == 2
    assert executor.stats().evictions == 8
    executor.cache_clear()
    assert live_executables() == 0
    executor(ramp(4))
    assert live_executables() == 1


def test_deleting_an_executor_frees_everything(live_executables: Count) -> None:
    big = np.ones(1000, np.float32)
    weak: Any = None

    def make() -> None:
        nonlocal weak
        constant = jax.device_put(big)
        weak = weakref.ref(constant)
        executor = BucketedExec(lambda x: x.sum() + constant).with_pow2()
        for n in (1, 2, 4, 8):
            executor(ramp(n))
        with jax.enable_x64(True):
            executor(ramp(3))

    make()
    assert live_executables() == 0
    gc.collect()
    assert weak() is None


def test_results_do_not_keep_executables(live_executables: Count) -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    kept = [executor(ramp(n)) for n in (3, 5, 9)]
    del executor
    assert live_executables() == 0
    np.testing.assert_array_equal(kept[0], 2 * ramp(3))


# --- more than one device ----------------------------------------------------------------------

_TWO_DEVICES = """
    import jax, numpy as np
    from bucketjit import BucketedExec
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: events.append(event) if "backend_compile" in event else None
    )
    first, second = jax.devices()
    executor = BucketedExec(lambda x, w: (x * w, x.sum()), dynamic_axes=("b", None)).with_pow2()
    w = np.float32(3)
    for n in (3, 4, 3):
        for device in (first, second, None, second):
            x = np.arange(n, dtype=np.float32)
            if device is not None:
                x = jax.device_put(x, device)
            a, b = executor(x, w)
            want = jax.jit(lambda x, w: (x * w, x.sum()))(x, w)
            np.testing.assert_array_equal(a, 3 * np.arange(n))
            assert (a.devices(), b.devices()) == (want[0].devices(), want[1].devices())
            assert (a.committed, b.committed) == (want[0].committed, want[1].committed)
    try:
        executor(jax.device_put(np.ones(3, np.float32), first), jax.device_put(w, second))
    except ValueError as error:
        assert "device" in str(error)
    else:
        raise AssertionError("arrays on two devices were taken")
    fresh = BucketedExec(lambda x, w: x * w).with_pow2()
    for n in (3, 9, 17):
        try:  # in a bucket that is not compiled yet
            fresh(jax.device_put(np.ones(n, np.float32), first), jax.device_put(w, second))
        except ValueError as error:
            assert "device" in str(error)
        fresh(np.ones(n, np.float32), w)
    assert fresh.stats().fallback_calls == 0
    with jax.default_device(second):
        a, b = executor(np.ones(3, np.float32), w)
        assert a.devices() == b.devices() == {second}, a.devices()
    a, b = executor(np.ones(3, np.float32), w)
    assert a.devices() == {first}
    print("two devices: fine")
"""


def test_two_devices() -> None:
    flags = "--xla_force_host_platform_device_count=2"
    done = run_python("-c", textwrap.dedent(_TWO_DEVICES), XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "two devices: fine" in done.stdout
