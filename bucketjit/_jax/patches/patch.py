"""A replacement of one function of JAX, with the reasons for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """What stands in the place of something of JAX while a function is traced.

    Attributes:
        owner: The module, class or table (a dict) that holds it.
        name: Under which name, or key, it is held there.
        replacement: What stands there instead.
        why: Why the original does not do.
        since: Where JAX has it, and since which version.
        delete_when: What JAX has to do for this patch to be deleted.
    """

    owner: Any
    name: Any
    replacement: Any
    why: str
    since: str
    delete_when: str
