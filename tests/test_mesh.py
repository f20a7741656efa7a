"""Arrays that are sharded over a mesh, of explicit axes (those of ``jax.make_mesh``) or not."""

import json
import os
import subprocess
import sys

import pytest

from tests.on_a_mesh import CASES


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "step"), [("explicit", 2), ("explicit", 1), ("auto", 1)])
def test_sharded_calls(kind: str, step: int) -> None:
    """One process runs all cases, or every second one."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-m", "tests.on_a_mesh", kind, str(step)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys([*CASES][::step], "ok")
