"""Functions compiled for devices that are not here, by the compilers of TPUs and GPUs.

``make accelerator-compilers ARGS=--sample`` runs it, in the environment that has these.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compilers

if not compilers.VARIABLES.items() <= os.environ.items():
    pytest.skip("make accelerator-compilers runs it", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import bucketjit
from bucketjit.errors import ArgumentError, ArtifactError

X = np.ones((40, 16), np.float32)


def mean(x: Any) -> Any:
    return jnp.tanh(x).mean(0)


def placed(target: str, n: int = 40) -> Any:
    at = SingleDeviceSharding(compilers.device(target))
    return jax.ShapeDtypeStruct((n, 16), np.float32, sharding=at)


def over(topology: str, *axes: int) -> Any:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return jax.sharding.Mesh(np.reshape(described.devices, axes), ("rows", "columns")[: len(axes)])


def bucketed(fn: Any = mean, spec: Any = "b, _") -> bucketjit.BucketedExec[..., Any]:
    return bucketjit.jit(fn, dynamic_axes=spec, buckets="pow2")


def test_shardings_of_a_pod() -> None:
    """Buckets that the mesh divides, with types that are placed nowhere; calls are refused."""
    mesh = over("v5e:16x16", 256)
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("rows",)))
    executor = bucketjit.jit(
        lambda w, x: (w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w), x * 2),
        **{"dynamic_axes": (None, "b, _"), "buckets": "pow2"},
        **{"in_shardings": (whole, rows), "out_shardings": (whole, rows)},
    )
    w, x = (jax.ShapeDtypeStruct((n, 16), np.float32) for n in (16, 1000))
    compiled = executor.lower(w, x).compile()
    assert "f32[4,16]" in compiled.as_text()
    assert compiled.output_shardings[1].is_equivalent_to(rows, 2)
    executor.warmup(w, x, sizes={"b": [3, 1000, 3000]}, progress=False)
    assert sorted(b.sizes["b"] for b in executor.stats().buckets) == [256, 1024, 4096]
    assert {b.device for b in executor.stats().buckets} == {"256 x TPU v5 lite"}
    memory = executor.stats().buckets[0].memory
    analysis = compiled.memory_analysis()
    assert memory["arguments"] == analysis.argument_size_in_bytes > 0 < memory["code"]
    text = str(executor.report(memory=sum(memory.values())))
    assert "1 of 3 executables need more than" in text and ": b=4096 (" in text
    assert "arguments bytes" in text and "temporary bytes" in text
    assert "no executable needs more" in str(executor.report(memory=2**30))
    assert "  memory: arguments " in str(executor.explain(w, x))
    for function in (executor, compiled):
        with pytest.raises(ArgumentError, match="256 x TPU v5 lite of a topology"):
            function(np.ones((16, 16), np.float32), np.ones((45, 16), np.float32))


@pytest.mark.parametrize(("topology", "count"), [("v5e:16x16", 256), ("v5p:16x16x24", 6144)])
def test_shards_of_a_pod(topology: str, count: int) -> None:
    """A function of one shard, whose shards have sizes of their own."""

    def step(w: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        gradient, loss = jax.lax.pmean((gradient, loss), "rows")
        return w - 0.1 * gradient, loss

    executor = bucketed(step, (None, "b, _")).with_processes(over(topology, count), "rows")
    w, x = (jax.ShapeDtypeStruct((n, 16), np.float32) for n in (16, 45))
    compiled = executor.lower(w, x).compile()
    assert len(re.findall(r" all-reduce\(", compiled.as_text())) == 1
    assert compiled.memory_analysis().temp_size_in_bytes > 0
    executor.warmup(w, x, sizes={"b": [100]}, progress=False)
    assert [b.sizes["b"] for b in executor.stats().buckets] == [16, 128]
    assert f"device: {count} x TPU v5" in str(executor.explain(w, x))
    for function in (executor, compiled):
        with pytest.raises(ArgumentError, match=f"{count} x TPU v5.* of a topology"):
            function(np.ones((16, 16), np.float32), np.ones((45, 16), np.float32))


def test_each_executable_has_its_device() -> None:
    executor = bucketed()
    executor.warmup(placed("tpu"))
    executor.warmup(placed("cuda"))
    np.testing.assert_allclose(executor(X), jax.jit(mean)(X), rtol=1e-6)
    devices = [bucket.device for bucket in executor.stats().buckets]
    assert devices == ["TPU v5 lite", "NVIDIA H100 80GB HBM3", ""]
    assert "TPU v5 lite" in str(executor.report()) and "TPU v5 lite" in str(
        executor.explain(placed("tpu"))
    )
    assert executor.stats().compiles == 3
    compiled = executor.lower(placed("tpu")).compile()
    assert compilers.cycles(compiled.as_text()) > 0
    with pytest.raises(ArgumentError, match=r"compiled for float32\[b, 16\] on TPU v5 lite"):
        compiled(X)


def test_buckets_fit_the_device() -> None:
    executor = bucketed(lambda x: jax.nn.softmax(x @ x.T) @ x, "s, _")
    assert [executor.explain(placed("tpu", n)).bucket["s"] for n in (3, 200)] == [128, 256]
    assert [executor.explain(placed("cuda", n)).bucket["s"] for n in (3, 200)] == [8, 256]
    assert executor.explain(X).bucket["s"] == 64


@pytest.mark.parametrize("target", compilers.TARGETS)
def test_files_are_found_by_their_device(target: str, tmp_path: Path) -> None:
    def warmed(target: str) -> bucketjit.BucketedExec[..., Any]:
        executor = bucketed().with_persistence(tmp_path)
        executor.warmup(placed(target), sizes={"b": [3, 40]}, workers=2)
        return executor

    assert warmed(target).stats().loads == 0
    again = warmed(target).stats()
    assert (again.loads, again.compiles) == (2, 0)
    (other,) = compilers.TARGETS.keys() - {target}
    assert warmed(other).stats().loads == 0
    here = bucketed().with_persistence(tmp_path)
    here(X)
    assert here.stats().loads == 0 and len(list(tmp_path.glob("*.bjx"))) == 5


@pytest.mark.parametrize("target", compilers.TARGETS)
def test_saved_with_executables(target: str, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    path = tmp_path / "mean.bkt"
    bucketed().save(path, placed(target), sizes={"b": [40]}, executables=True)
    assert b"executables/" in path.read_bytes()
    loaded = bucketjit.load(path, trust_executables=True)
    with pytest.raises(ArtifactError, match=f"it was saved for {target}"):
        loaded(X)


@pytest.mark.parametrize(("topology", "axes"), [("v5e:2x4", (8,)), ("v5e:16x16", (64, 4))])
def test_collectives_are_those_of_masks_by_hand(topology: str, axes: tuple[int, ...]) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: (jax.nn.gelu(x @ w) ** 2).mean())(w)

    def by_hand(w: Any, x: Any, n: Any) -> Any:
        real = (jnp.arange(len(x)) < n)[:, None]

        def loss(w: Any) -> Any:
            return jnp.where(real, jax.nn.gelu(x @ w) ** 2, 0).sum() / (n * w.shape[1])

        return w - jax.grad(loss)(w)

    mesh = over(topology, *axes)
    columns = "columns" if len(axes) > 1 else None

    def spec(shape: tuple[int, ...], *names: str | None, dtype: Any = np.float32) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    w, rows = spec((16, 16), None, columns), axes[0]
    hand = jax.jit(by_hand).lower(w, spec((2 * rows, 16), "rows"), spec((), dtype=np.int32))
    executor = bucketjit.jit(step, dynamic_axes=(None, "b, _"), buckets=[2 * rows])
    derived = executor.lower(w, spec((rows, 16), "rows"))
    collective = re.compile(r" (all-[\w-]+|collective-[\w-]+|reduce-scatter)(?:-start)?\(")
    of_hand, of_derived = (
        Counter(collective.findall(made.compile().as_text() or "")) for made in (hand, derived)
    )
    assert of_hand == of_derived and of_hand["all-reduce"] > 0


def test_bad_targets_are_named() -> None:
    executor = bucketed(lambda x, y: x.sum(0) + y.sum(0), ("b, _", "b, _"))
    with pytest.raises(ArgumentError, match=r"H100.*TPU v5 lite"):
        executor.lower(placed("tpu"), placed("cuda"))
    mesh = over("v5e:2x2", 4)
    uneven = jax.ShapeDtypeStruct(
        (45, 16), np.float32, sharding=NamedSharding(mesh, PartitionSpec("rows"))
    )
    with pytest.raises(ArgumentError, match="45"):
        executor.lower(uneven, uneven)
