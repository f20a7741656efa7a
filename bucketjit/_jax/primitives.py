"""Primitives by name, and what a primitive calls or is implemented by."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir

from bucketjit._jax import names
from bucketjit._jax.names import Without, lacking

_effects = names.module("effects")
_mlir = names.module("interpreters.mlir")


def find_primitives() -> dict[str, Any]:
    """Every primitive JAX has imported, by name (``jax.extend`` lists only some of them)."""
    found: dict[str, Any] = {}
    for name, module in modules_of_jax().items():
        if name.startswith("jax."):
            for value in vars(module).copy().values():
                if isinstance(value, jex_core.Primitive):
                    found.setdefault(value.name, value)
    return found


def modules_of_jax() -> dict[str, Any]:
    """What is imported now.

    A copy is made at one go. While a list of the items is made, memory is asked for, garbage is
    collected, and another thread may import something.
    """
    return {name: m for name, m in sys.modules.copy().items() if m is not None}


_primitives: dict[str, Any] = {}


def primitive(name: str) -> Any | None:
    """The primitive called ``name``, or None where this JAX has none of that name."""
    if name not in _primitives:
        _primitives.update(find_primitives())
    return _primitives.get(name)


def name_of(eqn: JaxprEqn) -> str:
    """The name of the primitive of an equation, if it is JAX's; not of another one of that name."""
    return _name_of(eqn.primitive)


@functools.lru_cache(maxsize=4096)
def _name_of(prim: Primitive) -> str:
    name = str(prim.name)
    return name if primitive(name) is prim else ""


# Names of the primitives that call back into Python.
CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback"))


def primitives(*names: str) -> list[Any]:
    """The primitives of these names that this version of JAX has."""
    return [p for p in map(primitive, names) if p is not None]


_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "callee", "call")

# Names of the primitives that do nothing but run the program that they hold, on their operands.
CALLS = frozenset(
    (
        *("jit", "pjit", "call", "closed_call", "core_call", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
        *("custom_vmap_call", "remat_opt"),
    )
)


def called_jaxpr(params: Mapping[str, Any]) -> Any:
    """The program that an equation calls; its parameter has a name of its own in each primitive."""
    return next(params[name] for name in _CALLED if name in params)


_LOWERED_BY_FUNCTION = mlir.lower_fun(lambda: None).__code__  # shared by all that it returns


def implementation(primitive: Primitive) -> tuple[Callable[..., Any], bool] | None:
    """The function in JAX that a primitive stands for, if there is one.

    That is its ``impl``, or where this only runs the primitive by itself, what ``mlir.lower_fun``
    made its lowering from (``mlir._lowerings``, since 0.4; for all platforms, those of one may be
    library calls).

    Returns:
        The function of operands and parameters, and whether it returns a list.
    """
    run = primitive.impl
    if not (isinstance(run, functools.partial) and run.func.__name__ == "apply_primitive"):
        return run, primitive.multiple_results
    if lacking(Without.INSIDE):
        return None
    rule: Any = getattr(_mlir._lowerings.get(primitive), "rule", None)
    if getattr(rule, "__code__", None) is not _LOWERED_BY_FUNCTION:
        return None
    held = inspect.getclosurevars(rule).nonlocals
    return held["fun"], held["multiple_results"]


def fft_name(fft_type: Any) -> str:
    """Name of the kind of a Fourier transform (``"RFFT"``); the enum itself is not public."""
    return fft_type.name


def has_ordered_effect(eqn: JaxprEqn) -> bool:
    """True if the equation has an effect that JAX keeps in program order.

    ``effects.ordered_effects`` (since 0.3.10) is the only list of them.
    """
    return bool(_effects.ordered_effects.filter_in(eqn.effects))
