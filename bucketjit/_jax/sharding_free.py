"""StableHLO modules without what partitioners add: meshes, and how values are sharded."""

from __future__ import annotations

from typing import Any

from bucketjit._jax.stablehlo import BadModule, Module, ir

_SHARDY = "sdy."  # the dialect
_SHARDING = "mhlo.sharding"
_FRONTEND = "mhlo.frontend_attributes"  # a dict; where Shardy's dialect is not written, it is here
_OF_SHARDY = "xla.sdy."
_OF_ARGUMENTS = ("arg_attrs", "res_attrs")
_SEVERAL = ("SPMDFullToShardShape", "SPMDShardToFullShape")  # custom calls


def without_sharding(module: Module) -> bool:
    """Remove what says how a module is sharded, in Shardy's dialect or in the form before it.

    JAX writes it for functions on one device too, for random keys and for calls of LAPACK. There
    it means nothing, but readers that know StableHLO alone refuse it. No public name of JAX
    changes a module; jaxlib's bindings of MLIR do.
    """
    needless: list[Any] = []
    changed = False

    def look(operation: Any) -> Any:
        nonlocal changed
        changed |= _strip(operation.attributes)
        if operation.name.startswith(_SHARDY) or _target(operation) in ("Sharding", *_SEVERAL):
            needless.append(operation)
        return ir.WalkResult.ADVANCE

    with module.context, ir.Location.unknown():
        module.operation.walk(look)
        for operation in needless:
            name = _target(operation) or operation.name
            if name in ("Sharding", "sdy.sharding_constraint"):
                operation.results[0].replace_all_uses_with(operation.operands[0])
            elif name != "sdy.mesh":
                raise BadModule(f"it is for several devices, as it has {name!r}")
            operation.erase()
    return changed or bool(needless)


def _target(operation: Any) -> str | None:
    """The target of a custom call; None for other operations."""
    if operation.name != "stablehlo.custom_call":
        return None
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def _strip(attributes: Any) -> bool:
    """Remove attributes of an operation; return whether there were any."""
    changed = False
    for name in [name for name in attributes if _is_of_sharding(name)]:
        del attributes[name]
        changed = True
    if _FRONTEND in attributes and _OF_SHARDY in str(attributes[_FRONTEND]):
        kept = _stripped(attributes[_FRONTEND])
        if len(kept):
            attributes[_FRONTEND] = kept
        else:
            del attributes[_FRONTEND]
        changed = True
    for name in _OF_ARGUMENTS:
        if name in attributes:
            before = list(ir.ArrayAttr(attributes[name]))
            after = [_stripped(one) for one in before]
            if after != before:
                attributes[name] = ir.ArrayAttr.get(after)
                changed = True
    return changed


def _stripped(attributes: Any) -> Any:
    """A dict of attributes without those about sharding."""
    kept = {a.name: a.attr for a in ir.DictAttr(attributes) if not _is_of_sharding(a.name)}
    return ir.DictAttr.get(kept)


def _is_of_sharding(name: str) -> bool:
    return name == _SHARDING or name.startswith((_SHARDY, _OF_SHARDY))
