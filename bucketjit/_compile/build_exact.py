"""Build an executable for the exact shape of a call, without padding or masks.

The counterpart of `bucketjit._compile.build`, for calls that are not masked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bucketjit._arrays.padding import plain
from bucketjit._compile.argument_types import Expected, abstract
from bucketjit._compile.executable import Executable, Origin
from bucketjit._config import Check
from bucketjit._ir.jax_patches import forgetful_jax, selecting_jax
from bucketjit._jax.compiler import compile_here
from bucketjit._jax.debug_info import as_user_code, traced_anew
from bucketjit._signature.signer import SignedCall


class Exact(NamedTuple):
    """The user's function as a jitted function for one exact shape, not yet compiled.

    Attributes:
        function: The jitted function.
        args, kwargs: The argument types to lower it for.
        expected: Raises for arguments of other types.
        donated: Positions of the donated arguments.
        options: Options of XLA.
    """

    function: Any
    args: Any
    kwargs: Any
    expected: Expected
    donated: tuple[int, ...]
    options: Mapping[str, Any]


def exact_function(signed: SignedCall, check: Check, options: Mapping[str, Any]) -> Exact:
    """The function that `build_exact` compiles. Traces nothing.

    Args:
        signed: The call.
        check: The kind of check. Checked calls run twice, so they donate nothing.
        options: Options of XLA.

    Returns:
        The function and the types to lower it for.
    """
    fn = signed.signature.fn
    # Size arguments, by position among the leaves. An exact shape fixes their values, so the
    # function gets these instead of tracers.
    static = {
        i: shape[0]
        for i, (shape, t) in enumerate(zip(signed.shapes, signed.signature.types, strict=True))
        if t.dtype is None
    }

    expected = Expected(set())

    def exact(*args: object, **kwargs: object) -> Any:
        leaves = expected.check(args, kwargs)
        tree: Any = jax.tree_util.tree_structure((args, kwargs))
        for i, value in static.items():
            leaves[i] = value
        args, kwargs = tree.unflatten(leaves)
        return fn(*args, **kwargs)

    exact.__name__ = getattr(fn, "__name__", "exact")
    donated = tuple(signed.donate) if check is Check.OFF else ()
    args, kwargs = signed.tree.unflatten(abstract(signed, {}))
    as_user_code(exact, fn, args, kwargs)
    function = jax.jit(exact, donate_argnums=donated, compiler_options=dict(options))
    return Exact(function, args, kwargs, expected, donated, options)


def result_types(signed: SignedCall) -> Any:
    """The types of the function's results. The function is traced, and not compiled.

    Args:
        signed: The call.

    Raises:
        Exception: Whatever the function raises for these arguments.
    """
    made = exact_function(signed, Check.OFF, {})
    return made.function.eval_shape(*made.args, **made.kwargs)


def one_by_one(signed: SignedCall) -> Any:
    """The function's results, each operation compiled and run by itself.

    XLA may compute a value again, with another rounding, for each operation that reads it, so that
    a comparison can contradict the value that is used; see
    `bucketjit._xla_defects.recomputed_values`. Operations that run one by one cannot be affected.

    Args:
        signed: The call.

    Raises:
        Exception: Whatever the function raises for these arguments, or raises only where ``jit``
            is disabled.
    """
    args, kwargs = signed.tree.unflatten(
        shape[0] if t.dtype is None else jnp.asarray(plain(x))
        for x, shape, t in zip(signed.leaves, signed.shapes, signed.signature.types, strict=True)
    )
    with jax.disable_jit():
        return jax.tree_util.tree_map(jnp.asarray, signed.signature.fn(*args, **kwargs))


def eagerly(signed: SignedCall) -> Any:
    """The function's results, for a function that computes sizes, which ``jit`` cannot trace.

    Args:
        signed: The call.

    Raises:
        Exception: Whatever the function raises for these arguments.
    """
    args, kwargs = signed.tree.unflatten(
        shape[0] if t.dtype is None else jnp.asarray(plain(x))
        for x, shape, t in zip(signed.leaves, signed.shapes, signed.signature.types, strict=True)
    )
    return jax.tree_util.tree_map(jnp.asarray, signed.signature.fn(*args, **kwargs))


def lower_exact(made: Exact) -> jax.stages.Lowered:
    """Lower the function for one exact shape, without compiling it.

    Args:
        made: The function.

    Returns:
        The lowered function.

    Raises:
        Exception: Whatever ``jax.jit(fn)`` raises for these arguments.
    """
    # If tracing fails, JAX must not keep the trace alive.
    with forgetful_jax(), selecting_jax(), traced_anew():
        return made.function.lower(*made.args, **made.kwargs)


def build_exact(
    signed: SignedCall,
    sizes: Mapping[str, int],
    made: Exact,
    lowered: jax.stages.Lowered | None = None,
) -> Executable:
    """Compile the function for one exact shape.

    Only the types and the placement of the arguments are used.

    Args:
        signed: The call that needs the executable.
        sizes: Its sizes, for the statistics.
        made: The function.
        lowered: The lowered function, if it was lowered before.

    Returns:
        The executable, as the cache stores it.

    Raises:
        Exception: Whatever ``jax.jit(fn)`` raises for these arguments.
    """
    began = time.perf_counter()
    if lowered is None:
        lowered = lower_exact(made)
    compiled = compile_here(lowered)
    seconds = time.perf_counter() - began
    tree = jax.tree_util.tree_structure(lowered.out_info)
    origin = Origin(signed, None, {})
    return Executable(
        dict(sizes), True, made.function, compiled, seconds, tree, made.function, origin=origin
    )
