"""Several processes and one directory."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.alone import run_python

FLAGS = "--xla_force_host_platform_device_count=2"
EXECUTABLES = 6  # two buckets of `attend`, one of them on another device too, and so on


def served(directory: str, seed: int, **variables: str) -> dict[str, Any]:
    """What a process tells that has served its calls."""
    # JAX's own cache writes in place: another process may read half a file, warns, and compiles.
    half = "ignore:Error reading persistent compilation cache entry:UserWarning"
    words = "-W", "error::UserWarning", "-W", half, "-m", "tests.compile.child", directory
    variables |= {"PYTHONHASHSEED": str(seed), "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
    done = run_python(*words, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A directory that two processes have filled at the same time, and what they told."""
    directory = tmp_path_factory.mktemp("kept")
    of_jax = {
        "JAX_COMPILATION_CACHE_DIR": str(directory / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with ThreadPoolExecutor(2) as pool:
        serve = functools.partial(served, str(directory / "own"), **of_jax)
        return directory, of_jax, list(pool.map(serve, (1, 2)))


def test_two_at_the_same_time(begun):
    directory, _, first = begun
    assert [t["compiles"] + t["loads"] for t in first] == [EXECUTABLES] * 2
    assert first[0]["results"] == first[1]["results"]
    names = [p.name for p in (directory / "own").iterdir()]
    assert len(names) == EXECUTABLES and all(n.endswith(".bjx") for n in names)


def test_the_next_one_compiles_nothing(begun):
    directory, _, first = begun
    later = served(str(directory / "own"), 3)
    assert (later["compiles"], later["loads"], later["backend"]) == (0, EXECUTABLES, 0)
    assert later["results"] == first[0]["results"]


def test_the_cache_of_jax_has_it_all(begun):
    """Lowering is the same in every process, so JAX's own cache finds everything too."""
    directory, of_jax, first = begun
    later = served("-", 4, **of_jax)
    assert (later["compiles"], later["loads"], later["missed"]) == (EXECUTABLES, 0, 0)
    assert later["results"] == first[0]["results"]
