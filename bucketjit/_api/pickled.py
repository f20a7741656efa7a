"""What a pickle has of a bucketed function: its name, or its function and its options.

    in a module, as step = bucketjit.jit(...)    module.step, which the other process imports
    elsewhere                                    the function, and the options that differ

Executables stay: the other process makes its own. `cloudpickle` and what is made of it pickle a
function of a script or a notebook, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bucketjit._config import Config


def global_name(value: Any) -> str | None:
    """The name of a value in its module; None if the module, or another process, has it not."""
    name = getattr(value, "__qualname__", "")
    with contextlib.suppress(AttributeError, KeyError):
        found = operator.attrgetter(name)(sys.modules[value.__module__])
        return name if found is value and value.__module__ != "__main__" else None
    return None


def options_of(config: Config) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """The options that differ from the defaults; and module, name and rule of primitives."""
    chosen = {
        field.name: dict(value) if isinstance(value, Mapping) else value
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) is not field.default
    }
    del chosen["fn"], chosen["rules"]
    return chosen, [(*_place_of(primitive), rule) for primitive, rule in config.rules.items()]


def configured(fn: Callable[..., Any], options: Mapping[str, Any], rules: Iterable[Any]) -> Config:
    """The configuration of a function and the options of a pickle."""
    table = {getattr(importlib.import_module(module), name): rule for module, name, rule in rules}
    return Config(fn, rules=table, **options)


def _place_of(primitive: Any) -> tuple[str, str]:
    """A module that has a primitive, and its name there: a copy would be another primitive."""
    for module, owner in list(sys.modules.items()):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if value is primitive:
                return module, name
    raise TypeError(
        f"with_rules: the primitive {primitive} is in no module, so its rule cannot be pickled; "
        "make it a global of a module that the other process imports"
    )
