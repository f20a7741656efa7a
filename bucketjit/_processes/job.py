"""The job that this process belongs to: the processes that ``jax.distributed`` has connected."""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
import weakref
from typing import Any

import jax

from bucketjit._jax.coordination import Store, StoreLost, client
from bucketjit._jax.names import Without, lacking
from bucketjit._processes.channel import Channel
from bucketjit._processes.proposal import Kind, Proposal
from bucketjit._raised import in_one_line
from bucketjit.errors import AgreementError


class Job:
    """The processes of a job.

    Args:
        store: The key-value store.
        rank: The index of this process.
        count: How many processes there are.

    Attributes:
        rank: The index of this process.
        count: How many processes there are.
        calls: The exchanges before calls, in the order of the calls of this process.
    """

    def __init__(self, store: Store, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._store = store
        self._calls, self._loops = itertools.count(1), itertools.count()
        self._open: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._before: str | None = None
        self.calls = self._channel("calls")
        atexit.register(self._end)

    def number(self) -> int:
        """The number of the next call, counted from 1 over all functions."""
        return next(self._calls)

    def batches(self) -> Channel:
        """A channel for the exchanges of one loop over batches."""
        name = f"batches.{next(self._loops)}"
        channel, self._before = self._channel(name, self._before), name
        return channel

    def close(self, channel: Channel, message: str | None) -> None:
        """Leave a channel.

        Args:
            channel: The channel.
            message: Why, for processes that go on; None if all leave it.

        Raises:
            StoreLost: The store does not answer.
        """
        self._open.discard(channel)
        if message is not None:
            channel.tell(message)

    def _channel(self, name: str, before: str | None = None) -> Channel:
        channel = Channel(self._store, self.rank, self.count, name, before)
        self._open.add(channel)
        return channel

    def _end(self) -> None:
        """Tell the others at the end of this process, so that they need not wait for it."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        why = "" if error is None else in_one_line(error)
        for channel in list(self._open):
            try:
                channel.tell(Proposal(Kind.ENDED, why=why).text())
            except StoreLost:
                return


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
