"""The recipes of docs/kernels.md: values in interpret mode, at sizes that are no multiples."""

import ctypes
import functools
import shutil
import subprocess
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import bucketjit
from tests.test_docs import ROOT, run

IN_BUCKETS: Any = {"buckets": "pow2", "fallback": "error"}
SIZES = (70, 1, 5, 100, 129, 200, 250, 300)


@functools.cache
def recipe(name: str) -> Any:
    with pltpu.force_tpu_interpret_mode():
        return run(ROOT / "docs" / "kernels.md")[name]


def normal(*shape: int, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).normal(size=shape) / 4).astype(np.float32)


def three(*shape: int) -> list[Any]:
    return [normal(*shape, seed=seed) for seed in range(3)]


def plain(query: Any, key: Any, value: Any, allowed: Any = True) -> Any:
    scores = jnp.where(allowed, jnp.einsum("...qd,...kd->...qk", query, key), -jnp.inf)
    return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores), value)


def compare(fn: Any, want: Any, axes: Any, *arrays: Any, on: Any = None) -> None:
    """Values in a bucket and alone, and gradients in a bucket."""
    loss = lambda f: jax.grad(lambda *xs: (f(*xs) ** 2).sum(), (0, 1, 2))  # noqa: E731
    bucketed = functools.partial(bucketjit.jit, dynamic_axes=axes, **IN_BUCKETS)
    with on or pltpu.force_tpu_interpret_mode():
        for own in (fn, bucketed(fn)):
            np.testing.assert_allclose(own(*arrays), want(*arrays), atol=1e-5)
        got = bucketed(loss(fn))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), got, loss(want)(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize("n", SIZES)
def test_flash_attention(n: int) -> None:
    causal = n % 2 == 0
    fn = functools.partial(recipe("attention"), causal=causal)
    want = functools.partial(plain, allowed=np.tril(np.ones((n, n), bool)) | (not causal))
    compare(fn, want, ("_, _, s, _",) * 3, *three(1, 2, n, 64))


@pytest.mark.slow
@pytest.mark.parametrize("n", SIZES)
def test_splash_attention(n: int) -> None:
    ids = np.arange(n, dtype=np.int32) // 40
    allowed = np.tril(ids[:, None] == ids)
    want = lambda q, k, v, ids: plain(q, k, v, allowed)  # noqa: E731
    compare(recipe("splash"), want, (*("_, s, _",) * 3, "s"), *three(2, n, 128), ids)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 9, 11])
def test_paged_attention(n: int) -> None:
    rng = np.random.default_rng(n)
    query, pages = normal(n, 4, 128), normal(2, 32, 16, 128)
    table = rng.integers(0, 32, (n, n)).astype(np.int32)
    lengths = rng.integers(1, 16 * n, n).astype(np.int32)
    axes = ("b, _, _", None, None, "b", "b, p")
    fn = bucketjit.jit(recipe("paged"), dynamic_axes=axes, **IN_BUCKETS)
    with pltpu.force_tpu_interpret_mode():
        got = fn(query, pages, pages, lengths, table)
    for i in range(n):
        kept = np.repeat(pages[:, table[i]].reshape(2, -1, 128)[:, : lengths[i]], 2, 0)
        weights = jax.nn.softmax(jnp.einsum("hd,hkd->hk", query[i], kept))
        np.testing.assert_allclose(got[i], jnp.einsum("hk,hkd->hd", weights, kept), atol=1e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [3, 1, 5, 9, 12, 15, 17, 30])
def test_blocks(n: int) -> None:
    fn = bucketjit.jit(recipe("column_sums"), **IN_BUCKETS, check="exact")
    with pltpu.force_tpu_interpret_mode():
        np.testing.assert_allclose(fn(normal(n, 128)), normal(n, 128).sum(0), atol=1e-5)


def of_gpus(interpret: bool) -> Any:
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
        from jax.experimental.pallas.ops.gpu import attention

    @bucketjit.kernel(*("b, s%128, h, d",) * 3, out="b, s, h, d", fill=0)
    def mha(query: Any, key: Any, value: Any, sizes: Any) -> Any:
        ids = (jnp.arange(query.shape[1]) < sizes["s"]).astype(jnp.int32)
        ids = jnp.broadcast_to(ids, query.shape[:2])
        return attention.mha(query, key, value, ids, 1.0, interpret=interpret)

    return mha


@pytest.mark.slow
@pytest.mark.parametrize("n", SIZES)
def test_attention_of_gpus(n: int) -> None:
    want = lambda *xs: plain(*(x.swapaxes(1, 2) for x in xs)).swapaxes(1, 2)  # noqa: E731
    axes = ("_, s, _, _",) * 3
    compare(of_gpus(True), want, axes, *three(1, n, 2, 64), on=nullcontext())


def test_foreign_functions(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    (tmp_path / "sums.cc").write_text(page.split("```cpp\n")[1].split("```")[0])
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", "sums.cc"]
    if shutil.which("g++") is None:
        pytest.skip("no compiler of C++")
    subprocess.run([*command, "-o", "sums.so"], cwd=tmp_path, check=True)
    handler = jax.ffi.pycapsule(ctypes.cdll.LoadLibrary(str(tmp_path / "sums.so")).ColumnSums)
    jax.ffi.register_ffi_target("column_sums", handler, platform="cpu")
    foreign = recipe("foreign_sums")
    fn = bucketjit.jit(lambda x: foreign(x) * 2, **IN_BUCKETS, check="exact")
    for n in (1, 2, 3, 5, 7, 9, 12, 17):
        np.testing.assert_allclose(fn(normal(n, 3)), 2 * normal(n, 3).sum(0), atol=1e-5)
