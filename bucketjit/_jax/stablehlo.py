"""StableHLO modules: read, write, describe and refine them.

`bucketjit._stages.modules` builds functions in modules, and decides what is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.export
from jax.extend.mlir import ir as _ir
from jax.extend.mlir import refine_polymorphic_shapes, serialize_portable_artifact
from jax.extend.mlir.dialects import func as _func
from jax.extend.mlir.dialects import stablehlo as _hlo
from jax.interpreters import mlir

from bucketjit._jax import names
from bucketjit._raised import first_line

# The types that jaxlib tells of its bindings lack much.
ir: Any = _ir
func: Any = _func
hlo: Any = _hlo

Module = Any  # an `ir.Module` of jaxlib

MAIN = "main"


class BadModule(Exception):
    """A module cannot be read, or is not what is needed; the message says why, in words."""


def kept_arguments(lowered: jax.stages.Lowered) -> list[int]:
    """The arguments that the module of a lowered function takes, by position among all leaves.

    ``jit`` drops those that the function does not read (``MeshComputation.compile_args``, since
    0.4; no public name says which).
    """
    arguments = lowered._lowering.compile_args
    if arguments.get("host_callbacks") or arguments.get("keepalive"):
        raise BadModule("it calls back into Python")
    if arguments.get("ordered_effects"):
        raise BadModule("it has effects whose order is kept")
    if arguments.get("num_devices", 1) != 1:
        raise BadModule("it is for several devices")
    kept = sorted(arguments["kept_var_idx"])
    module: Any = lowered.compiler_ir()
    if len(ir.SymbolTable(module.operation)["main"].type.inputs) != len(kept):
        raise BadModule("it takes constants of this process as arguments")
    return kept


@contextlib.contextmanager
def _listening(context: Any) -> Iterator[list[str]]:
    """Collects the errors of MLIR, which it would write to standard error otherwise."""
    errors: list[str] = []

    def hear(diagnostic: Any) -> bool:
        errors.append(str(diagnostic.message))
        return True

    handler = context.attach_diagnostic_handler(hear)
    try:
        yield errors
    finally:
        handler.detach()


def read_module(artifact: bytes) -> Module:
    """The module of a portable artifact (``stablehlo.deserialize_portable_artifact`` of jaxlib)."""
    if not artifact.startswith(b"ML\xefR"):
        raise BadModule("it does not begin like MLIR bytecode")
    context = mlir.make_ir_context()
    with _listening(context) as errors:
        try:
            module = hlo.deserialize_portable_artifact(context, artifact)
        except Exception as error:
            reason = errors[0] if errors else first_line(error)
            raise BadModule(reason.splitlines()[0]) from error
    if MAIN not in ir.SymbolTable(module.operation):
        raise BadModule(f"it has no function {MAIN!r}")
    return module


def write_module(module: Module, version: str | None = None) -> bytes:
    """A module as a portable artifact (``serialize_portable_artifact`` of jaxlib)."""
    version = version or _version_of_readers(hlo.StablehloCompatibilityRequirement.WEEK_4)
    write = serialize_portable_artifact
    with _listening(module.context) as errors:
        try:
            return bytes(write(module, version, False))
        except Exception as error:
            reason = errors[0] if errors else first_line(error)
            # CHLO's scan becomes a composite with a region, which StableHLO has no form for. With
            # True it is stored as it is; so does `jax.export`.
            with contextlib.suppress(Exception):
                return bytes(write(module, version, True))
            raise BadModule(f"StableHLO {version} cannot hold it: {reason}") from error


def _version_of_readers(requirement: Any) -> str:
    """The version of StableHLO that the readers of the last weeks know."""
    return str(hlo.get_version_from_compatibility_requirement(requirement))


def copy_of(module: Module) -> Module:
    """A copy in a context of its own: a lowered function shares its module with JAX's caches."""
    with mlir.make_ir_context():
        return ir.Module.parse(_written(module))


def _written(module: Module) -> bytes:
    written = io.BytesIO()
    module.operation.write_bytecode(written)
    return written.getvalue()


# The error of the pass is "INVALID_ARGUMENT: ...: error: loc("..."): what is wrong", and a dump of
# the operation. What is wrong is followed by the whole specification of the shapes.
_REASON = re.compile(r"error: (?:loc\(.*?\): )?(.+)")
_DETAILS = re.compile(r"\s+(Using the following polymorphic|Please see https).*")


def reason_in(error: BaseException) -> str:
    """What is wrong with the sizes of a module, in an error of JAX or of its refinement."""
    match = _REASON.search(str(error))
    return _DETAILS.sub("", first_line(error) if match is None else match[1])


def refined(module: Module) -> bytes:
    """A module in which no size is open any more, as an artifact, if ``main`` has static types.

    XLA's pass of shape refinement finds the other sizes; JAX runs it before it compiles a function.
    """
    raw = refine_polymorphic_shapes(
        mlir_module=_written(module),
        enable_shape_assertions=True,
        validate_static_shapes=True,
        enable_shardy=jax.config.values["jax_use_shardy_partitioner"],
    )
    # jaxlib also writes bytes from bytes, and then prints what it cannot write to standard error.
    with mlir.make_ir_context():
        module = ir.Module.parse(raw)
        module.operation.attributes["jax.uses_shape_polymorphism"] = ir.BoolAttr.get(False)
        return write_module(module)


_export = names.module("export._export")

_DIALECTS = frozenset(("builtin", "func", "stablehlo", "chlo", "sdy"))


def stable_targets() -> frozenset[str]:
    """The targets of custom calls that JAX keeps stable in exported modules.

    ``jax.export`` refuses all others when it writes a module; the list has no public name.
    """
    return frozenset(_export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE)


def foreign_operations(artifact: bytes, allowed: Set[str]) -> list[str]:
    """The operations of a module that are not trusted, in words.

    ``jax.export`` looks at custom calls when it writes a module, not when it reads one.
    """
    foreign: dict[str, None] = {}
    for name, target in _operations(artifact):
        if target is None and name.partition(".")[0] not in _DIALECTS:
            foreign[f"the operation {name!r}"] = None
        elif target is not None and target not in allowed:
            foreign[f"a custom call of {target!r}"] = None
    return list(foreign)


def custom_call_targets(artifact: bytes) -> list[str]:
    """The targets of the custom calls of a module, sorted."""
    return sorted({target for _, target in _operations(artifact) if target is not None})


def _operations(artifact: bytes) -> list[tuple[str, str | None]]:
    """The name of each operation of a module, and the target of a custom call.

    Only jaxlib's bindings of MLIR show the operations of a module.
    """
    operations: list[tuple[str, str | None]] = []

    def look(operation: Any) -> Any:
        target = None
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
        operations.append((operation.name, target))
        return ir.WalkResult.ADVANCE

    module = read_module(artifact)
    with module.context:
        module.operation.walk(look)
    return operations


# --- exporting ---

# Parts of ``jax.export`` that have no public name: shape assertions, and exported derivatives.
#
# And named tuples, which ``jax.export`` writes only if somebody has registered their class. That
# goes for those of JAX, too, such as the result of ``jnp.linalg.eigh``.


_NAMED = "bucketjit.namedtuple:"  # then the module and the class
_NAMED_IN = re.compile(_NAMED.encode() + rb"([\w.]+):([\w.]+)")

_shape_poly = names.module("export.shape_poly")


def assert_sizes(holds: Any, message: str, *sizes: Any) -> None:
    """Add a shape assertion to the traced program (``shape_poly.shape_assertion``, since 0.4.14).

    It is checked when the sizes of the module are fixed, before XLA compiles it. ``jax.export``
    makes such assertions for constraints of its scope only, which cannot be ``!=``.
    """
    _shape_poly.shape_assertion(holds, *sizes, error_message=message)


def for_older_readers(exported: Any) -> Any:
    """An exported function whose module readers of the last twelve weeks can read.

    ``jax.export`` writes for readers of the last four weeks, and has no option for others. Its
    module is the field ``mlir_module_serialized`` of ``jax.export.Exported``. A module that
    older versions of StableHLO cannot hold stays as it is.
    """
    try:
        module = read_module(exported.mlir_module_serialized)
        version = _version_of_readers(hlo.StablehloCompatibilityRequirement.WEEK_12)
        written = write_module(module, version)
    except BadModule:
        return exported
    return dataclasses.replace(exported, mlir_module_serialized=written)


def without_assertion_effects(exported: Any) -> Any:
    """An exported function that can be serialized, though its program has shape assertions.

    ``shape_poly.ShapeAssertionEffect`` (since 0.4.14) has no serialized form. The assertions are in
    the module in any case.
    """
    kept = [e for e in exported.unordered_effects if type(e).__name__ != "ShapeAssertionEffect"]
    return dataclasses.replace(exported, unordered_effects=tuple(kept))


def with_derivatives(
    exported: Any, order: int, patched: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """An exported function whose derivatives are exported in a context.

    ``Exported.vjp`` traces when it is called, through the field ``_get_vjp`` (since 0.4.31). No
    argument of ``jax.export.export`` says in which context.
    """
    vjp = exported._get_vjp
    exported = without_assertion_effects(exported)

    def make(primal: Any) -> Any:
        with patched():
            return with_derivatives(vjp(primal), 0, patched)

    if order == 0:
        return dataclasses.replace(exported, _get_vjp=make)
    with patched():
        derivative = with_derivatives(vjp(exported), order - 1, patched)
    return dataclasses.replace(exported, _get_vjp=lambda primal: derivative)


def register_namedtuples(tree: Any) -> None:
    """Let ``jax.export`` write the named tuples in a tree, by the names that import them."""
    node = tree.node_data()
    kind = None if node is None else node[0]
    if kind is not None and _is_namedtuple(kind):
        with contextlib.suppress(Exception):
            if _named(kind.__module__, kind.__qualname__) is kind:
                _register(kind)
    for child in tree.children():
        register_namedtuples(child)


def register_named_in(raw: bytes) -> None:
    """Let ``jax.export`` read the named tuples in a module. Nothing but JAX is imported for it."""
    for module, name in set(_NAMED_IN.findall(raw)):
        _register(_named(module.decode(), name.decode()))


def _named(module: str, name: str) -> Any:
    kind: Any = sys.modules.get(module)
    if kind is None:
        if module.split(".")[0] != "jax":  # a file must not choose what is imported
            raise ImportError(f"import {module} before you load the file")
        kind = importlib.import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not _is_namedtuple(kind):
        raise ImportError(f"the module {module!r} has no NamedTuple {name!r}")
    return kind


def _is_namedtuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


@functools.cache
def _register(kind: type[Any]) -> None:
    with contextlib.suppress(ValueError):  # the user has registered it
        name = f"{_NAMED}{kind.__module__}:{kind.__qualname__}"
        jax.export.register_namedtuple_serialization(kind, serialized_name=name)
