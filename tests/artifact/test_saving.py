"""What `save` takes, finds out and refuses, and what becomes of its files."""

import os
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
from bucketjit.errors import ArgumentError, ArtifactError, SpecError
from tests.comparison import floats

Struct = jax.ShapeDtypeStruct
LIKE = Struct((8, 4), jnp.float32)


def mean(x: Any) -> Any:
    return x.mean(0)


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
        ("{}/f.bkt", (Struct((2**50,), jnp.float32, weak_type=True),), ArtifactError, "smaller"),
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


def patches(x: Any) -> Any:
    h, w = x.shape
    return x[: int(h * 0.5), : int(w * 0.25)].sum() + x.reshape(h // 4, 4, w // 4, 4).mean((1, 3))


def test_every_size_below_the_largest_bucket_is_served(tmp_path: Path) -> None:
    promised = ("mod(h, 4) == 0", "mod(w, 4) == 0")
    executor = BucketedExec(patches, dynamic_axes="h, w", constraints=promised).with_pow2()
    executor.save(tmp_path / "f.bkt", Struct((16, 16), jnp.float32))
    loaded, exact = bucketjit.load(tmp_path / "f.bkt"), jax.jit(patches)
    x = floats(16, 16)
    for h, w in ((h, w) for h in range(4, 17, 4) for w in range(4, 17, 4)):
        expected = np.asarray(exact(x[:h, :w]))
        np.testing.assert_allclose(loaded(x[:h, :w]), expected, rtol=1e-4, atol=1e-5)


LINALG = [jnp.linalg.eigh, jnp.linalg.svd, jnp.linalg.qr, jnp.linalg.eig, jnp.linalg.slogdet]


@pytest.mark.sampled(3)
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


def test_a_named_tuple_that_cannot_be_imported(tmp_path: Path) -> None:
    class Local(NamedTuple):
        only: Any

    with pytest.raises(ArtifactError, match="can be imported by its name"):
        BucketedExec(lambda x: Local(x)).with_pow2().save(tmp_path / "f.bkt", LIKE)
