"""Export a traced program as one module for all sizes, and fix the sizes of such a module.

The program that bucketjit has traced is evaluated under ``jax.export``, with its own dimension
variables. The user's function is not traced again, so every decision about sizes that the first
trace has made, and the guards that hold it, are those of the module:

    guard      n >= 5                                   in the symbolic scope of the program
    module     custom_call @shape_assertion(...)        checked when the sizes are fixed

Nothing is masked, so a program that no masking rule serves is exported all the same.

To fix the sizes, JAX lowers a call of the module at these, and XLA's shape refinement follows them
through it. The Python code that the module was made from is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.export  # an attribute of jax only after this import
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._config import is_int_from
from bucketjit._extras import Extra
from bucketjit._ir.expressions import Shape, evaluate, is_symbolic, variables_of
from bucketjit._ir.guards import COMPARE, Guard
from bucketjit._ir.jax_patches import forgetful_jax, lenient_jax
from bucketjit._ir.primitives import size_constant_p
from bucketjit._ir.program import Program
from bucketjit._jax import stablehlo
from bucketjit._jax.jaxprs import CALLBACKS, all_equations, equations_around, is_literal
from bucketjit._jax.user_code import in_brackets, source_line
from bucketjit._raised import first_line, in_one_line, is_of_machine
from bucketjit._tracing.call import Call
from bucketjit._tracing.concrete import at_other_sizes
from bucketjit.errors import ExportError

# Small sizes, and sizes around powers of two, up to which programs tend to decide otherwise.
_SIZES = (*range(1, 10), 12, 13, *(2**k + d for k in range(4, 12) for d in (-1, 0, 1)), 4095, 4096)
_FURTHER = (100, 500, 1000, 1500, 3000)


def _guards_of_traces(program: Program, sizes: Mapping[str, int]) -> list[Guard]:
    """Compare a program with traces at many sizes of each variable."""
    pinned = {guard.left for guard in program.guards if guard.pins}
    free = [v for v in sizes if v not in pinned]
    guards = []
    for variable in free:
        size = sizes[variable]
        tried = sorted({*_SIZES, *_FURTHER, *(k * size for k in (1, 2, 3, 4))})
        least = _last(program, sizes, variable, [n for n in reversed(tried) if n <= size])
        most = _last(program, sizes, variable, [n for n in tried if n >= size])
        if least > 1:
            guards.append(Guard(variable, ">=", str(least)))
        guards.append(Guard(variable, "<=", str(most)))
    return guards


def _last(program: Program, sizes: Mapping[str, int], variable: str, tried: Sequence[int]) -> int:
    """The last of these sizes up to which all traces are those of the program."""
    last = sizes[variable]
    for size in tried:
        if not _is_right(program, {**sizes, variable: size}):
            while abs(last - size) > 1:  # to the boundary
                middle = (last + size) // 2
                right = _is_right(program, {**sizes, variable: middle})
                last, size = (middle, size) if right else (last, middle)
            return last
        last = size
    return last


def _is_right(program: Program, sizes: Mapping[str, int]) -> bool:
    """Whether the trace at these sizes is that of the program, or a guard excludes them."""
    return not program.admits(sizes) or (
        at_other_sizes(lambda: program.size_constants(sizes)) is not None
    )


PLATFORMS = frozenset(("cpu", "cuda", "rocm", "tpu"))
_CALLBACKS = CALLBACKS | {"debug_print", "buffer_callback"}


def export_dynamic(call: Call, platforms: Sequence[str] | None, vjp_order: int) -> Any:
    """Export the program of a call; see `BucketedExec.export_dynamic`."""
    check_platforms(platforms)
    for path, kind in zip(call.signature.paths, call.signature.types, strict=True):
        if kind.dtype is None:
            raise ExportError(
                f"{path}: it is itself a size, and a module takes sizes from the shapes of arrays "
                "alone; take the size from an array's shape, or make the argument static"
            )
    types = [t for t in call.signature.types if t.dtype is not None]
    program = call.program
    if program is None:
        if call.refusal is not None:
            raise ExportError(f"cannot export: {call.refusal}")
        if any(0 in shape for shape in call.shapes):
            raise ExportError("an axis has size 0; give arguments in which every axis is longer")
        shapes: Sequence[Shape] = call.shapes
        function: Callable[..., Any] = call.signature.fn
    else:
        assert isinstance(program, Program)
        if (why := program.why_not_apart()) is not None:
            raise ExportError(f"cannot export: {why}")
        shapes = program.in_shapes
        run = evaluator(program, call.sizes)
        tree, consts = program.out_tree, program.consts

        def function(*args: Any, **kwargs: Any) -> Any:
            return tree.unflatten(run(consts, jax.tree_util.tree_leaves((args, kwargs))))

    structs = [
        jax.ShapeDtypeStruct(shape, t.dtype, weak_type=t.weak_type, sharding=t.sharding)
        for shape, t in zip(shapes, types, strict=True)
    ]
    args, kwargs = call.tree.unflatten(structs)

    def exported(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    fn = call.signature.fn
    exported.__name__ = getattr(fn, "__name__", type(fn).__name__)
    jitted = jax.jit(exported, donate_argnums=tuple(call.donate))
    try:
        with lenient_jax(), forgetful_jax():
            module = jax.export.export(jitted, platforms=platforms)(*args, **kwargs)
        stablehlo.register_namedtuples(module.in_tree)  # for `Exported.serialize`
        stablehlo.register_namedtuples(module.out_tree)
        return stablehlo.with_derivatives(module, vjp_order, lenient_jax)
    except Exception as error:
        if isinstance(error, ExportError) or is_of_machine(error):
            raise
        raise ExportError(f"jax.export cannot export it: {in_one_line(error)}") from error


def check_platforms(platforms: object) -> None:
    """Refuse platforms that modules cannot be for."""
    if platforms is None:
        return
    is_list = isinstance(platforms, Iterable) and not isinstance(platforms, str)
    names = list(platforms) if is_list else []  # type: ignore[call-overload]
    if not names or not all(isinstance(name, str) and name in PLATFORMS for name in names):
        raise ExportError(
            "platforms: expected a list such as ['cpu', 'cuda'], of the names that JAX gives to "
            f"modules ({', '.join(sorted(PLATFORMS))}), got {platforms!r}"
        )


def refuse_callbacks(jaxpr: Jaxpr) -> None:
    """Refuse a program that calls back into Python, which no module can."""
    for eqn in all_equations(jaxpr):
        if eqn.primitive.name in _CALLBACKS:
            raise ExportError(
                f"{eqn.primitive.name}: a module cannot call back into Python"
                f"{_place(eqn, equations_around(jaxpr, eqn))}; return the value, or leave it out"
            )


def _place(eqn: JaxprEqn, around: Sequence[JaxprEqn] = ()) -> str:
    return in_brackets(source_line(eqn, around))


# --- the function that is exported ----------------------------------------------------------


def evaluator(program: Program, sizes: Mapping[str, int]) -> Callable[..., list[Any]]:
    """A program as a function to export, with its guards as shape assertions."""
    refuse_callbacks(program.jaxpr)
    variables = _variables(program.in_shapes)
    # The scope of symbolic traces holds all guards but "!="; that of concrete traces holds the
    # user's constraints only.
    guards = [g for g in program.guards if g.op == "!=" or program.pairing is not None]
    if program.pairing is not None:
        refuse_what_python_computes(program)
        guards += _guards_of_traces(program, sizes)

    def run(consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        for guard in guards:
            left, right = (_value(side, variables) for side in (guard.left, guard.right))
            names = sorted(guard.variables)
            values = ", ".join(f"{name} = {{{i}}}" for i, name in enumerate(names))
            stablehlo.assert_sizes(
                COMPARE[guard.op](left, right),
                f"The module holds for sizes with {guard} only, but found {values}.",
                *(_value(name, variables) for name in names),
            )
        return jax.core.eval_jaxpr(program.jaxpr, consts, *leaves)

    return run


def _variables(shapes: Sequence[Shape]) -> dict[str, Any]:
    """The dimension variables of these shapes by name, as sizes of their scope."""
    dims = [d for shape in shapes for d in shape if is_symbolic(d)]
    return {
        name: jax.export.symbolic_shape(name, scope=d.scope)[0]
        for d in dims
        for name in variables_of(str(d))
    }


def _value(text: str, variables: Mapping[str, Any]) -> Any:
    scope = next(d.scope for d in variables.values() if is_symbolic(d))
    dim: Any = jax.export.symbolic_shape(text, scope=scope)[0]
    return dim.dimension_as_value() if is_symbolic(dim) else jnp.asarray(dim, jnp.int32)


# --- programs of concrete traces ------------------------------------------------------------


def refuse_what_python_computes(program: Program) -> None:
    """Refuse a program that needs, at each size, what only Python can compute."""
    pairing = program.pairing
    if pairing is None:
        return
    reason = ""
    remedy = "compute on the size with jax.numpy, such as jnp.arange(n) or jnp.sqrt(1.0 * n)"
    if pairing.num_size_constants:
        reason = (
            f"a constant of shape {program.size_constant_shapes[0]} is computed by Python from a "
            f"size, or decided by one{_line_of_use(program.jaxpr)}"
        )
    elif program.unfitted:
        reason = (
            "a size in the program is computed by Python in a way that no expression of the "
            "variables fits"
        )
    elif pairing.nests_by_size:
        reason = "the tree of the results depends on a size"
        remedy = "return the same tree at all sizes"
    if reason:
        raise ExportError(f"{reason}{f'; {pairing.why}' if pairing.why else ''} ({remedy})")


def _line_of_use(jaxpr: Jaxpr) -> str:
    """The line of the first equation that reads a size constant, in brackets."""
    equations = list(all_equations(jaxpr))
    outs = {v for eqn in equations if eqn.primitive is size_constant_p for v in eqn.outvars}
    readers = (eqn for eqn in equations if any(not is_literal(x) and x in outs for x in eqn.invars))
    lines = (_place(eqn, equations_around(jaxpr, eqn)) for eqn in readers)
    return next(filter(None, lines), "")


# --- fixed sizes ----------------------------------------------------------------------------

_WIDE = ("int64", "uint64", "float64", "complex128")  # types that JAX narrows without x64
_MOST = 2**31 - 1  # of a size: XLA and the masks of bucketjit count in int32


def refine(artifact: object, sizes: object, platform: str | None = None) -> bytes:
    """Fix the sizes of an exported module; see `bucketjit.refine`."""
    if not isinstance(artifact, bytes | bytearray | memoryview):
        raise ExportError(f"artifact: expected bytes, got {type(artifact).__name__}")
    exported = exported_from(bytes(artifact), "artifact")
    if platform not in (None, *exported.platforms):
        raise ExportError(
            f"platform: the module is for {', '.join(exported.platforms)}, not for {platform!r}"
        )
    dims = [d for aval in exported.in_avals for d in aval.shape if is_symbolic(d)]
    variables = dict.fromkeys(v for d in dims for v in variables_of(str(d)))
    checked = checked_sizes(sizes, list(variables))
    try:
        leaves = [
            jax.ShapeDtypeStruct(tuple(evaluate(d, checked) for d in aval.shape), aval.dtype)
            for aval in exported.in_avals
        ]
        args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, leaves)
        platforms = exported.platforms if platform is None else (platform,)
        with jax.enable_x64(any(str(aval.dtype) in _WIDE for aval in exported.in_avals)):
            traced = jax.jit(exported.call).trace(*args, **kwargs)
            return stablehlo.refined(traced.lower(lowering_platforms=platforms).compiler_ir())
    except Exception as error:
        if is_of_machine(error):
            raise
        raise ExportError(
            f"sizes: the module does not hold at these: {stablehlo.reason_in(error)}"
        ) from error


def checked_sizes(sizes: object, variables: Sequence[str]) -> dict[str, int]:
    """The sizes as ints, if each variable of a module has one."""
    if not isinstance(sizes, Mapping) or set(sizes) != set(variables):
        raise ExportError(
            "sizes: expected a dict with the size of each variable of the module "
            f"({', '.join(variables) or 'none'}), got {sizes!r}"
        )
    for name, size in sizes.items():
        if not is_int_from(size, 1) or size > _MOST:
            raise ExportError(f"sizes: {name}: expected an int from 1 to {_MOST}, got {size!r}")
    return {name: int(size) for name, size in sizes.items()}


def exported_from(raw: bytes, place: str) -> Any:
    """The module in the bytes of ``jax.export.Exported.serialize()``."""
    with Extra("exported functions", "flatbuffers", "export"):
        import flatbuffers  # type: ignore[import-untyped]  # noqa: F401
    try:
        stablehlo.register_named_in(raw)
        exported = jax.export.deserialize(bytearray(raw))
    except Exception as error:
        if isinstance(error, ImportError) or "register_pytree_node_serialization" in str(error):
            raise ExportError(
                f"{place}: its arguments or results are of a class that this process does not "
                f"know: {first_line(error)} (register it by "
                "jax.export.register_pytree_node_serialization)"
            ) from error
        raise ExportError(
            f"{place}: expected the bytes of jax.export.Exported.serialize(), got {len(raw)} bytes "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    version = exported.calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    if version > newest:
        raise ExportError(
            f"{place}: it has version {version} of jax.export's calling convention, and jax "
            f"{jax.__version__} knows those up to {newest}; upgrade jax"
        )
    return exported
