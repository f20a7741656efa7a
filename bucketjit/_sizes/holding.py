"""Which buckets hold the sizes of a call, and which of these is the smallest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

B = TypeVar("B", bound=Mapping[str, int])


def holds(bucket: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Whether a bucket is at least as large as a call along every variable of the call."""
    return all(bucket[v] >= n for v, n in sizes.items())


def smallest_holding(buckets: Iterable[B], sizes: Mapping[str, int]) -> B | None:
    """The bucket with the smallest product of its sizes, among those that hold a call."""
    fitting = (bucket for bucket in buckets if holds(bucket, sizes))
    return min(fitting, key=lambda bucket: math.prod(bucket.values()), default=None)
