"""Functions that were unpacked are served in another process, which has IREE and no JAX."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._artifact.archive import Archive, write_archive
from bucketjit._artifact.unpack import unpack
from bucketjit.errors import ArtifactError
from tests.alone import run_python
from tests.comparison import assert_close

pytest.importorskip("flatbuffers", reason="it serializes exported modules")

SERVER = Path(__file__).with_name("serve_unpacked.py")


@pytest.fixture
def served(tmp_path):
    """Serves calls of an unpacked function: the results, and those without masks."""

    def serve(folder, calls, runtime="iree"):
        if runtime == "iree":
            pytest.importorskip("iree.compiler", reason="IREE's compiler is not installed")
            pytest.importorskip("iree.runtime", reason="IREE's runtime is not installed")
        arrays = {
            f"{i}/{j:03}": np.asarray(x) for i, call in enumerate(calls) for j, x in enumerate(call)
        }
        np.savez(tmp_path / "calls.npz", **arrays)
        paths = folder, tmp_path / "calls.npz", tmp_path / "results.npz"
        done = run_python("-I", str(SERVER), *map(str, paths), runtime)
        assert done.returncode == 0, done.stderr
        loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
        assert "bucketjit" not in loaded
        assert runtime == "xla" or not loaded & {"jax", "jaxlib"}
        found = np.load(tmp_path / "results.npz")

        def results(of):
            count = sum(name.startswith(f"{of}/") for name in found.files)
            return [found[f"{of}/{i}"] for i in range(count)]

        ways = "{}", "full/{}"
        return tuple([results(way.format(i)) for i in range(len(calls))] for way in ways)

    return serve


def write(executor, folder, *args, **options):
    """Save a function, unpack it, and return its layout."""
    executor.save(folder.with_suffix(".bkt"), *args, **options)
    unpack(Archive(folder.with_suffix(".bkt")), folder)
    return json.loads((folder / "layout.json").read_text())


@pytest.fixture(scope="module")
def weights():
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in ((8, 16), (16,), (16, 4))]


@pytest.fixture(scope="module")
def network(weights):
    """An MLP whose rows see each other: nearly every step of it needs a mask."""
    first, bias, second = weights

    def network(x, scale):
        hidden = jax.nn.gelu((x - x.mean(axis=1, keepdims=True)) @ first + bias)
        scores = jax.nn.softmax(hidden @ second, axis=1)
        return {
            "scores": scores,
            "mean": jnp.mean(hidden) * scale,
            "largest": jnp.argmax(hidden, axis=1),
            "running": jnp.cumsum(hidden[..., 0], axis=1),
            "sorted": -jnp.sort(-scores[..., 1], axis=1),
        }

    return network


@pytest.fixture(scope="module")
def folder(network, tmp_path_factory):
    executor = BucketedExec(network, dynamic_axes=("b, s, _", None)).with_pow2()
    path = tmp_path_factory.mktemp("unpacked") / "network"
    x = jax.ShapeDtypeStruct((3, 5, 8), jnp.float32)
    write(executor, path, x, np.float32(2), sizes=[{"b": 4, "s": 8}, {"b": 4, "s": 16}])
    return path


@pytest.fixture
def layout(folder):
    return json.loads((folder / "layout.json").read_text())


def test_iree_serves_all_sizes(network, folder, served):
    random = np.random.default_rng(1)
    calls = [
        (random.normal(size=(*shape, 8)).astype(np.float32) - 2, np.float32(n))
        for n, shape in enumerate([(1, 1), (3, 5), (4, 11)])
    ]
    right, full = served(folder, calls)
    for call, found, unmasked in zip(calls, right, full, strict=True):
        expected = jax.tree.leaves(jax.jit(network)(*call))
        assert_close(found, expected)
        # Told that the padding is data, the module computes something else: masks are at work.
        whole = [a[tuple(map(slice, b.shape))] for a, b in zip(unmasked, found, strict=True)]
        assert max(np.max(np.abs(a - b)) for a, b in zip(whole, found, strict=True)) > 0.01


def test_what_the_layout_says(layout, folder, weights):
    [function] = layout["functions"]
    assert layout["platforms"] == ["cpu"] and layout["padding"] == 0
    assert function["name"] == "network"
    assert [leaf["path"] for leaf in function["leaves"]] == ["x", "scale"]
    assert [leaf["axes"] for leaf in function["leaves"]] == [["b", "s", 8], []]
    names = ["['largest']", "['mean']", "['running']", "['scores']", "['sorted']"]
    assert function["results"] == names
    [program] = function["programs"]
    assert program["variables"] == ["b", "s"]
    axes = [out["axes"] for out in program["outputs"]]
    assert axes == [["b", 16], [], ["b", "s"], ["b", "s", 4], ["b", "s"]]
    assert [b["sizes"] for b in program["buckets"]] == [{"b": 4, "s": 8}, {"b": 4, "s": 16}]
    assert len(program["constants"]) == 3
    assert [x["shape"] for x in program["buckets"][1]["inputs"][3:]] == [[2], [4, 16, 8], []]
    stored = [
        np.fromfile(folder / c["file"], c["dtype"]).reshape(c["shape"]) for c in layout["constants"]
    ]
    assert {x.tobytes() for x in stored} == {x.tobytes() for x in weights}


def test_sizes_that_are_expressions_or_arguments(tmp_path, served):
    """An axis of size ``2*n + 1``, and an argument that is a size."""

    def fn(x, m):
        return jnp.concatenate([x, jnp.sin(x[1:])]).cumsum(), jnp.arange(m).sum(), x.mean() / m

    executor = BucketedExec(fn, dynamic_axes=("2*n + 1", "m")).with_pow2()
    layout = write(executor, tmp_path / "u", np.zeros(7, np.float32), 5)
    leaves = layout["functions"][0]["leaves"]
    assert [leaf["axes"] for leaf in leaves] == [["2*n + 1"], ["m"]]
    assert leaves[1]["dtype"] is None
    call = np.linspace(-3, 2, 5, dtype=np.float32), 6
    [found], _ = served(tmp_path / "u", [call])
    assert_close(found, list(fn(*call)))


def test_constants_of_each_size(tmp_path, served):
    """Values that Python computes from the sizes come from a table."""

    def fn(x):
        return jnp.sum(x / math.sqrt(x.shape[0])) + np.arange(x.shape[0]) * x

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    layout = write(executor, tmp_path / "u", np.zeros(5, np.float32))
    programs = layout["functions"][0]["programs"]
    assert any(program["table"]["files"] for program in programs)
    calls = [(np.linspace(1, 2, n, dtype=np.float32),) for n in (1, 2, 7)]
    right, _ = served(tmp_path / "u", calls)
    for call, found in zip(calls, right, strict=True):
        assert_close(found, [fn(*call)])


def test_sizes_that_are_computed(tmp_path, served):
    def fn(x):
        kept = x[x > 0]
        return kept, jnp.sort(kept)[-2:] if kept.shape[0] > 0 else kept.sum()

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    x = np.sin(np.arange(7, dtype=np.float32) * 2 + 1)
    layout = write(executor, tmp_path / "u", x, sizes={"n": [8]})
    [program] = layout["functions"][0]["programs"]
    [size] = program["computed"]
    assert program["presumed"]
    assert size["bound"] == ["n"] and program["counts"] == [size["variable"]]
    calls = [(x,), (-x,), (x[:2],)]
    # Not IREE, which writes where a scatter has an index out of bounds (3.13).
    right, _ = served(tmp_path / "u", calls, runtime="xla")
    for call, found in zip(calls, right, strict=True):
        assert_close(found, list(fn(jnp.asarray(*call))))


def only_bucket(layout):
    [bucket] = layout["functions"][0]["programs"][0]["buckets"]
    return bucket


def test_random_keys_are_words(tmp_path):
    def fn(key, x):
        return x * jax.random.uniform(key, x.shape)

    executor = BucketedExec(fn, dynamic_axes=(None, "n")).with_pow2()
    key, x = jax.random.key(3), np.ones(5, np.float32)
    bucket = only_bucket(write(executor, tmp_path / "u", key, x))
    shapes = [(one["dtype"], one["shape"]) for one in bucket["inputs"]]
    assert shapes == [("int32", [1]), ("uint32", [2]), ("float32", [8])]


def test_arguments_by_keyword(tmp_path, served):
    executor = BucketedExec(lambda x, *, y: x @ y, dynamic_axes={"x": "n, _"}).with_pow2()
    y = np.eye(4, dtype=np.float32)
    layout = write(executor, tmp_path / "u", np.ones((3, 4), np.float32), y=y)
    assert [leaf["path"] for leaf in layout["functions"][0]["leaves"]][1] == "y"
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    [[found]], _ = served(tmp_path / "u", [(x, y)])
    np.testing.assert_array_equal(found, x)


# --- several platforms, and what is not for all clients --------------------------------------


def test_each_platform_has_its_modules(tmp_path, served):
    def fn(x):
        return jnp.cumsum(x - x.mean())

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    path = tmp_path / "u.bkt"
    executor.save(path, np.ones(5, np.float32), platforms=["tpu", "cpu", "cuda"])
    unpack(Archive(path), tmp_path / "all")
    bucket = only_bucket(json.loads((tmp_path / "all" / "layout.json").read_text()))
    assert set(bucket["modules"]) == {"tpu", "cpu", "cuda"}
    assert len(bucket["inputs"]) == 2  # no number of the platform
    x = np.linspace(1, 2, 6, dtype=np.float32)
    [found], _ = served(tmp_path / "all", [(x,)])
    assert_close(found, [fn(x)])

    unpack(Archive(path), tmp_path / "one", platform="cpu")
    layout = json.loads((tmp_path / "one" / "layout.json").read_text())
    bucket = only_bucket(layout)
    assert layout["platforms"] == ["cpu"] and list(bucket["modules"]) == ["cpu"]


def test_calls_of_a_runtime_are_told_of(tmp_path):
    executor = BucketedExec(lambda x, m: jnp.linalg.cholesky(m) * x.sum(), dynamic_axes=("n", None))
    args = np.ones(3, np.float32), np.eye(3, dtype=np.float32)
    bucket = only_bucket(write(executor.with_pow2(), tmp_path / "u", *args))
    assert bucket["custom_calls"]["cpu"] == ["lapack_spotrf_ffi"]


ALTERED = {
    "an argument that is a size has none": (("leaves", 1, "axes"), []),
    "a size is divided by 0": (("programs", 0, "outputs", 0, "axes"), ["floordiv(n, 0)"]),
    "a name that no text file holds": (("name",), "\ud800"),
    "a name that is Markdown": (("leaves", 0, "path"), "`|\n# x"),
    "no program": (("programs",), []),
    "no bucket": (("programs", 0, "buckets"), []),
    "an expression that is too deep": (("programs", 0, "inputs"), [["-" * 1900 + "n"]]),
}


@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_manifest(tmp_path, what):
    """All digests are right. It is refused, or what is written can be read."""

    def fn(x, m):
        return x[: x.shape[0] // 2] * np.float32(3) + jnp.arange(m).sum()

    executor = BucketedExec(fn, dynamic_axes=("n", "m")).with_pow2()
    path = tmp_path / "fn.bkt"
    executor.save(path, np.zeros(5, np.float32), 3)
    archive = Archive(path)
    manifest = json.loads(archive.manifest.encoded())
    (*steps, last), value = ALTERED[what]
    place = manifest["functions"][0]
    for step in steps:
        place = place[step]
    assert last in place and place[last] != value
    place[last] = value
    members = {name: archive.read(name) for name in manifest["members"]}
    raw = SimpleNamespace(encoded=lambda: json.dumps(manifest).encode())
    write_archive(path, raw, members, None)
    try:
        unpack(Archive(path), tmp_path / "u")
    except ArtifactError as error:
        assert "\n" not in str(error)
        assert not (tmp_path / "u").exists()
    else:
        assert "name" in what or "size" in what or "deep" in what
        json.loads((tmp_path / "u" / "layout.json").read_text())
