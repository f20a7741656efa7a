"""The masking rules, one file per family of primitives; each file has a ``TABLE``.

A ``TABLE`` maps primitives, or their names, to rules. `default_rules` joins the tables. A primitive
stands in one table only. Modules whose names begin with an underscore hold what several families
share. The first paragraph of a rule's docstring is shown to users by ``explain`` and in
``docs/coverage.md``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bucketjit._masking.rule_context import Rule

FAMILIES = (
    "elementwise",
    "reductions",
    "contractions",
    "ordering",
    "cumulative",
    "associative",
    "control",
    "scan",
    "shapes",
    "reshape",
    "slicing",
    "indexing",
    "scatter",
    "windows",
    "convolution",
    "fft",
    "random",
    "linalg",
    "effects",
    "collectives",
    "shard_map",
    "annotations",
    "paired",
    "sized",
    "refused",
)


@functools.cache
def default_rules() -> Mapping[Any, Rule]:
    """Masking rule of every primitive that bucketjit knows, by primitive (or by its name).

    The families are imported by the first call: importing them takes about 50 ms.
    """
    table: dict[Any, Rule] = {}
    for family in FAMILIES:
        for primitive, rule in importlib.import_module(
            f"bucketjit._masking.rules.{family}"
        ).TABLE.items():
            if primitive in table:
                raise RuntimeError(f"two masking rules for {primitive}, one in rules/{family}.py")
            table[primitive] = rule
    return MappingProxyType(table)
