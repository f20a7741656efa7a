"""fft (being written)."""

from __future__ import annotations

from typing import Any

from bucketjit._rule import Rule

TABLE: dict[Any, Rule] = {}
