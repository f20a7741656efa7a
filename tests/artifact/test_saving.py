"""What `save` takes, finds out and refuses, and what becomes of its files."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit._artifact.archive import Archive
from bucketjit._compile.files import directory as files
from bucketjit.errors import (
    ArgumentError,
    ArtifactError,
    FallbackWarning,
    InlinedWarning,
    SpecError,
)

Struct = jax.ShapeDtypeStruct
LIKE = Struct((8, 4), jnp.float32)


def mean(x: Any) -> Any:
    return x.mean(0)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_file_may_be_written_over_once_it_is_opened(tmp_path: Path) -> None:
    weights = floats(4, 100)
    BucketedExec(lambda x: x @ weights).with_pow2().save(tmp_path / "f.bkt", LIKE)
    archive = Archive(tmp_path / "f.bkt")
    loaded = bucketjit.load(tmp_path / "f.bkt")
    with open(tmp_path / "f.bkt", "r+b") as file:
        file.write(bytes(os.path.getsize(tmp_path / "f.bkt")))
    assert bytes(archive.view("constants/0.bin")) == weights.tobytes()
    assert archive.read("functions/0/tree.stablehlo")
    x = floats(3, 4)
    np.testing.assert_allclose(loaded(x), x @ weights, rtol=1e-5)
    with pytest.raises(ArtifactError, match=r"f\.bkt"):
        bucketjit.load(tmp_path / "f.bkt")


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".writing-{'0' * 32}"
    left.touch()
    os.utime(left, (0, 0))
    other = tmp_path / ".writing-a-letter"
    other.touch()

    def fill(file: Any) -> None:
        assert len(list(tmp_path.iterdir())) == 3
        BucketedExec(mean).with_pow2().save(tmp_path / "g.bkt", LIKE)
        assert not left.exists()
        file.write(b"f")

    files.write_with(tmp_path / "f.bkt", fill)
    assert sorted(p.name for p in tmp_path.iterdir()) == [other.name, "f.bkt", "g.bkt"]
    assert (tmp_path / "f.bkt").read_bytes() == b"f"


@pytest.mark.parametrize(
    ("path", "args", "error", "told"),
    [
        ("", (LIKE,), SpecError, "path is empty"),
        (None, (LIKE,), SpecError, "path must be the name of a file"),
        (floats(8, 4), (), SpecError, "path must be .* comes before the arguments"),
        (".", (LIKE,), IsADirectoryError, "path is a directory"),
        ("{}/missing/f.bkt", (LIKE,), FileNotFoundError, "missing/f.bkt"),
        ("{}/f.bkt", (), ArgumentError, "missing a required argument: 'x'"),
        ("{}/f.bkt", (LIKE, LIKE), TypeError, "2 were given"),
        ("{}/f.bkt", (Struct((2**40, 4), jnp.float32),), ArtifactError, "batch .*int32"),
        ("{}/f.bkt", (Struct((2**62, 4), jnp.float32),), ArgumentError, "float32 .*4611686018"),
        ("{}/f.bkt", (Struct((2**50,), jnp.float32, weak_type=True),), ArgumentError, "smaller"),
    ],
)
def test_errors_of_save_name_what_is_wrong(
    path: Any, args: tuple[Any, ...], error: type[Exception], told: str, tmp_path: Path
) -> None:
    if isinstance(path, str):
        path = path.format(tmp_path)
    with pytest.raises(error, match=told):
        BucketedExec(mean).with_pow2().save(path, *args)
    assert not list(tmp_path.iterdir())


def test_more_errors_by_name(tmp_path: Path) -> None:
    executor = BucketedExec(lambda x: x.mean(0) if x.shape[0] > 1000 else x.sum(0)).with_pow2()
    with pytest.raises(ArtifactError, match="save: it is called inside"):
        jax.jit(lambda x: executor.save(tmp_path / "f.bkt", x))(floats(3))
    with pytest.raises(ArtifactError, match="int32"):
        executor.save(tmp_path / "f.bkt", LIKE, sizes={"batch": 2**31})
    executor.save(tmp_path / "f.bkt", LIKE, sizes={"batch": 10**8})  # nothing is allocated
    assert {b["batch"] for b in bucketjit.load(tmp_path / "f.bkt").buckets} == {2**27, 1000}
    for wrong in ("", 3):
        with pytest.raises(SpecError, match="load: path"):
            bucketjit.load(wrong)  # type: ignore[arg-type]


def resized(x: Any) -> Any:
    h, w = x.shape
    small = jax.image.resize(x, (int(h * 0.5), w), "linear")
    return small.reshape(h // 4, 2, w // 4, 4).sum((1, 3))


def patches(x: Any) -> Any:
    h, w = x.shape
    return x[: int(h * 0.5), : int(w * 0.25)].sum() + x.reshape(h // 4, 4, w // 4, 4).mean((1, 3))


@pytest.mark.parametrize("fn", [resized, patches])
def test_every_size_below_the_largest_bucket_is_served(
    fn: Callable[..., Any], tmp_path: Path
) -> None:
    promised = ("mod(h, 4) == 0", "mod(w, 4) == 0")
    executor = BucketedExec(fn, dynamic_axes="h, w", constraints=promised).with_pow2()
    executor.save(tmp_path / "f.bkt", Struct((16, 16), jnp.float32))
    loaded = bucketjit.load(tmp_path / "f.bkt")
    x = floats(16, 16)
    for h, w in ((h, w) for h in range(4, 17, 4) for w in range(4, 17, 4)):
        expected = np.asarray(fn(x[:h, :w]))
        np.testing.assert_allclose(loaded(x[:h, :w]), expected, rtol=1e-4, atol=1e-5)


def test_sizes_that_a_file_will_not_serve_are_told(tmp_path: Path) -> None:
    def other_each_time(x: Any) -> Any:
        half = int(x.shape[0] * 0.5)
        for _ in range(half if half < 24 else 0):
            x = jnp.sin(x)
        return x[:half]

    executor = BucketedExec(other_each_time, dynamic_axes="n").with_pow2()
    with pytest.warns(FallbackWarning, match=r"the file will not serve n=\d+ and \d+ other sizes"):
        executor.save(tmp_path / "f.bkt", Struct((64,), jnp.float32))
    loaded, wrong, served = bucketjit.load(tmp_path / "f.bkt"), [], 0
    for n in range(2, 65, 3):
        try:
            got = loaded(floats(n))
        except ArtifactError:
            continue
        served += 1
        if not np.allclose(got, other_each_time(floats(n)), rtol=1e-5):
            wrong.append(n)
    assert not wrong and served >= 8


@pytest.mark.parametrize(
    "inside",
    [
        lambda f, x: jax.jit(f)(x),
        lambda f, x: jax.vmap(f)(x[None])[0],
        lambda f, x: jax.jit(lambda x: f.map([x])[0])(x),
        lambda f, x: jax.lax.scan(lambda c, _: (c, f(x)), 0, None, length=1)[1][0],
    ],
)
def test_a_loaded_function_inside_a_transformation_warns_once(
    inside: Callable[..., Any], tmp_path: Path
) -> None:
    BucketedExec(mean).with_pow2().save(tmp_path / "f.bkt", LIKE, derivatives=1)
    loaded, x = bucketjit.load(tmp_path / "f.bkt"), floats(3, 4)
    jax.grad(lambda x: loaded(x).sum())(x)
    assert loaded.stats().inlined_calls == 0
    with pytest.warns(InlinedWarning, match="mean is called inside") as told:
        np.testing.assert_allclose(inside(loaded, x), x.mean(0), rtol=1e-5)
        inside(loaded, x)
    assert len(told) == 1 and loaded.stats().inlined_calls >= 1


class Pair(NamedTuple):
    """A named tuple of a user."""

    first: Any
    second: Any


LINALG = [jnp.linalg.eigh, jnp.linalg.svd, jnp.linalg.qr, jnp.linalg.eig, jnp.linalg.slogdet]


@pytest.mark.parametrize("fn", LINALG)
def test_named_tuples_of_jax(fn: Callable[..., Any], tmp_path: Path) -> None:
    executor = BucketedExec(lambda x: fn(x), dynamic_axes="b, _, _").with_pow2()
    executor.save(tmp_path / "f.bkt", Struct((4, 3, 3), jnp.float32))
    x = floats(3, 3, 3) + 4 * np.eye(3, dtype=np.float32)
    x += x.swapaxes(1, 2)
    got, expected = bucketjit.load(tmp_path / "f.bkt")(x), fn(x)
    assert type(got) is type(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(abs(a), abs(b), 1e-3, 1e-4), got, expected)
    raw = executor.export_dynamic(Struct((4, 3, 3), jnp.float32)).serialize()
    tree = jax.export.deserialize(raw).out_tree
    assert type(tree.unflatten([0] * tree.num_leaves)) is type(expected)
    assert bucketjit.refine(raw, {"b": 5})


def test_named_tuples_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(p: Pair) -> Any:
        return {"out": Pair(p.second.sum(0), p.first)}

    executor = BucketedExec(swapped, dynamic_axes=(Pair("b, _", "b, _"),)).with_pow2()
    executor.save(tmp_path / "f.bkt", Pair(LIKE, LIKE), derivatives=1)
    x = floats(3, 4)
    got = bucketjit.load(tmp_path / "f.bkt")(Pair(x, 2 * x))["out"]
    assert type(got) is Pair
    np.testing.assert_allclose(got.first, 2 * x.sum(0), rtol=1e-5)

    (tmp_path / "shapes_of_a_user.py").write_text(
        "import collections\nPoint = collections.namedtuple('Point', 'x y')\n"
    )
    name = "shapes_of_a_user"
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        point = importlib.import_module(name).Point
        BucketedExec(lambda x: point(x, x)).with_pow2().save(tmp_path / "g.bkt", LIKE)
        del sys.modules[name]
        # A file does not choose what is imported.
        with pytest.raises(ArtifactError, match=f"import {name} before you load the file"):
            bucketjit.load(tmp_path / "g.bkt")
        importlib.import_module(name)
        assert type(bucketjit.load(tmp_path / "g.bkt")(x)).__name__ == "Point"
        del sys.modules[name]


def test_a_named_tuple_that_cannot_be_imported(tmp_path: Path) -> None:
    class Local(NamedTuple):
        only: Any

    with pytest.raises(ArtifactError, match="can be imported by its name"):
        BucketedExec(lambda x: Local(x)).with_pow2().save(tmp_path / "f.bkt", LIKE)
