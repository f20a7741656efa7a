"""Loaded functions in the middle of things: traces, copies, files that change, 64-bit types."""

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit.errors import ArgumentError, ArtifactError
from tests.artifact.test_saved_functions import floats, of, saved
from tests.comparison import assert_close

WEIGHTS = np.arange(1000, dtype=np.float32)


def weighed(x: Any) -> Any:
    return x.sum() * jnp.asarray(WEIGHTS).sum()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "first",
    [
        lambda f: jax.jit(f)(floats(3)),
        lambda f: jax.eval_shape(f, of(3)),
        lambda f: jax.vmap(f)(floats(2, 3)),
        lambda f: jax.jit(jax.grad(f))(floats(3)),
        lambda f: jax.lax.scan(lambda c, x: (c + f(x), None), jnp.float32(0), floats(2, 3)),
    ],
)
def test_a_first_call_inside_a_trace(first: Callable[[Any], Any], tmp_path: Path) -> None:
    loaded = saved(tmp_path, weighed, "n", of(4), derivatives=1)
    first(loaded)
    assert_close(loaded(floats(3)), weighed(floats(3)))
    assert_close(jax.jit(loaded)(floats(5)), weighed(floats(5)))


@pytest.mark.parametrize("change", ["altered", "truncated"])
def test_a_file_that_changes_after_it_was_loaded(change: str, tmp_path: Path) -> None:
    loaded = saved(tmp_path, weighed, "n", of(4))
    path = tmp_path / "f.bkt"
    at = path.read_bytes().index(WEIGHTS.tobytes())
    with open(path, "r+b") as file:
        if change == "truncated":
            file.truncate(0)
        else:
            file.seek(at)
            file.write((WEIGHTS + 1).tobytes())
    assert_close(loaded(floats(3)), weighed(floats(3)))


def test_results_of_weak_type_have_derivatives(tmp_path: Path) -> None:
    def fn(x: Any, s: Any) -> tuple[Any, Any]:
        return (x * s).sum(), s * 2

    loaded = saved(tmp_path, fn, ("n", None), of(4), 2.0, derivatives=1)
    got = jax.grad(lambda x, s: sum(loaded(x, s)), (0, 1))(floats(3), 3.0)
    assert_close(got, jax.grad(lambda x, s: sum(fn(x, s)), (0, 1))(floats(3), 3.0))


def test_donated_arguments_are_kept_for_derivatives(tmp_path: Path) -> None:
    executor = BucketedExec(lambda x: (x**3).sum(), dynamic_axes="n", donate_argnums=0).with_pow2()
    executor.save(tmp_path / "f.bkt", of(4), derivatives=1)
    loaded = bucketjit.load(tmp_path / "f.bkt")
    x = jnp.asarray(floats(3))
    assert_close(jax.grad(loaded)(x), 3 * floats(3) ** 2)
    assert not x.is_deleted()


def test_copies(tmp_path: Path) -> None:
    loaded = saved(tmp_path, weighed, "n", of(4))
    for other in (copy.copy(loaded), copy.deepcopy(loaded)):
        assert_close(other(floats(3)), weighed(floats(3)))
    with pytest.raises(TypeError, match="send its path"):
        pickle.dumps(loaded)


def test_a_pullback_keeps_its_function(tmp_path: Path) -> None:
    BucketedExec(jnp.sum, dynamic_axes="n").with_pow2().save(
        tmp_path / "f.bkt", of(4), derivatives=1
    )
    _, pullback = jax.vjp(bucketjit.load(tmp_path / "f.bkt"), np.ones(3, np.float32))
    gc.collect()
    np.testing.assert_allclose(pullback(np.float32(2))[0], [2, 2, 2])


def test_a_size_is_bound_under_vmap_and_grad(tmp_path: Path) -> None:
    executor = BucketedExec(lambda x, n: (x * n).sum(), dynamic_axes=("n", "n")).with_pow2()
    executor.save(tmp_path / "f.bkt", of(4), 4)
    loaded = bucketjit.load(tmp_path / "f.bkt")
    got = jax.vmap(lambda x: loaded(x, 3))(np.ones((2, 3), np.float32))
    np.testing.assert_allclose(got, [9, 9])
    with pytest.raises(ArtifactError, match="derivatives=1"):
        jax.grad(lambda x: loaded(x, 3))(np.ones(3, np.float32))


def test_arguments_by_name(tmp_path: Path) -> None:
    def fn(x: Any, w: Any, *, scale: Any) -> Any:
        return (x * w).sum() * scale

    executor = BucketedExec(fn, dynamic_axes={"x": "n"}).with_pow2()
    executor.save(tmp_path / "f.bkt", of(4), of(), scale=np.float32(1))
    loaded = bucketjit.load(tmp_path / "f.bkt")
    x, w, scale = np.ones(3, np.float32), np.float32(2), np.float32(5)
    assert float(loaded(x, w, scale=scale)) == float(loaded(x, w=w, scale=scale)) == 30
    assert float(loaded(scale=scale, w=w, x=x)) == 30
    assert loaded.explain(scale=scale, w=w, x=x).kind == "masked"
    with pytest.raises(ArgumentError, match="w: saved for"):
        loaded(x, scale=scale)


def test_types_of_64_bits(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        numbers = np.linspace(0, 1, 3)
        saved(tmp_path, lambda x: x.sum() + jnp.asarray(numbers), "n", of(4))
    with pytest.raises(ArtifactError, match=r"constants/0.bin.*float64.*jax_enable_x64', True"):
        bucketjit.load(tmp_path / "f.bkt")
    with jax.enable_x64(True):
        loaded = saved(tmp_path, lambda x: x.sum(), "n", of(4, dtype=np.float64))
    with pytest.raises(ArgumentError, match=r"float64\[n\].*jax_enable_x64=True, and here"):
        loaded(np.ones(3))
    with jax.enable_x64(True):
        assert loaded(np.ones(3)) == 3
