"""Functions compiled for devices that are not here, by the compilers of TPUs and GPUs.

``make accelerator-compilers ARGS=--sample`` runs it, in the environment that has these.
"""

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


def bucketed(fn: Any = mean, spec: Any = "b, _", **options: Any) -> Any:
    return bucketjit.jit(fn, dynamic_axes=spec, buckets="pow2", **options)


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
    assert "none of 3 executables need more" in str(executor.report(memory=2**30))
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


def test_files_of_a_mesh(tmp_path: Path) -> None:
    def warmed(count: int) -> Any:
        mesh = over({4: "v5e:2x2", 8: "v5e:2x4"}[count], count)
        rows = NamedSharding(mesh, PartitionSpec("rows"))
        executor = bucketed(in_shardings=rows).with_persistence(tmp_path)
        executor.warmup(X, sizes={"b": [3, 40]}, progress=False)
        return executor.stats().compiles, executor.stats().loads

    assert [warmed(8), warmed(8), warmed(4)] == [(2, 0), (0, 2), (2, 0)]


@pytest.mark.parametrize("target", compilers.TARGETS)
def test_saved_with_executables(target: str, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    path = tmp_path / "mean.bkt"
    bucketed().save(path, placed(target), sizes={"b": [40]}, executables=True)
    assert b"executables/" in path.read_bytes()
    loaded = bucketjit.load(path, trust_executables=True)
    with pytest.raises(ArtifactError, match=f"it was saved for {target}"):
        loaded(X)


def attention(w: Any, x: Any, scores: Any = lambda scores: scores) -> Any:
    query, key, value = (x @ w[name] for name in "qkv")
    return x + jax.nn.softmax(scores(jnp.einsum("bid,bjd->bij", query, key) / 8)) @ value


def stepped(loss: Any, w: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient), value


def step(w: Any, x: Any) -> Any:
    return stepped(lambda w: (attention(w, x) ** 2).mean(), w)


def step_by_hand(w: Any, x: Any, sizes: Any) -> Any:
    rows, columns = (jnp.arange(n) < size for n, size in zip(x.shape, sizes, strict=False))

    def loss(w: Any) -> Any:
        y = attention(w, x, lambda scores: jnp.where(columns, scores, -jnp.inf))
        real = (rows[:, None] & columns)[..., None]
        return jnp.where(real, y**2, 0).sum() / (sizes[0] * sizes[1] * x.shape[2])

    return stepped(loss, w)


COLLECTIVE = re.compile(r" (all-[\w-]+|collective-[\w-]+|reduce-scatter)(?:-start)?\(")


# The axes of the mesh, how it cuts weights and activations, and rows and tokens of a batch.
@pytest.mark.parametrize(
    ("topology", "axes", "weights", "activations", "shape"),
    [
        ("v5e:2x4", (8,), (), ("rows",), (64, 128)),
        ("v5e:2x4", (8,), (), (None, "rows"), (8, 128)),
        ("v5e:2x4", (4, 2), (None, "columns"), ("rows",), (32, 128)),
        ("v5e:16x16", (256,), (), (None, "rows"), (8, 4096)),
        ("v5e:16x16", (16, 16), (None, "columns"), ("rows",), (128, 128)),
        ("v5p:16x16x24", (6144,), (), ("rows",), (12288, 128)),
    ],
)
def test_meshes_as_by_hand(
    topology: str, axes: Any, weights: Any, activations: Any, shape: tuple[int, int]
) -> None:
    """An encoder's training step has the collectives of masks by hand, and at most 1.1 cycles."""
    mesh = over(topology, *axes)

    def placed(shape: tuple[int, ...], *names: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    args = {name: placed((64, 64), *weights) for name in "qkv"}, placed((*shape, 64), *activations)
    buckets = {name: [n] for name, n in zip("bs", shape, strict=True)}
    executor = bucketjit.jit(step, dynamic_axes=(None, "b, s, _"), buckets=buckets)
    sizes = jax.ShapeDtypeStruct((2,), np.int32)
    texts = [
        lowered.compile().as_text() or ""
        for lowered in (executor.lower(*args), jax.jit(step_by_hand).lower(*args, sizes))
    ]
    derived, by_hand = (Counter(COLLECTIVE.findall(text)) for text in texts)
    assert derived == by_hand and derived["all-reduce"] > 0
    assert compilers.cycles(texts[0]) <= 1.1 * compilers.cycles(texts[1])


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
