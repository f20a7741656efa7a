"""Run modules in this process and in others, for the tests of this folder."""

import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_compile_options

from bucketjit._jax import stablehlo
from bucketjit._jax.serialization import device_list
from tests.alone import run_python


def text(artifact: bytes) -> str:
    """The module of a portable artifact as text."""
    return str(stablehlo.read_module(artifact))


def main_line(artifact: bytes) -> str:
    """The line of a module that has the types of ``main``."""
    (line,) = [line for line in text(artifact).splitlines() if "@main(" in line]
    return line


def run(module: Any, *args: Any) -> list[np.ndarray]:
    """Run a module on the default device, as a PJRT client in C++ does."""
    device = jax.local_devices()[0]
    executable = device.client.compile_and_load(
        str(module),
        executable_devices=device_list((device,)),
        compile_options=get_compile_options(1, 1),
    )
    arrays = [jax.device_put(np.asarray(x)) for x in args]
    outs = executable.execute_sharded(arrays).disassemble_into_single_device_arrays()
    return [np.asarray(out[0]) for out in outs]


def in_another_process(folder: Path, script: str) -> str:
    """What a script prints in a process that cannot import bucketjit."""
    hidden = 'import sys; sys.modules["bucketjit"] = None\n'
    done = run_python("-c", hidden + textwrap.dedent(script), folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
