"""IREE: what ``jax.export`` writes, compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import iree.compiler
import iree.runtime
import jax
import numpy as np
from jax import export

from benchmarks.contenders import Contender, padded, pow2_bucket
from benchmarks.contenders.jax_encoder import encode, encode_masked
from benchmarks.encoder import LONGEST, Sizes


def open_sizes(weights: Any, sizes: Sizes) -> Contender:
    """One module for all sizes."""
    shape = export.symbolic_shape("b, s", constraints=[f"s <= {LONGEST}"])
    call = _compile(encode, weights, jax.ShapeDtypeStruct(shape, np.int32))
    return Contender(call, lambda: 1)


def per_bucket(weights: Any, sizes: Sizes) -> Contender:
    """A module for each bucket, of the expert's masked function."""
    modules: dict[tuple[int, int], Callable[..., np.ndarray]] = {}
    size = jax.ShapeDtypeStruct((), np.int32)

    def run(tokens: np.ndarray) -> np.ndarray:
        b, s = tokens.shape
        bucket = pow2_bucket(b, s)
        if bucket not in modules:
            shape = jax.ShapeDtypeStruct(bucket, np.int32)
            modules[bucket] = _compile(encode_masked, weights, shape, size, size)
        states = modules[bucket](padded(tokens, bucket), np.int32(b), np.int32(s))
        return states[:b, :s]

    return Contender(run, lambda: len(modules))


def _compile(fn: Callable[..., Any], weights: Any, *args: Any) -> Callable[..., np.ndarray]:
    """``fn(weights, *args)`` by IREE, with the weights kept on its device."""
    exported = export.export(jax.jit(fn))(jax.tree.map(jax.typeof, weights), *args)
    try:
        binary = iree.compiler.compile_str(
            exported.mlir_module_serialized,
            target_backends=["llvm-cpu"],
            input_type="stablehlo",
            extra_args=["--iree-llvmcpu-target-cpu=host"],
        )
    except iree.compiler.CompilerToolError as error:
        # The first lines of its text only say that there was an error.
        raise RuntimeError(str(error).partition("error: ")[2]) from error
    config = iree.runtime.Config("local-task")
    context = iree.runtime.SystemContext(config=config)
    module = iree.runtime.VmModule.copy_buffer(context.instance, binary)
    context.add_vm_module(module)
    main = context.modules[module.name]["main"]
    held = [iree.runtime.asdevicearray(config.device, w) for w in jax.tree.leaves(weights)]
    kept = exported.module_kept_var_idx

    def call(*args: Any) -> np.ndarray:
        leaves = [*held, *args]
        return main(*(leaves[i] for i in kept)).to_host()

    return call
