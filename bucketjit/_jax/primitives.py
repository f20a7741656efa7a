"""Find primitives by name, and the program or function behind a primitive."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir


def find_primitives() -> dict[str, Any]:
    """Every primitive in the imported modules of JAX, by name.

    ``jax.extend.core.primitives`` lists only some of them.
    """
    found: dict[str, Any] = {}
    for name, module in modules_of_jax().items():
        if name.startswith("jax."):
            for value in vars(module).copy().values():
                if isinstance(value, jex_core.Primitive):
                    found.setdefault(value.name, value)
    return found


def modules_of_jax() -> dict[str, Any]:
    """All modules that are imported now, by name.

    ``sys.modules.copy()`` is one step of the interpreter. A loop over the items is not: an
    allocation in it can start the garbage collector, and another thread can then import a module.
    """
    return {name: m for name, m in sys.modules.copy().items() if m is not None}


_primitives: dict[str, Any] = {}
_searched = [0]  # how many modules there were: one that came later may have added a name


def primitive(name: str) -> Any | None:
    """The primitive called ``name``, or None where this JAX has none of that name."""
    if name not in _primitives and _searched[0] != (count := len(sys.modules)):
        _primitives.update(find_primitives())
        _searched[0] = count
    return _primitives.get(name)


def name_of(eqn: JaxprEqn) -> str:
    """The name of the primitive of an equation; ``""`` if the primitive is not one of JAX."""
    return _name_of(eqn.primitive)


@functools.lru_cache(maxsize=4096)
def _name_of(prim: Primitive) -> str:
    name = str(prim.name)
    return name if primitive(name) is prim else ""


# Names of the primitives that call back into Python.
CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback"))


def primitives(*names: str) -> list[Any]:
    """Those primitives of these names that this version of JAX has."""
    return [p for p in map(primitive, names) if p is not None]


_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "callee", "call")

# Names of the primitives that only run the program that they hold, on their operands.
CALLS = frozenset(
    (
        *("jit", "pjit", "call", "closed_call", "core_call", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
        *("custom_vmap_call", "remat_opt"),
    )
)


def called_jaxpr(params: Mapping[str, Any]) -> Any:
    """The program that an equation with a primitive of `CALLS` runs.

    The name of its parameter differs from primitive to primitive.
    """
    return next(params[name] for name in _CALLED if name in params)


# The code of the functions that `mlir.lower_fun` returns: all share it.
_LOWERED_BY_FUNCTION = mlir.lower_fun(lambda: None).__code__


def implementation(primitive: Primitive) -> tuple[Callable[..., Any], bool] | None:
    """The function, written in JAX, that computes what a primitive computes.

    That is its ``impl``. If ``impl`` only compiles the primitive (``apply_primitive``), it is the
    function that ``mlir.lower_fun`` made the lowering from, which no public name returns
    (``mlir._lowerings``, since 0.4). Only the lowering for all platforms counts: that for one
    platform may be a library call.
    """
    run = primitive.impl
    if not (isinstance(run, functools.partial) and run.func.__name__ == "apply_primitive"):
        return run, primitive.multiple_results
    rule: Any = getattr(mlir._lowerings.get(primitive), "rule", None)
    if getattr(rule, "__code__", None) is not _LOWERED_BY_FUNCTION:
        return None
    held = inspect.getclosurevars(rule).nonlocals  # the arguments of `mlir.lower_fun`
    return held["fun"], held["multiple_results"]


def lower_by(primitive: Primitive, function: Callable[..., Any]) -> Primitive:
    """Let JAX lower a primitive of bucketjit as a function written in JAX.

    ``mlir.register_lowering`` (since 0.4) is public in ``jax.interpreters`` alone.
    """
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True))
    return primitive


def has_ordered_effect(eqn: JaxprEqn) -> bool:
    """Whether an equation has an effect whose order JAX keeps."""
    return any("Ordered" in type(effect).__name__ for effect in eqn.effects)
