"""Arrays that are sharded over a mesh, of explicit axes (those of ``jax.make_mesh``) or not."""

import json
import os

import pytest

from tests.alone import run_well
from tests.on_a_mesh import CASES


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "step"), [("explicit", 2), ("explicit", 1), ("auto", 1)])
def test_sharded_calls(kind: str, step: int) -> None:
    """One process runs all cases, or every second one."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    arguments = ("-m", "tests.on_a_mesh", kind, str(step))
    done = run_well(*arguments, timeout=600, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys([*CASES][::step], "ok")
