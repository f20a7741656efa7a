"""The masking rules, one file per family; each file has a ``TABLE``.

``DEFAULT_RULES`` joins them. A primitive stands in one table only.
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
    "annotations",
    "paired",
    "refused",
)


@functools.cache
def default_rules() -> Mapping[Any, Rule]:
    """Masking rule of every primitive that bucketjit knows, by primitive (or by its name).

    Raises:
        RuntimeError: Two families claim one primitive.
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
