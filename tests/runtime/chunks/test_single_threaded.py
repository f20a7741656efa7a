"""Chunks that keep to the thread that runs them, on a device that JAX does not show."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Padded
from bucketjit._cores import helper_threads, placement, single_threaded
from bucketjit._jax.cpu_client import single_threaded_device
from tests.comparison import assert_same, ramp

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or single_threaded_device() is None,
    reason="there is one on a CPU of several cores whose threads can be given cores",
)
same = functools.partial(assert_same, rtol=1e-5)
LOG = {"b": [2, 4, 8], "s": [5, 12, 16]}


def layer(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"]) @ params["v"], {"sums": x.sum(-1)}


def new_params(scale: float = 1.0) -> dict[str, jax.Array]:
    w, v = ramp(6, 8) / 1e4, ramp(8, 3) / 10
    return {"w": jnp.asarray(w * scale), "v": jnp.asarray(v * scale)}


def by_rows(fn: Any = layer, axes: Any = (None, "b, s, _"), log: Any = LOG, **options: Any) -> Any:
    return BucketedExec(fn, dynamic_axes=axes, **options).with_fitted_plan(log, 2, split="b")


def is_apart(executor: Any) -> list[bool]:
    """Whether each executable runs on the device that JAX does not show."""
    found = []
    for _, entry in executor._engine.cache.items():
        [device] = entry.compiled.runtime_executable().local_devices()
        found.append(device not in jax.devices())
    return found


@pytest.mark.parametrize("sizes", [(2, 5), (8, 16), (3, 12), (1, 7), (1, 1), (5, 16)])
def test_results_are_those_of_jit_where_jax_puts_them(sizes: tuple[int, int]) -> None:
    executor, params = by_rows(), new_params()
    x = ramp(*sizes, 6)
    for _ in range(3):
        result = executor(params, x)
        same(result, jax.jit(layer)(params, x))
        for leaf in jax.tree.leaves(result):
            assert leaf.devices() == {jax.devices()[0]}
            assert not leaf.committed
    assert all(is_apart(executor))
    jax.jit(lambda tree: jax.tree.map(jnp.sum, tree))(result)  # it goes with other arrays


def test_it_is_for_chunks_only() -> None:
    x, params = ramp(8, 16, 6), new_params()
    whole = BucketedExec(layer, dynamic_axes=(None, "b, s, _"))
    for executor in (
        whole.with_fitted_plan(LOG, 2),
        whole.with_buckets([4], "b", overflow="split").with_pow2("s"),
    ):
        same(executor(params, x), jax.jit(layer)(params, x))
        assert not any(is_apart(executor))


def test_few_chunks_share_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "cores", lambda: 64)
    executor, params = by_rows(), new_params()
    x = ramp(8, 16, 6)
    same(executor(params, x), jax.jit(layer)(params, x))
    assert is_apart(executor) == [False]


@pytest.mark.parametrize("large", ["product", "convolution"])
def test_large_operations_are_shared(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(w: Any, x: Any) -> Any:
        return x @ w

    def convolution(w: Any, x: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w[None], (1,), "SAME", dimension_numbers=DIMS)

    fn = product if large == "product" else convolution
    x, w = ramp(3, 16, 6), jnp.asarray(ramp(6, 4))
    flops = 2 * 16 * 6 * 4  # of a chunk
    for most, apart in ((flops, True), (flops - 1, False)):
        monkeypatch.setattr(placement, "_MOST_FLOPS", most)
        executor = by_rows(fn)
        same(executor(w, x), jax.jit(fn)(w, x))
        assert is_apart(executor) == [apart]


DIMS = ("NWC", "WIO", "NWC")


def test_arrays_committed_to_the_default_device_stay_so() -> None:
    executor, params = by_rows(), new_params()
    x = ramp(3, 9, 6)
    executor(params, x)
    placed = jax.device_put(params, jax.devices()[0])
    for args in ((placed, x), (params, jax.device_put(x, jax.devices()[0]))):
        for _ in range(2):
            result = executor(*args)
            same(result, jax.jit(layer)(*args))
            assert result[0].committed
    assert executor.stats().compiles == 1


@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_parameters_of_numpy_and_scalars(kind: str) -> None:
    def scaled(params: Any, x: Any, factor: Any) -> Any:
        return x @ params * factor

    executor = by_rows(scaled, (None, "b, s, _", None))
    w = ramp(6, 3)
    for step in range(4):
        params = w if kind == "numpy" else jnp.asarray(w)
        x = ramp(3, 9, 6)
        x = x if step % 2 else jnp.asarray(x)
        result = executor(params, x, 0.5 * step)
        same(result, jax.jit(scaled)(params, x, 0.5 * step))
        w += 1  # arrays of NumPy's may be written to
    assert executor.stats().compiles == 1
    assert all(is_apart(executor))


def test_parameters_that_change_with_every_call() -> None:
    executor = by_rows()
    x = ramp(4, 12, 6)
    executor(new_params(), x)
    compiled = executor.stats().compiles
    for step in range(50):  # new arrays take the places of old ones
        params = new_params(step / 10)
        same(executor(params, x), jax.jit(layer)(params, x))
        params["v"] = params["v"] + 1  # one of them
        same(executor(params, x), jax.jit(layer)(params, x))
        del params
    assert executor.stats().compiles == compiled


def test_parameters_go_when_nobody_holds_them() -> None:
    executor, params = by_rows(), new_params()
    x = ramp(4, 12, 6)
    executor(params, x)
    executor(params, x)
    gone = [weakref.ref(leaf) for leaf in jax.tree.leaves(params)]
    there = [weakref.ref(single_threaded._borrowed._lent[id(p())].array) for p in gone]
    del params
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert [ref() for ref in there] == [None, None]


def test_deleted_parameters_are_refused() -> None:
    executor, params = by_rows(), new_params()
    x = ramp(4, 12, 6)
    expected = executor(params, x)
    params["w"].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        executor(params, x)
    assert_same(executor(new_params(), x), expected)


def test_parameters_that_another_function_takes_over() -> None:
    executor, params = by_rows(), new_params()
    x = ramp(4, 12, 6)
    step = jax.jit(lambda params: jax.tree.map(lambda p: p * 2, params), donate_argnums=0)
    for _ in range(4):
        expected = jax.jit(layer)(params, x)
        same(executor(params, x), expected)
        params = step(params)


def test_what_is_donated_runs_as_ever() -> None:
    def moved(state: Any, x: Any) -> Any:
        return state + 1, x * 2

    executor = by_rows(moved, ("b, s, _", "b, s, _"), donate_argnums=0)
    state, x = jnp.asarray(ramp(4, 12, 6)), ramp(4, 12, 6)
    expected = jax.jit(moved)(ramp(4, 12, 6), x)
    same(executor(state, x), expected)
    assert state.is_deleted()
    assert not any(is_apart(executor))


def test_keys_and_callbacks_run_as_ever() -> None:
    def noisy(key: Any, x: Any) -> Any:
        return x + jax.random.normal(key, (6,))

    def called_back(w: Any, x: Any) -> Any:
        like = jax.ShapeDtypeStruct(w.shape, w.dtype)
        return x @ jax.pure_callback(lambda w: np.asarray(w) * 2, like, w)

    x = ramp(3, 9, 6)
    for fn, first in ((noisy, jax.random.key(3)), (called_back, jnp.asarray(ramp(6, 2)))):
        executor = by_rows(fn)
        same(executor(first, x), jax.jit(fn)(first, x))
        assert not any(is_apart(executor))


def test_closed_over_parameters() -> None:
    params = new_params()
    executor = by_rows(lambda x: layer(params, x), "b, s, _")
    for sizes in ((3, 9), (8, 16), (1, 3)):
        x = ramp(*sizes, 6)
        same(executor(x), jax.jit(layer)(params, x))
    assert all(is_apart(executor))


def test_other_static_arguments_compile_anew() -> None:
    def powered(params: Any, x: Any, power: int) -> Any:
        return (x @ params) ** power

    executor = by_rows(powered, (None, "b, s, _", None), static_argnums=2)
    w, x = jnp.asarray(ramp(6, 3)), ramp(3, 9, 6)
    jitted = jax.jit(powered, static_argnums=2)
    for power in (2, 3, 2, 3):
        same(executor(w, x, power), jitted(w, x, power))
    assert executor.stats().compiles == 2


def test_numbers_of_64_bits() -> None:
    executor, x = by_rows(), ramp(3, 9, 6).astype(np.float64)
    params = new_params()
    same(executor(params, x), jax.jit(layer)(params, x))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda p: p.astype(np.float64), params)
        same(executor(wide, x), jax.jit(layer)(wide, x))
    same(executor(params, x), jax.jit(layer)(params, x))


def test_a_pinned_thread_that_calls_first_has_no_say() -> None:
    def pinned() -> int:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        return helper_threads.cores()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(pinned).result() == helper_threads.cores() > 1


def test_values_that_are_not_finite() -> None:
    x, params = ramp(3, 9, 6), new_params()
    x[1, 2] = np.nan
    x[2, 0, 0] = np.inf
    same(by_rows()(params, x), jax.jit(layer)(params, x))


def test_gradients() -> None:
    executor, params = by_rows(), new_params()
    x = ramp(3, 9, 6)

    def loss(fn: Any) -> Any:
        return jax.grad(lambda x: fn(params, x)[0].sum())(jnp.asarray(x))

    executor(params, x)
    for _ in range(2):
        same(loss(executor), loss(jax.jit(layer)))


def test_sixteen_threads() -> None:
    executor, params = by_rows(), new_params()
    wanted = {(b, s): jax.jit(layer)(params, ramp(b, s, 6)) for b in (1, 2, 5) for s in (3, 9, 16)}
    start = threading.Barrier(16)

    def work(turn: int) -> None:
        start.wait()
        own = new_params() if turn % 2 else params
        for b, s in list(wanted)[turn % 3 :] * 3:
            same(executor(own, ramp(b, s, 6)), wanted[b, s])

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(work, turn) for turn in range(16)]:
            done.result()
    assert all(is_apart(executor))


def test_all_chunks_of_a_new_size_are_counted() -> None:
    executor, params = by_rows(log={"b": [4], "s": [16]}), new_params()
    for calls, (b, s) in enumerate([(4, 16), (5, 16), (3, 7), (8, 7), (1, 7), (2, 9)]):
        before = executor.stats()
        executor(params, ramp(b, s, 6))
        after = executor.stats()
        assert after.calls - before.calls == b
        assert after.compiles == 1
        assert after.hits - before.hits == (b if calls else b - 1)


def test_files_hold_them(tmp_path: Any) -> None:
    params, x = new_params(), ramp(3, 9, 6)
    expected = jax.jit(layer)(params, x)
    for compiles in (1, 0):
        executor = by_rows().with_persistence(tmp_path)
        for _ in range(2):
            same(executor(params, x), expected)
        assert (executor.stats().compiles, executor.stats().loads) == (compiles, 1 - compiles)
        assert is_apart(executor) == [True]
    whole = BucketedExec(layer, dynamic_axes=(None, "b, s, _")).with_buckets([1], "b")
    whole = whole.with_buckets([12], "s").with_overflow("split", "b").with_persistence(tmp_path)
    same(whole(params, x), expected)
    assert (whole.stats().compiles, is_apart(whole)) == (1, [False])  # a file of its own


def test_another_process_compiles_them() -> None:
    executor, params = by_rows().with_background_compile(process=True), new_params()
    for sizes in ((3, 16), (2, 5), (4, 5)):
        x = ramp(*sizes, 6)
        same(executor(params, x), jax.jit(layer)(params, x))
        assert executor.wait_for_compiles(120)
    assert all(is_apart(executor))


def test_a_system_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "single_threaded_device", lambda: None)
    executor, params = by_rows(), new_params()
    x = ramp(3, 9, 6)
    same(executor(params, x), jax.jit(layer)(params, x))
    assert is_apart(executor) == [False]


def test_helpers_that_do_not_start_leave_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def fails_at_second(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fails_at_second)
    helpers = helper_threads.Helpers(3)
    helpers.start()
    assert helpers.count == 1
    monkeypatch.setattr(helper_threads, "_helpers", lambda process: helpers)
    meet = threading.Barrier(2)
    assert len({*helper_threads.run_together([lambda: meet.wait(30)] * 2)}) == 2


_ALONE = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
from bucketjit import BucketedExec

def layer(w, x):
    return jnp.tanh(x @ w)

log = {"b": [2, 4], "s": [5, 12]}
executor = BucketedExec(layer, dynamic_axes=(None, "b, s, _")).with_fitted_plan(log, 2, split="b")
w, x = jnp.ones((6, 3)) / 7, np.ones((3, 9, 6), np.float32)
expected = np.tanh(x @ np.asarray(w))
"""
_TWO_DEVICES = """
first, second = jax.devices()
for _ in range(2):
    for device in (second, first):
        y = executor(jax.device_put(w, device), x)
        assert y.devices() == {device} and y.committed, y.devices()
        np.testing.assert_allclose(y, expected, rtol=1e-5)
    with jax.default_device(second):
        y = executor(np.asarray(w), x)
        assert y.devices() == {second}, y.devices()
        np.testing.assert_allclose(y, expected, rtol=1e-5)
    y = executor(w, x)
    assert y.devices() == {first} and not y.committed
    for mesh in (jax.make_mesh((1,), ("d",)), jax.sharding.Mesh([second], ("d",))):
        with jax.set_mesh(mesh):
            y = executor(w, x)
            assert y.devices() == jax.jit(layer)(w, x).devices()
            np.testing.assert_allclose(y, expected, rtol=1e-5)
            other = executor.with_pow2("s")  # which has not compiled yet
            np.testing.assert_allclose(other(w, x), expected, rtol=1e-5)
print("fine")
"""
_A_FORK = """
np.testing.assert_allclose(executor(w, x), expected, rtol=1e-5)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for _ in range(2):
    np.testing.assert_allclose(executor(w, x), expected, rtol=1e-5)
print("fine", flush=True)
os._exit(0)
"""
_NO_RIGHTS = """
def refuse(*_):
    raise PermissionError("not here")

os.sched_setaffinity = refuse
np.testing.assert_allclose(executor(w, x), expected, rtol=1e-5)
print("fine")
"""
SCRIPTS = {"two devices": _TWO_DEVICES, "a fork": _A_FORK, "no rights": _NO_RIGHTS}


@pytest.mark.parametrize("what", SCRIPTS)
def test_in_a_process_of_its_own(what: str) -> None:
    script, count = SCRIPTS[what], 2 if what == "two devices" else 1
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_ALONE + script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-3000:]
    assert done.stderr == ""


def shared(params: Any, x: Any) -> Any:
    """Of its results, some are the same for all chunks, with open axes and without."""
    weights = jnp.tanh(jnp.arange(x.shape[1]) * params["w"].sum())
    return {
        "rows": x * weights[:, None],
        "weights": weights,
        "none": params["v"].sum(),
        "weak": jnp.where(params["v"].sum() > 0, 1.0, 2.0),
        "weak rows": jnp.where(x[..., 0] > 2, 1.0, 2.0),
    }


@pytest.mark.parametrize("committed", [False, True])
def test_results_that_all_chunks_share(committed: bool) -> None:
    executor, params = by_rows(shared), new_params()
    if committed:
        params = jax.device_put(params, jax.devices()[0])
    for sizes in ((3, 9), (2, 16), (3, 9), (1, 9), (4, 5)):
        x = ramp(*sizes, 6)
        expected = jax.jit(shared)(params, x)
        same(executor(params, x), expected)
        for _ in range(2):
            for out in ("numpy", "padded"):
                kind = np.ndarray if out == "numpy" else (Padded, jax.Array)
                got = of_outs()[out](params, x)
                for name, value in got.items():
                    assert isinstance(value, kind), name
                    np.testing.assert_allclose(value, expected[name], rtol=1e-5)


@functools.cache
def of_outs() -> dict[str, Any]:
    return {out: by_rows(shared, out=out) for out in ("numpy", "padded")}


def test_results_go_into_other_calls() -> None:
    inner, outer, params = by_rows(shared, out="padded"), by_rows(), new_params()
    x = ramp(3, 9, 6)
    for _ in range(3):
        got = outer(params, inner(params, x)["rows"])
        same(got, jax.jit(layer)(params, jax.jit(shared)(params, x)["rows"]))


def scaled(params: Any, x: Any, bias: Any, n: Any, *, flip: bool, more: Any) -> Any:
    y = jnp.tanh(x @ params["w"]) + bias[None, :, None] / n + more["rows"][:, None, None]
    return -y if flip else y


AXES = {
    "params": None,
    "x": "b, s, _",
    "bias": "s",
    "n": "s",
    "more": {"rows": "b", "unused": None},
}


def with_garbage(x: np.ndarray) -> Padded:
    return Padded(
        jnp.asarray(np.pad(x, 2, constant_values=np.nan)[(slice(2, None),) * x.ndim]), x.shape
    )


@pytest.mark.parametrize("kind", ["numpy", "jax", "padded", "committed"])
@pytest.mark.parametrize("n", [int, np.int64])
def test_arguments_that_chunks_have_in_common(kind: str, n: Any) -> None:
    place = {
        "numpy": np.asarray,
        "jax": jnp.asarray,
        "padded": with_garbage,
        "committed": lambda x: jax.device_put(x, jax.devices()[0]),
    }[kind]
    executor = by_rows(scaled, AXES, static_argnames="flip")
    plain = jax.jit(scaled, static_argnames="flip")
    for b, s, flip in [(3, 9, False), (3, 9, True), (4, 11, True), (1, 9, True), (3, 9, False)]:
        params, x, bias = new_params(1.0 + s), ramp(b, s, 6) / 100, ramp(s)
        given = {"rows": place(ramp(b)), "unused": np.ones(2, np.float32)}
        for _ in range(2):
            result = executor(params, place(x), place(bias), n(s), flip=flip, more=given)
            whole = {**given, "rows": ramp(b)}
            if kind == "committed":
                bias = place(bias)
            same(result, plain(params, x, bias, s, flip=flip, more=whole))
    assert all(is_apart(executor))


def test_what_chunks_have_in_common_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, params, x = by_rows(), new_params(), ramp(7, 9, 6)
    executor(params, x)
    seen: list[str] = []
    for name in ("bind", "to_host", "__call__"):
        method = getattr(single_threaded.SingleThreaded, name)

        def spied(self: Any, *args: Any, name: str = name, method: Any = method) -> Any:
            seen.append(name)
            return method(self, *args)

        monkeypatch.setattr(single_threaded.SingleThreaded, name, spied)
    executor = by_rows()
    for _ in range(3):
        seen.clear()
        same(executor(params, x), jax.jit(layer)(params, x))
    assert seen == ["bind"]
    seen.clear()
    with jax.default_device(jax.devices()[0]):
        same(executor(params, x), jax.jit(layer)(params, x))
    assert executor.stats().calls == 28


def test_chunks_of_two_sizes_and_two_variables() -> None:
    executor = BucketedExec(layer, dynamic_axes=(None, "b, s, _")).with_fitted_plan(
        LOG, 2, split="b"
    )
    params, two = new_params(), executor.with_buckets([3], "b", overflow="split")
    for b in (7, 6, 2, 7):
        same(two(params, ramp(b, 9, 6)), jax.jit(layer)(params, ramp(b, 9, 6)))
    with jax.debug_nans(True):  # nobody helps, and nothing is shared
        same(two(params, ramp(7, 9, 6)), jax.jit(layer)(params, ramp(7, 9, 6)))


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
@pytest.mark.parametrize("more", [jnp.ones(3), 0.5])
def test_parameters_of_another_tree(kind: Any, more: Any) -> None:
    def maybe(params: Any, x: Any) -> Any:
        y = x @ params["w"]
        return y if params["z"] is None else y + jnp.sum(params["z"])

    w, x = kind(np.ones((6, 4), np.float32)), ramp(7, 9, 6)
    trees = [{"w": w, "z": None}, {"w": w, "z": more}]
    for first, then in (trees, trees[::-1]):
        executor = by_rows(maybe)
        for params in (first, first, then, then, first):
            same(executor(params, x), jax.jit(maybe)(params, x))


def test_results_of_float0_that_all_chunks_share() -> None:
    def none(x: Any) -> Any:
        return x * 2, np.zeros((3,), jax.dtypes.float0)

    executor, x = by_rows(none, ("b, s, _",)), ramp(7, 9, 6)
    for _ in range(2):
        doubled, tangents = executor(x)
        same(doubled, jnp.asarray(x * 2))
        assert tangents.shape == (3,) and tangents.dtype == jax.dtypes.float0
