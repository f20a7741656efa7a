"""Run modules in this process and in others, for the tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_compile_options

from bucketjit._jax import stablehlo
from bucketjit._jax.arrays import device_list
from bucketjit._jax.module_building import Building, new_main


def text(artifact: bytes) -> str:
    """The module of a portable artifact as text."""
    return stablehlo.text_of(stablehlo.read_module(artifact))


def shapes_of(types: Sequence[Any]) -> list[list[int | None]]:
    """The shapes of types of a module; None for a size that is not fixed."""
    dynamic = stablehlo.ir.ShapedType.get_dynamic_size()
    ranked = [stablehlo.ir.RankedTensorType(type) for type in types]
    return [[None if n == dynamic else n for n in one.shape] for one in ranked]


def type_of_main(module: Any) -> Any:
    """The type of ``main``."""
    return stablehlo.ir.SymbolTable(module.operation)[stablehlo.MAIN].type


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
    """What a script prints in a process that can import neither bucketjit nor the tests."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    hidden = 'import sys; sys.modules["bucketjit"] = None\n'
    done = subprocess.run(
        [sys.executable, "-c", hidden + textwrap.dedent(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def with_static_entry(artifact: bytes) -> Any:
    """A module with a new ``main`` around one with bounds, which the CPU can run.

    It takes the whole buffers, then the sizes of all open axes in order. It returns the whole
    buffers of the results, then the sizes of all their open axes.
    """
    module = stablehlo.read_module(artifact)
    with new_main(module, "bounded") as build:
        _add_static_entry(build)
    return module


def _add_static_entry(build: Building) -> None:
    inputs = [_Static(build, type) for type in build.old.inputs]
    results = [_Static(build, type) for type in build.old.results]
    scalars = [[build.scalar_type()] * sum(len(x.open) for x in some) for some in (inputs, results)]
    of_args = [x.type for x in inputs] + scalars[0]
    of_results = [x.type for x in results] + scalars[1]
    with build.main(of_args, of_results, [{} for _ in of_args], [{} for _ in of_results]):
        sizes = iter(build.arguments[len(inputs) :])
        given = []
        for x, value in zip(inputs, build.arguments, strict=False):
            done: list[int] = []
            for axis in x.open:
                done.append(axis)
                value = build.with_size(value, next(sizes), axis, build.bounded(x.type, done))
            given.append(value)
        outs = build.call(given)
        found = [
            build.size_of(out, axis)
            for out, x in zip(outs, results, strict=True)
            for axis in x.open
        ]
        whole = []
        for out, x in zip(outs, results, strict=True):
            left = list(x.open)
            for axis in x.open:
                left.remove(axis)
                size = build.constant(x.shape[axis])
                out = build.with_size(out, size, axis, build.bounded(x.type, left))
            whole.append(out)
        build.returns([*whole, *found])


class _Static:
    """The type of a bounded value, as a whole buffer."""

    def __init__(self, build: Building, type: Any) -> None:
        import jaxlib.mlir.dialects.stablehlo as hlo
        from jaxlib.mlir import ir

        ranked = ir.RankedTensorType(type)
        dynamic = ir.ShapedType.get_dynamic_size()
        self.open = [i for i, n in enumerate(ranked.shape) if n == dynamic]
        bounds = hlo.TypeExtensions(ranked.encoding).bounds if self.open else ()
        self.shape = [bounds[i] if i in self.open else n for i, n in enumerate(ranked.shape)]
        self.type = ir.RankedTensorType.get(self.shape, ranked.element_type)


def padded(x: np.ndarray, shape: Sequence[int], garbage: Any = np.nan) -> np.ndarray:
    """An array in a larger buffer, whose padding is garbage."""
    if not np.issubdtype(x.dtype, np.inexact):
        garbage = 7
    out = np.full(shape, garbage).astype(x.dtype)
    out[tuple(map(slice, x.shape))] = x
    return out
