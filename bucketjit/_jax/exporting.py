"""Parts of ``jax.export`` that have no public name: shape assertions, and exported derivatives.

And named tuples, which ``jax.export`` writes only if somebody has registered their class. That
goes for those of JAX, too, such as the result of ``jnp.linalg.eigh``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.export  # an attribute of jax only after this import

from bucketjit._jax import names
from bucketjit._jax.stablehlo import BadModule, read_module, version_of_older_readers, write_module

_NAMED = "bucketjit.namedtuple:"  # then the module and the class
_NAMED_IN = re.compile(_NAMED.encode() + rb"([\w.]+):([\w.]+)")

_shape_poly = names.module("export.shape_poly")


def assert_sizes(holds: Any, message: str, *found: Any) -> None:
    """Add a shape assertion to the traced program (``shape_poly.shape_assertion``, since 0.4.14).

    It is checked when the sizes of the module are fixed, before XLA compiles it. ``jax.export``
    makes such assertions for constraints of its scope only, which cannot be ``!=``.
    """
    _shape_poly.shape_assertion(holds, *found, error_message=message)


def for_older_readers(exported: Any) -> Any:
    """An exported function whose module readers of the last twelve weeks can read.

    Its module is the field ``mlir_module_serialized`` of ``jax.export.Exported``. A module that
    older versions of StableHLO cannot hold stays as it is.
    """
    try:
        module = read_module(exported.mlir_module_serialized)
        written = write_module(module, version_of_older_readers())
    except BadModule:
        return exported
    return dataclasses.replace(exported, mlir_module_serialized=written)


def without_assertion_effects(exported: Any) -> Any:
    """An exported function that can be serialized, though its program has shape assertions.

    ``shape_poly.ShapeAssertionEffect`` (since 0.4.14) has no serialized form. The assertions are in
    the module in any case.
    """
    effects = tuple(
        effect
        for effect in exported.unordered_effects
        if type(effect).__name__ != "ShapeAssertionEffect"
    )
    return dataclasses.replace(exported, unordered_effects=effects)


def with_derivatives(
    exported: Any, order: int, patched: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """An exported function whose derivatives are exported in a context.

    ``Exported.vjp`` traces when it is called, through the field ``_get_vjp`` (since 0.4.31). No
    argument of ``jax.export.export`` says in which context.
    """
    own = exported._get_vjp
    exported = without_assertion_effects(exported)

    def make(primal: Any) -> Any:
        with patched():
            return with_derivatives(own(primal), 0, patched)

    if order == 0:
        return dataclasses.replace(exported, _get_vjp=make)
    with patched():
        made = with_derivatives(own(exported), order - 1, patched)
    return dataclasses.replace(exported, _get_vjp=lambda primal: made)


def register_namedtuples(tree: Any) -> None:
    """Let ``jax.export`` write the named tuples in a tree, by the names that import them."""
    node = tree.node_data()
    kind = None if node is None else node[0]
    if kind is not None and issubclass(kind, tuple) and hasattr(kind, "_fields"):
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
    """The named tuple of a module."""
    found: Any = sys.modules.get(module)
    if found is None:
        if module.split(".")[0] != "jax":  # a file must not choose what is imported
            raise ImportError(f"import {module} before you load the file")
        found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, tuple) or not hasattr(found, "_fields"):
        raise ImportError(f"the module {module!r} has no NamedTuple {name!r}")
    return found


@functools.cache
def _register(kind: type[Any]) -> None:
    with contextlib.suppress(ValueError):  # the user has registered it
        name = f"{_NAMED}{kind.__module__}:{kind.__qualname__}"
        jax.export.register_namedtuple_serialization(kind, serialized_name=name)
