"""Leaves of arguments that are a part of their tree, and so static."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A pytree without leaves, which holds a static value.

    As in `jax.jit`, values of different types differ: ``1``, ``1.0``, ``True``.

    Attributes:
        value: The value.
    """

    value: Any

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or bool(self.value == other.value)


def without_static(leaf: Any) -> Any:
    """A leaf, or the static value that is in its place."""
    return leaf.value if isinstance(leaf, Static) else leaf
