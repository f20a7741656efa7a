"""Calls beyond the saved buckets: the module of all sizes, compiled at a call's exact shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from bucketjit._artifact.saved_executables import WithConstants
from bucketjit._artifact.saved_program import LoadedProgram
from bucketjit._compile.argument_types import Expected, abstract, without_values
from bucketjit._compile.executable import Executable, Origin
from bucketjit._compile.requests import CompileRequest
from bucketjit._jax.arrays import with_type
from bucketjit._jax.compiler import compile_here
from bucketjit._signature.signer import SignedCall

Built = Callable[[Callable[[], Executable]], Executable]


def dynamic_request(
    signed: SignedCall,
    sizes: Mapping[str, int],
    program: LoadedProgram,
    key: Any,
    options: Mapping[str, Any],
    built: Built,
) -> CompileRequest:
    """The request for the executable of an exact shape.

    Args:
        signed: The call.
        sizes: Its size of each dimension variable.
        program: Its program, which was saved with a module of all sizes.
        key: The key of the executable.
        options: Options of XLA.
        built: Compiles, without options that XLA does not know.
    """
    known = without_values(signed)

    def build() -> Executable:
        return built(lambda: _build(known, sizes, program, options))

    def stand_in() -> Hashable | None:
        return None

    return CompileRequest(key, sizes, sizes, build, stand_in)


def _build(
    signed: SignedCall,
    sizes: Mapping[str, int],
    program: LoadedProgram,
    options: Mapping[str, Any],
) -> Executable:
    began = time.perf_counter()
    assert program.record.dynamic is not None
    module = program.source.module(program.record.dynamic)
    expected = Expected(set())
    is_size = [kind.dtype is None for kind in signed.signature.types]

    def exact(constants: Any, *args: object, **kwargs: object) -> Any:
        leaves = expected.check(args, kwargs)
        arrays = [x for x, size in zip(leaves, is_size, strict=True) if not size]
        outs = module.call(list(constants), arrays)
        typed = zip(outs, program.out_types, strict=True)
        return program.out_tree.unflatten([with_type(x, d, weak) for x, (d, weak) in typed])

    exact.__name__ = getattr(signed.signature.fn, "__name__", "exact")
    args, kwargs = signed.tree.unflatten(abstract(signed, {}))
    jitted = jax.jit(
        exact,
        donate_argnums=tuple(i + 1 for i in signed.donate),
        compiler_options=dict(options),
    )
    function = WithConstants(jitted, program.constants)
    compiled = compile_here(function.lower(*args, **kwargs))
    seconds = time.perf_counter() - began
    origin = Origin(signed, None, {})
    return Executable(
        dict(sizes), True, function, compiled, seconds, program.out_tree, function, origin=origin
    )
