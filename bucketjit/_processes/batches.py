"""Batches whose buckets are agreed on one batch ahead, while the step before them runs.

    this thread     next batch 3 . yield batch 2 . the step of batch 2 . next batch 4 . yield 3 ..
    another one                    exchange for batch 3                  exchange for batch 4

The bucket of a batch is that of the call which takes it. So the first call of the loop is agreed on
when it is made, and shows where in its arguments the arrays of a batch are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import jax

from bucketjit._compile.argument_types import without_values
from bucketjit._jax.coordination import StoreLost
from bucketjit._processes.agreement import Agreement, Considered, Expected, store_lost
from bucketjit._processes.channel import Messages
from bucketjit._processes.job import Job
from bucketjit._processes.proposal import Kind, Proposal, Round
from bucketjit._raised import in_one_line
from bucketjit._runtime.engine import Engine
from bucketjit._signature.leaf_types import leaf_type
from bucketjit._signature.signer import SignedCall

T = TypeVar("T")


class _Fetched(NamedTuple):
    """A batch that was taken from the iterator, and the exchange about it.

    Attributes:
        batch: The batch.
        considered: The call that it will be an argument of, if that is known.
        error: What the iterator raised in its place.
        messages: Those of all processes.
    """

    batch: Any
    considered: Considered | None
    error: BaseException | None
    messages: Future[Messages]


def agreed_batches(engine: Engine, agreement: Agreement, batches: Iterable[T]) -> Iterator[T]:
    """Yield batches, each with its bucket agreed on while the batch before it was in use.

    Args:
        engine: Serves the calls that take the batches.
        agreement: Its agreement.
        batches: The batches of this process.

    Raises:
        AgreementError: A process has no batch where others have one, raises, ends, or leaves the
            loop.
        Exception: What ``batches`` raises, after the batches before it.
    """
    job = agreement.job() if agreement.is_active else None
    if job is None:
        yield from batches
        return
    loop = _Loop(engine, agreement, job, batches)
    try:
        yield from loop.run()
    finally:
        loop.close()


class _Loop:
    """One loop over batches."""

    def __init__(
        self, engine: Engine, agreement: Agreement, job: Job, batches: Iterable[Any]
    ) -> None:
        self._engine, self._agreement, self._job = engine, agreement, job
        self._batches = batches
        self._source: Iterator[Any] | None = None
        self._like: _Like | None = None  # a call that took a batch
        self._is_over = False

    def run(self) -> Iterator[Any]:
        """Yield the batches."""
        name, seconds, step = self._engine.name, self._agreement.seconds, 0
        current = self._fetch()
        while True:
            step += 1
            self._is_over = True  # unless there is a batch
            if current.error is not None:
                raise current.error
            try:
                found = Round.of("batch", step, current.messages.result(), seconds, self._job.rank)
            except StoreLost as error:
                raise store_lost(name, "batch", step, error) from None
            if found.kinds == {Kind.DONE}:
                found.require(name, Kind.DONE)
                return
            found.require(name, Kind.BUCKET, Kind.LATER, Kind.EXACT, Kind.CANNOT)
            self._is_over = False
            following = self._fetch()
            leaves = jax.tree_util.tree_leaves(current.batch)
            expected = Expected(leaves, current.considered, found)
            self._agreement.expected = expected
            yield current.batch
            if expected.seen is not None:
                self._like = _Like.of(expected.seen, leaves) or self._like
            current = following

    def close(self) -> None:
        """Leave the loop. Processes that go on with theirs learn it."""
        self._agreement.expected = None
        if not self._is_over:
            self._job.leave(Proposal(Kind.LEFT).text())

    def _fetch(self) -> _Fetched:
        """Take a batch from the iterator, and begin the exchange about it."""
        batch, considered, error = None, None, None
        try:
            if self._source is None:
                self._source = iter(self._batches)
            batch = next(self._source)
        except StopIteration:
            proposal = Proposal(Kind.DONE)
        except Exception as raised:
            proposal, error = Proposal(Kind.RAISED, why=in_one_line(raised)), raised
        else:
            considered = self._considered(batch)
            proposal = Proposal(Kind.LATER) if considered is None else considered.proposal
        messages = self._job.ahead(proposal.text(), self._agreement.seconds)
        return _Fetched(batch, considered, error, messages)

    def _considered(self, batch: Any) -> Considered | None:
        """The call that a batch will be an argument of; None if that is not known."""
        signed = None if self._like is None else self._like.with_batch(batch)
        if signed is None:
            return None
        try:
            return self._agreement.consider(self._engine, signed)
        except Exception:  # the call raises it again
            return None


class _Like(NamedTuple):
    """A call that took a batch.

    Attributes:
        signed: The call, without its arrays.
        places: The position among its leaves, and the position among those of the batch.
    """

    signed: SignedCall
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, seen: Considered, leaves: Sequence[Any]) -> _Like | None:
        """Remember a call; None if its arrays with open axes are not those of the batch.

        Args:
            seen: The call.
            leaves: The arrays of the batch.
        """
        signed = seen.signed
        index = {id(leaf): i for i, leaf in enumerate(leaves)}
        places = [(i, index[id(x)]) for i, x in enumerate(signed.leaves) if id(x) in index]
        opened = signed.signature.open_leaves(seen.call.tokens)
        if not opened or not {i for i, _ in places}.issuperset(opened):
            return None
        return cls(without_values(signed), tuple(places))

    def with_batch(self, batch: Any) -> SignedCall | None:
        """The same call with another batch; None if its arrays are of other types."""
        leaves = jax.tree_util.tree_leaves(batch)
        signed = self.signed
        given, shapes = list(signed.leaves), list(signed.shapes)
        for place, index in self.places:
            if index >= len(leaves):
                return None
            kind, shape = leaf_type(leaves[index], "")
            if kind != signed.signature.types[place]:
                return None
            given[place], shapes[place] = leaves[index], shape
        return dataclasses.replace(signed, leaves=given, shapes=shapes)
