"""Whether the rows of a batch are computed at once, or one after the other.

One executable whose rows take turns serves every number of rows, so fewer are compiled. Rows that
take long are about as fast so, and short ones, or loops of small steps, are not. Both ways are
measured once for a program.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from bucketjit._compile.executable import Executable
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.rows.kinds import Batched, Kinds

_LEAST_FLOPS = 1e7  # of a row: a few milliseconds
_ROWS_IN_TURN, _TOKENS_IN_TURN = 16, 4096  # the most of an executable whose rows take turns
_LEAST_RUNS, _MOST_RUNS = 3, 16  # of a batch in each way
_MOST_SECONDS = 0.5  # after which no more runs begin
_WORTH_TURNS = 1.25  # how much longer a row may take, as fewer executables are compiled


def may_take_turns(engine: Engine, entry: Executable, way: Batched, kinds: Kinds) -> bool:
    """Whether it is worth finding out: for rows that take long, on one CPU.

    A batch of one row says nothing.
    """
    return (
        way.program not in engine.takes_turns
        and (entry.rows or 1) > 1
        and entry.flops >= _LEAST_FLOPS * (entry.rows or 1)
        and entry.on_host
        and kinds.sharding is None
        and not any(jax.dtypes.issubdtype(d, jax.dtypes.extended) for d, _ in way.program.out_types)
    )


def rows_in_turn(way: Batched) -> int:
    """How many rows an executable takes at most whose rows take turns."""
    most = max(1, _TOKENS_IN_TURN // way.tokens)
    return min(_ROWS_IN_TURN, 1 << (most.bit_length() - 1))


def is_faster_in_turn(at_once: Callable[[], Any], in_turn: Callable[[], Any], share: float) -> bool:
    """Compare a batch with the share of its rows that a run in turn takes.

    The ways take turns themselves, and the least of many runs counts. Elapsed time tells how many
    cores a way keeps busy, and on a busy machine also what others do; CPU time does not. So the
    mean of both ratios decides.
    """
    times: dict[Callable[[], Any], list[tuple[float, float]]] = {at_once: [], in_turn: []}
    until = time.perf_counter() + _MOST_SECONDS
    for i in range(_MOST_RUNS):  # the first run sets the executable up
        if i >= _LEAST_RUNS and time.perf_counter() > until:
            break
        for run, seconds in times.items():
            elapsed, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            seconds.append((time.perf_counter() - elapsed, time.process_time() - cpu))
    (elapsed, cpu), (own_elapsed, own_cpu) = (
        map(min, zip(*seconds, strict=True)) for seconds in times.values()
    )
    ratio = own_elapsed * own_cpu / max(elapsed * cpu, 1e-12)
    return ratio < (_WORTH_TURNS * share) ** 2
