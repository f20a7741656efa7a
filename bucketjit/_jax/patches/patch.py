"""The record of a replacement of one function of JAX, with the reasons for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """A replacement of a function of JAX while a function of the user is traced.

    Attributes:
        owner: The module, class or table (a dict) that holds the original.
        name: The name, or key, of the original there.
        replacement: The value that takes its place.
        why: Why the original is not enough.
        since: The original's place in JAX, and since which version it is there.
        delete_when: The change of JAX after which this patch can be deleted.
    """

    owner: Any
    name: Any
    replacement: Any
    why: str
    since: str
    delete_when: str
