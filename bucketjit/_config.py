"""Policies and the configuration of an executor."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

from bucketjit import strategies
from bucketjit._check import Check
from bucketjit._results import Out
from bucketjit._rule import Rule
from bucketjit.strategies.base import Strategy

DEFAULT_MAXSIZE = 128


class Fallback(enum.Enum):
    """What to do with a call that cannot be masked.

    Attributes:
        EXACT: Run it at its exact shape, warn once per reason, and count it.
        ERROR: Raise `FallbackError` with the reason.
    """

    EXACT = "exact"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything an executor is configured with; see `BucketedExec`."""

    fn: Callable[..., Any]
    dynamic_axes: Any = None
    constraints: tuple[str, ...] = ()
    static_argnums: Any = ()
    static_argnames: Any = ()
    donate_argnums: Any = ()
    fallback: Fallback = Fallback.EXACT
    check: Check = Check.OFF
    out: Out = Out.JAX
    default: Strategy = dataclasses.field(default_factory=strategies.Exact)
    per_dim: Mapping[str, Strategy] = dataclasses.field(default_factory=dict)
    rules: Mapping[Any, Rule] = dataclasses.field(default_factory=dict)
    maxsize: int | None = DEFAULT_MAXSIZE
