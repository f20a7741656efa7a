"""The helper that runs several processes."""

from __future__ import annotations

import time
from typing import Any

from tests.processes.launch import run_processes


def places(rank: int, n: int) -> dict[str, Any]:
    import jax

    assert jax.process_index() == rank
    return {"local": len(jax.local_devices()), "all": len(jax.devices()), "n": n + rank}


def waits_or_fails(rank: int) -> str:
    if rank == 1:
        raise ValueError("of the second")
    time.sleep(60)
    return "has waited"


def test_each_process_has_its_rank_and_its_devices() -> None:
    found = [x.result for x in run_processes(places, 2, 5, devices=2)]
    assert found == [{"local": 2, "all": 4, "n": 5}, {"local": 2, "all": 4, "n": 6}]


def test_no_process_outlives_the_timeout() -> None:
    waiting, failed = run_processes(waits_or_fails, 2, timeout=12, all_succeed=False)
    assert waiting.code != 0 and waiting.result is None
    assert failed.code != 0 and "of the second" in failed.stderr
