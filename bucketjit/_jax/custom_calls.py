"""What a module calls outside of itself, and which of these calls JAX promises to keep stable."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from bucketjit._jax import names
from bucketjit._jax.stablehlo import ir, read_module

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
    found: dict[str, None] = {}
    for name, target in _operations(artifact):
        if target is not None:
            if target not in allowed:
                found[f"a custom call of {target!r}"] = None
        elif name.partition(".")[0] not in _DIALECTS:
            found[f"the operation {name!r}"] = None
    return list(found)


def custom_call_targets(artifact: bytes) -> list[str]:
    """The targets of the custom calls of a module, sorted."""
    return sorted({target for _, target in _operations(artifact) if target is not None})


def _operations(artifact: bytes) -> list[tuple[str, str | None]]:
    """The name of each operation of a module, and the target of a custom call.

    Only jaxlib's bindings of MLIR show the operations of a module.
    """
    found: list[tuple[str, str | None]] = []

    def look(operation: Any) -> Any:
        target = None
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
        found.append((operation.name, target))
        return ir.WalkResult.ADVANCE

    module = read_module(artifact)
    with module.context:
        module.operation.walk(look)
    return found
