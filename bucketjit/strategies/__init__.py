"""Strategies: policies that round a logical size up to a bucket.

==================  ==========================================  ===============================
strategy            buckets                                     choose it for
==================  ==========================================  ===============================
``Pow2``            powers of two                               sizes of unknown spread
``Exponential``     powers of any base                          a share of padding to keep
``Linear``          multiples of a step                         a narrow range of sizes
``Boundaries``      the sizes you list                          a known distribution of sizes
``fit``             the best boundaries for the sizes seen      the least padding
``Auto``            those that the calls show to pay            sizes that nobody knows yet
``Exact``           every size                                  dimensions that hardly vary
==================  ==========================================  ===============================

`assess` returns how many executables a strategy needs for some sizes and how much it pads.
`buckets_of` lists the buckets of a strategy that has a largest one. Your own strategy is any object
with a ``bucket(n: int) -> int`` method that keeps the contract of :class:`Strategy`.
"""

import importlib
from typing import TYPE_CHECKING

from bucketjit.strategies.base import Strategy, checked_bucket
from bucketjit.strategies.rounding import (
    Auto,
    Boundaries,
    Exact,
    Exponential,
    Linear,
    Pow2,
    buckets_of,
)

if TYPE_CHECKING:
    from bucketjit.strategies.fitting import Assessment, assess, assess_joint, fit

__all__ = [
    "Assessment",
    "Auto",
    "Boundaries",
    "Exact",
    "Exponential",
    "Linear",
    "Pow2",
    "Strategy",
    "assess",
    "assess_joint",
    "buckets_of",
    "checked_bucket",
    "fit",
]


# Calls need none of these: their module is imported when they are first used.
_OF_FITTING = ("Assessment", "assess", "assess_joint", "fit")


def __getattr__(name: str) -> object:
    if name in _OF_FITTING:
        return getattr(importlib.import_module("bucketjit.strategies.fitting"), name)
    raise AttributeError(f"{__name__} has no {name!r}; choose from {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
