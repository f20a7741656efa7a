"""Fits buckets for whole calls beside those for chunks, for the engine to measure which is faster.

It serves `BucketedExec.with_fitted_plan`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping

from bucketjit import strategies
from bucketjit._api.chunked_log import ChunkedLog
from bucketjit._config import Config, WholeCalls
from bucketjit._runtime.buckets import padded_sizes
from bucketjit.strategies.base import Strategy


def whole_calls(
    config: Config, log: ChunkedLog, k: int, cost: Callable[..., float] | None
) -> WholeCalls | None:
    """How calls would be served whole that a configuration cuts into chunks.

    Args:
        config: The configuration, with the buckets of chunks.
        log: The sizes of past calls, and how they are cut.
        k: The largest number of buckets.
        cost: What a chunk in a bucket costs, see `BucketedExec.with_fitted_plan`.

    Returns:
        The buckets of whole calls, and what all calls cost in either way; None if no call has more
        than one chunk.
    """
    dims = tuple(log.calls)
    calls = Counter(zip(*log.calls.values(), strict=True))

    def chunks_of(sizes: Mapping[str, int]) -> int:
        return math.prod(-(-sizes[dim] // chunk) for dim, chunk in log.chunks.items())

    def cost_of(sizes: Mapping[str, int]) -> float:
        rest = {dim: sizes[dim] for dim in log.sizes}
        rows = math.prod(sizes[dim] for dim in log.chunks)
        if cost is None or not rest:
            return float(rows * math.prod(rest.values()))
        return rows * (cost(**rest) if len(rest) > 1 else cost(*rest.values()))

    plan, fitted = None, dict[str, Strategy]()
    if len(dims) > 1:
        plan = strategies.Joint.fit(log.calls, k, cost=lambda **padded: cost_of(padded))
    else:
        fitted = {dim: strategies.Optimal.fit(values, k) for dim, values in log.calls.items()}
    made = WholeCalls(
        frozenset(dims),
        fitted,
        plan,
        {dim: config.per_dim[dim] for dim in dims if dim in config.per_dim},
        config.plan,
        cost_of,
        *(0.0, 0.0, 0.0),
    )
    whole = made.of(config)
    usual = in_chunks = at_once = 0.0
    for row, count in calls.items():
        sizes = dict(zip(dims, row, strict=True))
        one = padded_sizes(config, {**sizes, **{d: 1 for d in log.chunks}})
        usual += count * cost_of(sizes)
        in_chunks += count * chunks_of(sizes) * cost_of(one)
        at_once += count * cost_of(padded_sizes(whole, sizes))
    if all(chunks_of(dict(zip(dims, row, strict=True))) < 2 for row in calls):
        return None
    return dataclasses.replace(
        made, usual_cost=usual / calls.total(), chunks_cost=in_chunks, whole_cost=at_once
    )
