"""The masking rules, one file per family of primitives; each file has a ``TABLE``.

A ``TABLE`` maps names of primitives, or primitives of bucketjit, to rules. `default_rules` joins
the tables. A primitive stands in one table only. The first paragraph of a rule's docstring is shown
to users by ``explain`` and in ``docs/coverage.md``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bucketjit._jax.primitives import primitive
from bucketjit._masking.rule_context import Rule

FAMILIES = (
    *("elementwise", "reductions", "contractions", "ordering", "associative", "control", "shapes"),
    *("indexing", "scatter", "windows", "convolution", "fft", "random", "linalg", "effects"),
    *("shards", "refused"),
)

# Programs that use these import their modules, perhaps after the first call of `default_rules`.
_LATE = {"shard_map", "xla_metadata_value", "xla_metadata_call"}


@functools.cache
def default_rules() -> Mapping[Any, Rule]:
    """Masking rule of every primitive that bucketjit knows, by primitive (or by its name).

    The families are imported by the first call: importing them takes about 50 ms.
    """
    table: dict[Any, Rule] = {}
    for family in FAMILIES:
        rules = importlib.import_module(f"bucketjit._masking.rules.{family}").TABLE
        for key, rule in rules.items():
            by_name = not isinstance(key, str) or key in _LATE or family == "refused"
            found = key if by_name else primitive(key)
            if found in table:
                raise RuntimeError(f"two masking rules for {key}, one in rules/{family}.py")
            if found is not None:  # this JAX has it
                table[found] = rule
    return MappingProxyType(table)
