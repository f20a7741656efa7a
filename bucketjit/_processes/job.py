"""The job that this process belongs to: the processes that ``jax.distributed`` has connected."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import jax

from bucketjit._jax.coordination import Store, StoreLost, client
from bucketjit._jax.names import Without, lacking
from bucketjit._processes.channel import PULSES, Channel, Messages, period
from bucketjit._processes.proposal import Kind, Proposal
from bucketjit._raised import in_one_line
from bucketjit.errors import AgreementError

_Asked = tuple[str, float, Future[Messages] | None]


class Job:
    """The processes of a job.

    Args:
        store: The key-value store.
        rank: The index of this process.
        count: How many processes there are.

    Attributes:
        rank: The index of this process.
        calls: The exchanges before calls, in the order of the calls of this process.
    """

    def __init__(self, store: Store, rank: int, count: int) -> None:
        self.rank = rank
        self._store = store
        self._numbers = itertools.count(1)
        self.calls = Channel(store, rank, count, "calls")
        # One thread makes the exchanges about batches, in the order in which loops ask for them:
        # the same order on all processes, also where loops are nested.
        self._batches = Channel(store, rank, count, "batches")
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        atexit.register(self._end)

    def number(self) -> int:
        """The number of the next call, counted from 1 over all functions."""
        return next(self._numbers)

    def ahead(self, message: str, seconds: float) -> Future[Messages]:
        """Begin an exchange about a batch, in another thread.

        Args:
            message: The message of this process.
            seconds: How long to wait for the others.
        """
        future: Future[Messages] = Future()
        self._ask((message, seconds, future))
        return future

    def leave(self, message: str) -> None:
        """Give a message for the next exchange about a batch, without waiting for the others.

        Args:
            message: Why there will be no batch.
        """
        self._ask((message, 0.0, None))

    def _ask(self, asked: _Asked) -> None:
        if self._thread is None:
            # A daemon: the end of the process does not wait for the exchange that is under way.
            self._thread = threading.Thread(
                target=self._exchange, name="bucketjit-agreement", daemon=True
            )
            self._thread.start()
        self._asked.put(asked)

    def _exchange(self) -> None:
        """What the thread runs."""
        while True:
            message, seconds, future = self._asked.get()
            if future is None:
                with contextlib.suppress(StoreLost):
                    self._batches.tell(message)
                continue
            try:
                future.set_result(self._batches.exchange(message, seconds))
            except BaseException as error:
                future.set_exception(error)

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """A context in which this process tells the others from time to time that it is alive.

        Args:
            seconds: How long the others wait without such a sign.
        """
        done = threading.Event()

        def beat() -> None:
            for count in itertools.count():
                if done.wait(period(seconds)):
                    return
                with contextlib.suppress(StoreLost):
                    self._store.set(f"{PULSES}/{self.rank}", f"{time.time()} {count}")

        thread = threading.Thread(target=beat, name="bucketjit-pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()

    def _end(self) -> None:
        """Tell the others at the end of this process, so that they need not wait for it."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        message = Proposal(Kind.ENDED, why="" if error is None else in_one_line(error)).text()
        with contextlib.suppress(StoreLost):
            self.calls.tell(message)
            self._batches.tell(message)


def this_job() -> Job:
    """The job of this process.

    Raises:
        AgreementError: There is none, or this version of JAX does not tell.
    """
    if lack := lacking(Without.AGREEMENT):
        raise AgreementError(f"processes cannot agree on a bucket: {lack}")
    found = client()
    if found is None:
        raise AgreementError(
            f"JAX has {jax.process_count()} processes, and they have no key-value store to agree "
            "by: call jax.distributed.initialize() first, or give with_agreement(by=...) a "
            "function that returns the bucket of all processes"
        )
    return _job_of(found)


@functools.lru_cache(maxsize=2)
def _job_of(found: Any) -> Job:
    """The job of a client of the store. Another ``jax.distributed.initialize`` makes another."""
    return Job(Store(found), jax.process_index(), jax.process_count())
