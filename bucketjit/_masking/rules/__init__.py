"""The masking rules, one file per family of primitives; each file has a ``TABLE``.

A ``TABLE`` maps names of primitives, or primitives of bucketjit, to rules. `default_rules` joins
the tables. A primitive stands in one table only. The first paragraph of a rule's docstring is shown
to users by ``explain`` and in ``docs/coverage.md``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from bucketjit._jax.jaxprs import primitive
from bucketjit._masking.rule_context import Rule

# Those that most programs use stand first.
FAMILIES = (
    *("elementwise", "reductions", "shapes", "contractions", "indexing", "control"),
    *("scatter", "windows", "convolution", "random", "fft", "linalg", "effects", "associative"),
    *("shards", "refused"),
)

# Programs that use these import their modules, perhaps after the first call of `default_rules`.
_LATE = {"shard_map", "xla_metadata_value", "xla_metadata_call"}


class _Rules(Mapping[Any, Rule]):
    """The rules of all families. They are imported in turn until one has the primitive."""

    def __init__(self) -> None:
        self._table: dict[Any, Rule] = {}
        self._imported: set[str] = set()

    def _join(self, family: str) -> None:
        """Add the table of a family. Threads may do so at the same time."""
        if family in self._imported:
            return
        rules = importlib.import_module(f"bucketjit._masking.rules.{family}").TABLE
        for key, rule in rules.items():
            by_name = not isinstance(key, str) or key in _LATE or family == "refused"
            prim = key if by_name else primitive(key)
            # Not where this JAX has no primitive of that name.
            if prim is not None and self._table.setdefault(prim, rule) is not rule:
                raise RuntimeError(f"two masking rules for {key}, one in rules/{family}.py")
        self._imported.add(family)

    def __getitem__(self, key: Any) -> Rule:
        for family in FAMILIES:
            if key in self._table:
                break
            self._join(family)
        return self._table[key]

    def __iter__(self) -> Iterator[Any]:
        for family in FAMILIES:
            self._join(family)
        return iter(self._table)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@functools.cache
def default_rules() -> Mapping[Any, Rule]:
    """Masking rule of every primitive that bucketjit knows, by primitive (or by its name)."""
    return _Rules()
