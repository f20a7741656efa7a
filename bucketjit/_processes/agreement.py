"""Calls that all processes of a job make in the same bucket.

    process 0    sign, resolve, decide    b=8  ┐                    ┌ b=16    run
    process 1    sign, resolve, decide    b=16 ┘ exchange, largest  └ b=16    run

Nothing that is known to one process alone decides what it runs: no stand-in takes the place of the
agreed bucket, and the first call of a bucket begins only when all processes have its executable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from bucketjit._compile.argument_types import without_values
from bucketjit._compile.executable import Executable, SignatureChanged
from bucketjit._config import Agreed, Check, is_int_from
from bucketjit._events import shown
from bucketjit._jax.arrays import NotPlaced
from bucketjit._jax.coordination import StoreLost
from bucketjit._processes.identity import described, differences, digest_of_call, name_of_executable
from bucketjit._processes.job import Job, this_job
from bucketjit._processes.on_shards import OnShards, no_exact_shape, outside_of_meshes
from bucketjit._processes.proposal import EQUAL_CALLS, Kind, Proposal, Round
from bucketjit._processes.recall import Given, Recall
from bucketjit._processes.split_rows import ShardedCall
from bucketjit._raised import first_line, in_one_line
from bucketjit._runtime.decisions import Because, Decision, Exact, Masked, Refused
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.fast_path.handler import Evicted
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._tracing.interface import Interface
from bucketjit.errors import (
    AgreementError,
    BucketOverflowError,
    FallbackError,
    MaskingError,
    SpecError,
)


class Considered(NamedTuple):
    """A call of this process, before the others are asked.

    Attributes:
        signed: The call.
        call: The same call, resolved; on shards, that of the largest one of this process.
        proposal: What the others are told.
        error: The error that says why it has no bucket, if there is one.
        sharded: The calls of the shards of this process; None without shards.
    """

    signed: SignedCall
    call: ResolvedCall
    proposal: Proposal
    error: Exception | None = None
    sharded: ShardedCall | None = None


@dataclass
class Expected:
    """A batch whose bucket was agreed on ahead of its call.

    Attributes:
        leaves: The arrays of the batch, which are recognised by their identity.
        considered: The call that was proposed; None if the call itself has to be agreed on.
        round: What the processes proposed.
        seen: The first call since the batch.
        calls: How many calls there were since the batch.
    """

    leaves: Sequence[Any]
    considered: Considered | None
    round: Round
    seen: Considered | None = None
    calls: int = 0

    @property
    def place(self) -> str:
        """Where in the loop this process is."""
        return f"call {self.calls} of batch {self.round.step}"


class Agreement:
    """Runs the calls of one engine together with the other processes.

    Args:
        chosen: What the user chose.
        shards: Runs a function of one shard; None for a function of whole calls.

    Attributes:
        expected: The batch whose call comes next, in a loop over `agreed_batches`; None outside.
    """

    def __init__(self, chosen: Agreed, shards: OnShards | None = None) -> None:
        self._chosen = chosen
        self._shards = shards
        self._active: bool | None = True if callable(chosen.by) or shards is not None else None
        # The executables that all processes have: a name -> the key in the cache of this one.
        self._common: dict[str, tuple[weakref.ref[Interface], Any]] = {}
        self._digests: weakref.WeakKeyDictionary[Interface, str] = weakref.WeakKeyDictionary()
        self._recall: Recall[Considered] = Recall()
        self.expected: Expected | None = None

    @property
    def is_active(self) -> bool:
        """Whether calls are served here: not if there is one process, and no shards."""
        if self._active is None:
            self._active = jax.process_count() > 1
        return self._active

    @property
    def seconds(self) -> float:
        """How long to wait for other processes."""
        return self._chosen.timeout

    def job(self) -> Job | None:
        """The processes that agree; None if there is one, or a function knows the bucket."""
        if callable(self._chosen.by) or jax.process_count() == 1:
            return None
        return this_job()

    def serve(self, engine: Engine, given: Given) -> Any:
        """Run a call on all processes.

        Args:
            engine: The engine.
            given: Its arguments.

        Returns:
            The result.

        Raises:
            AgreementError: The processes do not agree.
            Exception: What a call raises; the other processes get an `AgreementError` then.
        """
        if self._shards is not None:
            with outside_of_meshes():
                return self._serve(engine, given)
        return self._serve(engine, given)

    def _serve(self, engine: Engine, given: Given) -> Any:
        job = self.job()
        step = 0 if job is None else job.number()
        try:
            considered, is_known = self._considered(engine, given)
        except BaseException as error:
            if job is not None:
                with contextlib.suppress(StoreLost):
                    job.calls.tell(Proposal(Kind.RAISED, why=in_one_line(error)).text())
            raise
        found = self._round_of(engine, considered, job, step)
        call, proposal = considered.call, considered.proposal
        if found.kinds == {Kind.EXACT}:
            return engine.serve(self._sign(engine, given))
        bucket = found.bucket()
        if callable(self._chosen.by):
            bucket = _told_by_user(engine.name, self._chosen.by, bucket)
        assert call.program is not None
        if not call.program.fits(bucket):
            told = dict.fromkeys(range(len(found.proposals)), f"would run at {shown(bucket)}")
            raise found.error(engine.name, told, "the program does not hold for these sizes")
        masked = Masked(call.program, bucket)
        name = name_of_executable(proposal.program, masked)
        try:
            handler = self._recall.handler(name, given) if is_known else None
            if handler is not None and (job is None or name in self._common):
                with contextlib.suppress(NotPlaced, Evicted):
                    result = handler.serve(*given)
                    return result
            return self._run(engine, considered, given, masked, found, job)
        except SignatureChanged:
            if not is_known:
                raise
        # An argument without open axes is of another type than in the call that is remembered.
        self._recall.forget()
        return self._serve(engine, given)

    def _run(
        self,
        engine: Engine,
        considered: Considered,
        given: Given,
        masked: Masked,
        found: Round,
        job: Job | None,
    ) -> Any:
        """Run a call in the agreed bucket, and remember it."""
        signed, call, proposal = considered.signed, considered.call, considered.proposal
        entry, is_compiled = self._executable(engine, considered, masked, found, job)
        out = engine.config.out
        if self._shards is not None:
            assert considered.sharded is not None
            whole, program = considered.sharded, masked.program
            result = self._shards.run(engine, whole, program, entry, is_compiled, out)
            signed = whole.signed
        else:
            served = engine.served(masked.key, entry, signed, call, out)
            result = engine.run(entry, signed, call, served, out, is_compiled)
            if engine.config.check is Check.OFF:
                name = name_of_executable(proposal.program, masked)
                self._recall.remember(engine, name, signed, call, given, served)
        if is_compiled:
            engine.recompiles.note(signed, call.sizes)
        return result

    def _sign(self, engine: Engine, given: Given) -> SignedCall:
        """Sign a call."""
        if self._shards is not None:
            return self._shards.sign(engine, given)
        return engine.signer.sign(*given)

    # --- what this process proposes ---

    def _considered(self, engine: Engine, given: Given) -> tuple[Considered, bool]:
        """A call with its proposal, and whether the proposal is that of an earlier call."""
        known = self._known(engine, given)
        if known is not None:
            lost = self._lost(engine)
            proposal = dataclasses.replace(known.proposal, lost=lost)
            return known._replace(proposal=proposal), True
        job = self.job()
        with nullcontext() if job is None else job.busy(self.seconds):  # it may be traced now
            signed = self._sign(engine, given)
            considered = self.consider(engine, signed)
        if considered.proposal.kind is Kind.BUCKET:
            kept, whole = without_values(signed), considered.sharded
            whole = None if whole is None else dataclasses.replace(whole, given=kept)
            remembered = considered._replace(signed=kept, sharded=whole)
            self._recall.propose(signed, considered.call, given, remembered)
        return considered, False

    def _known(self, engine: Engine, given: Given) -> Considered | None:
        """An earlier call of the same shapes, with the arrays of this one.

        The types of arguments without open axes are not checked here: ``jit`` does it.
        """
        leaves, tree = engine.signer.flattened(*given)
        known = self._recall.proposed(engine, given, tree)
        if known is None:
            return None
        if self._shards is None or known.sharded is None:
            return known._replace(signed=known.signed.with_leaves(leaves))
        sharded = self._shards.again(known.sharded, leaves)
        return known._replace(signed=sharded.given, sharded=sharded)

    def consider(self, engine: Engine, signed: SignedCall) -> Considered:
        """Decide a call, as if it were made on this process alone.

        Args:
            engine: The engine.
            signed: The call.

        Raises:
            Exception: What the call would raise.
        """
        if self._shards is not None:
            return self._considered_on_shards(engine, self._shards, signed)
        call = engine.resolve(signed)
        if engine.config.check in (Check.EXACT, Check.EXACT_ALWAYS):
            raise SpecError(
                "check: processes that agree on a bucket have no common exact shape to compare "
                "with; use check='poison'"
            )
        return self._of_decision(engine, signed, call, engine.decide(signed, call))

    def _considered_on_shards(
        self, engine: Engine, shards: OnShards, signed: SignedCall
    ) -> Considered:
        """A call with the bucket of the largest shard of this process."""
        with outside_of_meshes():
            sharded = shards.cut(engine, signed)
        call = sharded.call
        digest = self._digest(engine, sharded.signed, call)
        try:
            bucket = shards.decided(engine, sharded).bucket
        except (FallbackError, BucketOverflowError) as error:
            proposal = Proposal(Kind.CANNOT, digest, why=in_one_line(error))
            return Considered(signed, call, proposal, error, sharded)
        lost = self._lost(engine)
        proposal = Proposal(Kind.BUCKET, digest, bucket, lost)
        return Considered(signed, call, proposal, None, sharded)

    def _of_decision(
        self, engine: Engine, signed: SignedCall, call: ResolvedCall, decision: Decision
    ) -> Considered:
        """A call with what a decision proposes for it."""
        digest, error = self._digest(engine, signed, call), None
        why: str
        match decision:
            case Masked(program, bucket, None) if not program.is_checked_after_runs:
                lost = self._lost(engine)
                proposal = Proposal(Kind.BUCKET, digest, bucket, lost)
                return Considered(signed, call, proposal)
            case Exact(Because.NO_OPEN_AXIS):
                return Considered(signed, call, Proposal(Kind.EXACT, digest))
            case Masked(beyond=None):
                why = "a run decides by sizes that it computes"
            case Masked(beyond=beyond):
                why = str(beyond)
            case Exact(why=refusal):
                why = str(refusal)
            case Refused(refused):
                why, error = in_one_line(refused), refused
        return Considered(signed, call, Proposal(Kind.CANNOT, digest, why=why), error)

    def _digest(self, engine: Engine, signed: SignedCall, call: ResolvedCall) -> str:
        """The digest of a call; of one with a program it is computed once."""
        if call.program is None:
            return digest_of_call(engine, signed, call)
        known = self._digests.get(call.program)
        if known is None:
            known = digest_of_call(engine, signed, call)
            self._digests[call.program] = known
        return known

    def _lost(self, engine: Engine) -> list[str]:
        """The common executables that this process has no more."""
        kept = engine.cache
        return [name for name, (of, bucket) in self._common.items() if (of(), bucket) not in kept]

    # --- what all processes propose ---

    def _round_of(
        self, engine: Engine, considered: Considered, job: Job | None, step: int
    ) -> Round:
        """What all processes propose for a call, if they can run it together."""
        if job is None:
            if considered.error is not None:
                raise considered.error
            alone = Round("call", step, [considered.proposal], self.seconds)
            alone.require(engine.name, Kind.BUCKET, Kind.EXACT)
            return alone
        found = self._ahead(considered)
        if found is None:
            place = "" if self.expected is None else self.expected.place
            mine = dataclasses.replace(considered.proposal, place=place)
            found = self._asked(engine, job, mine, step)
        try:
            found.require(engine.name, Kind.BUCKET, Kind.EXACT)
        except AgreementError as error:
            raise error from considered.error
        proposals = [x for x in found.proposals if x is not None]
        if len({x.place for x in proposals}) > 1:
            told = {i: f"makes {x.place or 'a call outside'}" for i, x in enumerate(proposals)}
            raise found.error(engine.name, told, EQUAL_CALLS)
        if len({(x.kind, x.program) for x in proposals}) > 1:
            self._tell_difference(engine, considered, job, found)
        for name in found.lost():
            self._common.pop(name, None)
        return found

    def _asked(self, engine: Engine, job: Job, mine: Proposal, step: int) -> Round:
        """Exchange proposals about a call."""
        try:
            messages = job.calls.exchange(mine.text(), self.seconds)
        except StoreLost as error:
            raise store_lost(engine.name, "call", step, error) from None
        return Round.of("call", step, messages, self.seconds, job.rank)

    def _ahead(self, considered: Considered) -> Round | None:
        """The proposals of a batch that was agreed on ahead; None if the call has to ask.

        The first call after a batch takes its bucket if it fits into it. All processes know the
        bucket, so whether its arrays are those of the batch need not be the same on all of them.
        """
        expected = self.expected
        if expected is None:
            return None
        expected.calls += 1
        if expected.seen is not None:
            return None
        expected.seen = considered
        ahead, found = expected.considered, expected.round
        if ahead is None or Kind.LATER in found.kinds:
            return None
        mine, agreed = considered.proposal, found.bucket()
        fits = all(n <= agreed.get(v, 0) for v, n in mine.bucket.items())
        return found if fits and mine.program == ahead.proposal.program else None

    def _tell_difference(
        self, engine: Engine, considered: Considered, job: Job, found: Round
    ) -> None:
        """Raise the error for calls that differ; the processes describe theirs to each other."""
        mine = described(engine, considered.signed, considered.call)
        answer = Proposal(Kind.CANNOT, considered.proposal.program, why=json.dumps(mine))
        every = [
            None if x is None else json.loads(x.why)
            for x in self._asked(engine, job, answer, found.step).proposals
        ]
        raise found.error(engine.name, differences(every), EQUAL_CALLS)

    # --- the executable of the agreed bucket ---

    def _executable(
        self,
        engine: Engine,
        considered: Considered,
        masked: Masked,
        found: Round,
        job: Job | None,
    ) -> tuple[Executable, bool]:
        """The executable of a bucket, which all processes have when this returns."""
        signed, call = considered.signed, considered.call
        if considered.sharded is not None:
            largest = considered.sharded.with_program(masked.program)
            signed, call = largest.signed, largest.call

        def get() -> tuple[Executable, bool]:
            refused: MaskingError
            try:
                entry, source, _ = engine.provider.get(
                    masked.key,
                    lambda: engine.requests.masked(signed, call, masked.bucket),
                    may_stand_in=False,
                )
                return entry, source == "compile"
            except MaskingError as error:
                refused = error
            engine.refusals.note(masked.key, refused)
            raise refused if self._shards is None else no_exact_shape(refused)

        name = name_of_executable(considered.proposal.program, masked)
        if job is None:
            return get()
        if name in self._common:
            # Another call may have evicted it since the others were told what is there.
            with nullcontext() if masked.key in engine.cache else job.busy(self.seconds):
                return get()
        mine, failed = Proposal(Kind.READY), None
        try:
            with job.busy(self.seconds):
                got = get()
        except Exception as error:
            mine, failed = Proposal(Kind.RAISED, why=in_one_line(error)), error
        ready = self._asked(engine, job, mine, found.step)
        try:
            ready.require(engine.name, Kind.READY)
        except AgreementError as error:
            raise error from failed
        program, bucket = masked.key
        self._common[name] = weakref.ref(program), bucket
        return got


def store_lost(name: str, noun: str, step: int, error: StoreLost) -> AgreementError:
    """The error where the key-value store does not answer.

    Args:
        name: The name of the function.
        noun: ``"call"`` or ``"batch"``.
        step: Its number.
        error: What the store raised.
    """
    return AgreementError(
        f"{name}, {noun} {step}: process 0, which holds the key-value store, does not answer "
        f"({first_line(error)})",
        step,
        {0: "does not answer"},
    )


def _told_by_user(
    name: str, by: Callable[[dict[str, int]], Any], bucket: dict[str, int]
) -> dict[str, int]:
    """The bucket that the user's function says all processes have."""
    told = by(dict(bucket))
    good = isinstance(told, Mapping) and told.keys() == bucket.keys()
    if not good or not all(is_int_from(told[v], n) for v, n in bucket.items()):
        raise AgreementError(
            f"{name}: with_agreement(by=...) was given the bucket {shown(bucket)} and returned "
            f"{told!r}; it must return a dict of the same variables, with sizes that are at least "
            "as large"
        )
    return {v: int(told[v]) for v in bucket}
