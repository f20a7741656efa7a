"""Files in other processes: without the source, and of other versions of JAX."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from tests.alone import run_python
from tests.artifact import golden
from tests.comparison import assert_close

_SOURCE = """
import jax, jax.numpy as jnp, numpy as np
table = np.arange(12, dtype=np.int32).reshape(4, 3)
def fn(x, i):
    if x.shape[1] > 3:
        x = jnp.sort(x, axis=1)[:, ::-1]
    y = jax.nn.softmax(x, axis=1)
    return {"y": y / y.shape[0], "i": (jnp.cumsum(i)[::-1], table[0] + i.max())}
"""
_SAVE = """
import sys, itertools
from source import *
import bucketjit
executor = bucketjit.BucketedExec(fn, dynamic_axes=("b, s", "b")).with_pow2()
like = np.ones((2, 4), np.float32), np.ones(2, np.int32)
executor.save(sys.argv[1], *like, sizes={"b": [2, 4], "s": [4, 8]}, executables=True)
found = {}
for b, s in itertools.product(range(1, 5), range(1, 9)):
    x, i = np.sin(np.arange(b * s, dtype=np.float32)).reshape(b, s), np.arange(b, dtype=np.int32)
    for number, leaf in enumerate(jax.tree.leaves(jax.jit(fn)(x, i))):
        found[f"{b},{s},{number}"] = leaf
np.savez(sys.argv[2], **found)
"""
_LOAD = """
import sys
import jax, numpy as np
import bucketjit
loaded = bucketjit.load(sys.argv[1], trust_executables=sys.argv[3] == "trusted")
found = np.load(sys.argv[2])
for name in found.files:
    b, s, number = map(int, name.split(","))
    x, i = np.sin(np.arange(b * s, dtype=np.float32)).reshape(b, s), np.arange(b, dtype=np.int32)
    leaf = jax.tree.leaves(loaded(x, i))[number]
    assert leaf.dtype == found[name].dtype
    np.testing.assert_allclose(leaf, found[name], rtol=1e-5, atol=1e-6)
assert "source" not in sys.modules
try:
    import source
except ImportError:
    pass
else:
    raise AssertionError("the source is here")
print(loaded.stats().compiles, loaded.cache_size())
"""


def run(code: str, *args: object, paths: tuple[Path, ...] = ()) -> str:
    done = run_python("-c", code, *map(str, args), folder=Path(os.sep), paths=paths)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_process_without_the_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "source.py").write_text(_SOURCE)
    file, results = tmp_path / "f.bkt", tmp_path / "results.npz"
    run(_SAVE, file, results, paths=(source,))
    compiles, size = map(int, run(_LOAD, file, results, "untrusted").split())
    assert compiles == size > 4
    # Of the executables those of this machine and these versions run, without a compile.
    assert run(_LOAD, file, results, "trusted").split() == ["0", str(size)]


@pytest.mark.parametrize("path", golden.files(), ids=lambda path: path.stem)
def test_files_of_every_version(path: Path) -> None:
    loaded, exact = bucketjit.load(path), jax.jit(golden.fn)
    for b, s in ((1, 1), (3, 5), (9, 10)):
        args = golden.arguments(b, s)
        assert_close(loaded(*args), exact(*args))

    def loss(params: object, fn: object) -> object:
        _, key, x = golden.arguments(3, 5)
        return jnp.sum(fn(params, key, x)["pooled"] ** 2)  # type: ignore[operator]

    params = golden.arguments(3, 5)[0]
    got = jax.grad(loss)(params, loaded)
    np.testing.assert_allclose(got["w"], jax.grad(loss)(params, exact)["w"], rtol=1e-4)


@pytest.mark.parametrize("path", golden.files_of_computed_sizes(), ids=lambda path: path.stem)
def test_files_of_every_version_with_computed_sizes(path: Path) -> None:
    loaded = bucketjit.load(path)
    for n in (4, 5, 8):
        for x in (golden.selected_from(n), -golden.selected_from(n)):
            if np.sum(x > 0) < 3:  # their program is for three numbers at least
                with pytest.raises(bucketjit.errors.FallbackError):
                    loaded(x)
                continue
            assert_close(loaded(x), golden.selecting(jnp.asarray(x)))


def test_there_are_files_of_both_versions() -> None:
    assert len(golden.files()) >= 2 and len(golden.files_of_computed_sizes()) >= 2


def test_the_function_of_the_files_is_masked() -> None:
    executor = BucketedExec(golden.fn, dynamic_axes=(None, None, "b, s, _")).with_pow2()
    assert executor.explain(*golden.arguments(3, 5)).kind == "masked"
