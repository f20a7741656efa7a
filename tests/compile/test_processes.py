"""Several processes and one directory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
FLAGS = "--xla_force_host_platform_device_count=2"
EXECUTABLES = 6  # two buckets of `attend`, one of them on another device too, and so on


def start(directory: str, seed: int, **variables: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": str(seed),
        "XLA_FLAGS": FLAGS,
        "JAX_PLATFORMS": "cpu",
        **variables,
    }
    # JAX's own cache writes in place: another process may read half a file, warns, and compiles.
    half = "ignore:Error reading persistent compilation cache entry:UserWarning"
    command = [sys.executable, "-W", "error::UserWarning", "-W", half]
    command += ["-m", "tests.compile.child"]
    return subprocess.Popen(
        [*command, directory],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A directory that two processes have filled at the same time, and what they told."""
    directory = tmp_path_factory.mktemp("kept")
    of_jax = {
        "JAX_COMPILATION_CACHE_DIR": str(directory / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    together = [start(str(directory / "own"), seed, **of_jax) for seed in (1, 2)]
    return directory, of_jax, [told(p) for p in together]


def test_two_at_the_same_time(begun):
    directory, _, first = begun
    assert [t["compiles"] + t["loads"] for t in first] == [EXECUTABLES] * 2
    assert first[0]["results"] == first[1]["results"]
    names = [p.name for p in (directory / "own").iterdir()]
    assert len(names) == EXECUTABLES and all(n.endswith(".bjx") for n in names)


def test_the_next_one_compiles_nothing(begun):
    directory, _, first = begun
    later = told(start(str(directory / "own"), 3))
    assert (later["compiles"], later["loads"], later["backend"]) == (0, EXECUTABLES, 0)
    assert later["results"] == first[0]["results"]


def test_the_cache_of_jax_has_it_all(begun):
    """Lowering is the same in every process, so JAX's own cache finds everything too."""
    directory, of_jax, first = begun
    later = told(start("-", 4, **of_jax))
    assert (later["compiles"], later["loads"], later["missed"]) == (EXECUTABLES, 0, 0)
    assert later["results"] == first[0]["results"]
