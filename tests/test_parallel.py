"""Jobs on several cores: who asks works on them too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import jax
import pytest

from bucketjit import _parallel
from bucketjit._parallel import run_together


@pytest.fixture(autouse=True)
def two_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    pool = ThreadPoolExecutor(2)
    monkeypatch.setattr(_parallel, "_helpers", lambda process: (2, pool))


def test_results_are_in_order() -> None:
    def job(i: int) -> Callable[[], int]:
        return lambda: (time.sleep(0.002 * (5 - i)), i)[1]

    assert run_together([job(i) for i in range(6)]) == list(range(6))
    assert run_together([]) == []


def test_others_help() -> None:
    meet = threading.Barrier(3)

    def job() -> int:
        meet.wait(timeout=30)  # nobody gets past it alone
        return threading.get_ident()

    assert len(set(run_together([job] * 3))) == 3


def test_who_asks_does_it_alone_if_nobody_is_free() -> None:
    free = threading.Event()
    busy = [threading.Event(), threading.Event()]
    _, pool = _parallel._helpers(0)
    assert pool is not None
    held = [pool.submit(lambda e=e: (e.set(), free.wait(30))) for e in busy]
    for event in busy:
        assert event.wait(30)
    me = threading.get_ident()
    assert run_together([threading.get_ident] * 4) == [me] * 4
    free.set()
    for future in held:
        future.result()


@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.debug_nans(True),
        lambda: jax.transfer_guard("allow"),
    ],
)
def test_nobody_helps_inside_a_context(context: Callable[[], AbstractContextManager]) -> None:
    def job() -> int:
        time.sleep(0.001)
        return threading.get_ident()

    with context():
        assert set(run_together([job] * 8)) == {threading.get_ident()}


def test_the_first_error_is_raised_and_nothing_runs_after_it() -> None:
    ran: list[int] = []

    def job(i: int) -> Callable[[], None]:
        def run() -> None:
            ran.append(i)
            if i == 1:
                raise KeyError("the second")
            time.sleep(0.005)

        return run

    with pytest.raises(KeyError, match="the second"):
        run_together([job(i) for i in range(50)])
    count = len(ran)
    assert count < 50
    time.sleep(0.02)
    assert len(ran) == count
    assert run_together([lambda: 1, lambda: 2]) == [1, 2]


def test_jobs_may_have_jobs() -> None:
    def outer(i: int) -> Callable[[], int]:
        return lambda: sum(run_together([lambda j=j: i * j for j in range(4)]))

    with ThreadPoolExecutor(8) as users:
        found = list(users.map(lambda _: run_together([outer(i) for i in range(5)]), range(16)))
    assert found == [[0, 6, 12, 18, 24]] * 16
